# SPDX-License-Identifier: Apache-2.0
"""What passes between the caller's side and the orchestrator's thread.

Both sides live in one process, so a message may hold any object by reference; a message to the
caller travels in the list of its engine step, one queue operation per step.
"""

from typing import Any

import msgspec

from vllm_omni.errors import OmniGenerateError, client_error_from_metadata
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import RowPrompt
from vllm_omni.outputs import OmniRequestOutput


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """Start a request.

    Attributes:
        request_id: Unique among live requests.
        prompt: For the entry stage, as vLLM takes it (rendered or raw).
        params: Sampling parameters by stage id; None for a stage that takes none.
        modalities: Output modalities that the caller wants.
        voice: Speaker in the checkpoint's spelling, or None for the default.
        arrival: `time.monotonic()` at the caller.
        entry_kwargs: Further keyword arguments for the entry stage (LoRA, priority, ...).
    """

    request_id: str
    prompt: Any
    params: tuple[Any, ...]
    modalities: frozenset[str]
    voice: str | None
    arrival: float
    entry_kwargs: dict[str, Any] = {}

    @property
    def beside(self) -> tuple[RowSpan, ...]:
        """What the prompt brings for the stage after the first."""
        return tuple(self.prompt.beside) if isinstance(self.prompt, RowPrompt) else ()

    @property
    def initial_frames(self) -> int | None:
        """Frames of the first window of sound, if the prompt says it."""
        return self.prompt.initial_frames if isinstance(self.prompt, RowPrompt) else None


class Abort(msgspec.Struct, frozen=True):
    """Stop requests; unknown ids are ignored."""

    request_ids: tuple[str, ...]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Run a coroutine method of every replica of some stages (profiling, cache resets, RPCs).

    The answer is a `CallResult` with the same id.
    """

    call_id: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    stages: tuple[str, ...] | None = None


class Shutdown(msgspec.Struct, frozen=True):
    """Stop everything and end the thread."""

    timeout: float | None = None


Command = Submit | Abort | Call | Shutdown


class Emit(msgspec.Struct, frozen=True):
    """An output of a request. `last` marks the request's very last one."""

    request_id: str
    output: OmniRequestOutput
    last: bool = False


class ErrorMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A request failed, or (without a request id and fatal) the whole engine did (B-11).

    Attributes:
        error: Text for the client if `status_code` blames it, else for the log.
        cause: The exception itself where it was raised in this process.
    """

    error: str
    request_id: str | None = None
    stage_id: int | None = None
    status_code: int | None = None
    error_type: str | None = None
    param: str | None = None
    fatal: bool = False
    cause: BaseException | None = None

    def to_exception(self) -> BaseException:
        """What the caller's side raises for it."""
        if self.cause is not None:
            return self.cause
        described = client_error_from_metadata(
            self.error, self.status_code, self.error_type, self.param
        )
        return described or OmniGenerateError(self.error)


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to a `Call`, one per live replica in stage order, or the error that it met."""

    call_id: str
    results: list[Any] = []
    error: BaseException | None = None


Message = Emit | ErrorMessage | CallResult
