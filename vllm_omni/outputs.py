# SPDX-License-Identifier: Apache-2.0
"""What comes out of a stage, and what a caller gets."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.handles import RowSpan, TensorHandle


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error that belongs to one request, as it travels between processes (row A-45)."""

    message: str
    status_code: int | None = None
    error_type: str | None = None
    param: str | None = None


NO_ROOM = ErrorInfo(
    message="shared memory is full: the stages of this request cannot exchange their tensors",
    status_code=int(HTTPStatus.SERVICE_UNAVAILABLE),
)
"""Of a request whose tensors a connector had no room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What an autoregressive stage produced for one request in one engine step.

    Attributes:
        request_id: The pipeline's request id.
        new_token_ids: Tokens sampled in this step (of the first completion, where n > 1).
        prompt_token_ids: The stage's whole prompt, multimodal placeholders expanded; None but in
            the first output of the request.
        shown_tokens: How many of all tokens so far the text shows for good; None if no stop string
            can cut it.
        spans: Rows emitted since the last output. They cover fed positions: the prompt and every
            sampled token that has been fed back, so they trail the tokens by one.
        finished: This is the request's last output.
        finish_reason: vLLM's (`stop`, `length`, ...), with the last output.
        error: The stage cannot go on with this request, which has not ended there.
        output: vLLM's own output object of this step, for final-output stages.
    """

    request_id: str
    new_token_ids: list[int]
    prompt_token_ids: list[int] | None = None
    shown_tokens: int | None = None
    spans: tuple[RowSpan, ...] = ()
    finished: bool = False
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    output: RequestOutput | None = None


class ProgramOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a program of the diffusion engine emitted for one request.

    Attributes:
        payload: The tensors (`audio`: float32 [samples], ...), or None in a bare end mark.
        modality: `audio`, `image`, `video`, ...
        meta: Facts about the payload (`sample_rate` in Hz, ...).
        finished: The program has ended; nothing follows.
        error: It ended by this error.
        get_s: Seconds that reading its input has taken since the output before.
    """

    request_id: str
    modality: str
    payload: TensorHandle | None = None
    meta: dict[str, int | float | str] = {}
    finished: bool = False
    error: ErrorInfo | None = None
    get_s: float = 0.0


StageOutput = TokenOutput | ProgramOutput


@dataclass(frozen=True, slots=True)
class StageMetrics:
    """Timing of one stage for one request, in seconds since the request arrived."""

    stage: str
    replica: int
    submitted_s: float
    first_output_s: float | None = None
    finished_s: float | None = None
    outputs: int = 0
    tokens: int = 0


@dataclass(slots=True)
class AudioOutput:
    """A piece of sound.

    Attributes:
        samples: float32 [n], mono, in [-1, 1].
        sample_rate: Hz.
    """

    samples: np.ndarray
    sample_rate: int


class OmniRequestOutput(RequestOutput):
    """One output of a request. It is vLLM's `RequestOutput`, so text consumers work unchanged.

    Attributes:
        stage_id: Index of the stage that made it.
        final_output_type: Its modality: `text`, `audio`, `image`, ...
        audio: The sound, if `final_output_type` is `audio`.
        stage_metrics: Per-stage timing; with the request's last output only.
        error_status_code: Set if the request failed through the client's fault (row A-45).
        error_type: See `error_status_code`.
    """

    def __init__(
        self,
        request_id: str,
        *,
        final_output_type: str,
        stage_id: int = 0,
        finished: bool = False,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
        outputs: list[CompletionOutput] | None = None,
        audio: AudioOutput | None = None,
        stage_metrics: tuple[StageMetrics, ...] = (),
        error_status_code: int | None = None,
        error_type: str | None = None,
        **request_output_fields: Any,
    ) -> None:
        super().__init__(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=request_output_fields.pop("prompt_logprobs", None),
            outputs=outputs or [],
            finished=finished,
            **request_output_fields,
        )
        self.stage_id = stage_id
        self.final_output_type = final_output_type
        self.audio = audio
        self.stage_metrics = stage_metrics
        self.error_status_code = error_status_code
        self.error_type = error_type

    @classmethod
    def from_request_output(
        cls, output: RequestOutput, final_output_type: str, stage_id: int
    ) -> "OmniRequestOutput":
        """The same output with our fields beside vLLM's; shares what it holds."""
        made = cls.__new__(cls)
        vars(made).update(vars(output))
        made.stage_id = stage_id
        made.final_output_type = final_output_type
        made.audio = None
        made.stage_metrics = ()
        made.error_status_code = None
        made.error_type = None
        return made

    @classmethod
    def join(cls, parts: "list[OmniRequestOutput]") -> "OmniRequestOutput":
        """One output out of a modality's successive ones: sound is joined, text is the last."""
        last = parts[-1]
        pieces = [part.audio for part in parts if part.audio is not None]
        if pieces:
            samples = np.concatenate([piece.samples for piece in pieces])
            last.audio = AudioOutput(samples, pieces[0].sample_rate)
        return last

    @property
    def multimodal_output(self) -> dict[str, Any]:
        """The non-text result, as vLLM-Omni's users read it: `{"audio": ndarray, "sr": Hz}`."""
        if self.audio is None:
            return {}
        return {"audio": self.audio.samples, "sr": self.audio.sample_rate}


@dataclass(frozen=True, slots=True)
class StageInfo:
    """What a caller may know about a running stage."""

    name: str
    stage_id: int
    engine: str
    replicas: int
    live_replicas: int
    final_output: str | None = None
