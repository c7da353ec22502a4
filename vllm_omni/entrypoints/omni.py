# SPDX-License-Identifier: Apache-2.0
"""The offline front door: lists of prompts in, lists of outputs out."""

import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Self

import janus
import msgspec
from tqdm import tqdm
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.engine.launcher import LaunchedPipeline
from vllm_omni.engine.messages import Abort, Emit, ErrorMessage, Message, Submit
from vllm_omni.entrypoints.front_door import EngineClosedError, FrontDoor
from vllm_omni.entrypoints.requests import RequestFactory, StageParams
from vllm_omni.entrypoints.sounds import with_sounds_as_heard
from vllm_omni.entrypoints.speech import encoded_reference, speech_of
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import OmniDiffusionSamplingParams
from vllm_omni.inputs import ProgramInput
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.speech.family import EncodedReference

POLL_S = 1.0


class Omni(FrontDoor):
    """A pipeline for scripts. For its arguments see `FrontDoor`.

    Example:
        >>> prompt = "<|im_start|>user\\nHello!<|im_end|>\\n<|im_start|>assistant\\n"
        >>> with Omni(model="Qwen/Qwen3-Omni-30B-A3B-Instruct") as omni:
        ...     for output in omni.generate(prompt, output_modalities=["text", "audio"]):
        ...         print(output.final_output_type)

        In a script, under ``if __name__ == "__main__":``: on a GPU, stages are processes that
        import it.
    """

    def _open(self, launched: LaunchedPipeline) -> None:
        self._requests = RequestFactory(launched.plan, owner=True)
        self.pipeline = launched.plan.pipeline
        self._calls = threading.Lock()
        self._closed = False
        self._launched = launched
        # A script that ends without `close` ends its stages too, before vLLM's own exit handlers.
        weakref.finalize(self, launched.shutdown)
        self._engine = launched.engine
        self._speech = speech_of(launched)

    @property
    def voices(self) -> tuple[str, ...]:
        """Speakers that the checkpoint offers, the default one first."""
        return self._requests.voices if self._speech is None else self._speech.offer.voices

    def default_sampling_params(self) -> list[SamplingParams | None]:
        """Copies of every stage's defaults, to be changed and passed to `generate`."""
        return [None if p is None else p.clone() for p in self._requests.defaults]

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams
        | OmniDiffusionSamplingParams
        | Sequence[StageParams]
        | None = None,
        *,
        output_modalities: Sequence[str] | None = None,
        voice: str | None = None,
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput]:
        """Run prompts to their end, batched. Safe to call from several threads: one at a time runs.

        Args:
            prompts: One prompt or a list of them, as vLLM's `LLM.generate` takes; for sound, in
                the model's chat format.
            sampling_params: For the entry stage, or a list with one entry per stage.
            output_modalities: What to make; everything that the pipeline can, if None.
            voice: A speaker of the checkpoint.
            use_tqdm: Show progress.

        Returns:
            For each prompt in order, one output per modality; sound is joined to one piece.

        Raises:
            OmniClientError: A prompt or parameter is wrong. Prompts that run are aborted.
            EngineClosedError: `close` was called.
            EngineDeadError: A stage that it needs is gone.
        """
        self._check_open()
        batch = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
        modalities = output_modalities or self.pipeline.output_modalities
        single = isinstance(sampling_params, SamplingParams | OmniDiffusionSamplingParams)
        if not single and not isinstance(sampling_params, list | tuple | None):
            raise OmniClientError(
                "`sampling_params` should be SamplingParams (of a diffusion model: "
                "OmniDiffusionSamplingParams), or a list with one entry per stage, "
                f"not {type(sampling_params).__name__}",
                param="sampling_params",
            )
        entry, by_stage = (sampling_params, None) if single else (None, sampling_params)
        if self._speech is not None:
            batch = [
                self._speech.prompt_now(self._speech.request(each, voice), self._encoded)
                for each in batch
            ]
            voice = None
        ids = [f"omni-{uuid.uuid4().hex}" for _ in batch]
        submits = [
            _at_the_end(
                self._requests.make(
                    self._prepared(prompt),
                    request_id,
                    entry,
                    by_stage,
                    modalities,
                    voice,
                    time.monotonic(),
                    {},
                )
            )
            for request_id, prompt in zip(ids, batch, strict=True)
        ]
        with self._calls:  # all calls read the engine's one queue
            done = self._collect(submits, use_tqdm)
        return [output for request_id in ids for output in done[request_id]]

    def _prepared(self, prompt: Any) -> Any:
        generates = self.pipeline.entry.takes_generation
        return prompt if generates else with_sounds_as_heard(prompt)

    def _encoded(self, prompt: ProgramInput) -> EncodedReference:
        """What the codec stage makes of a recording."""
        submit = self._requests.make_encoding(prompt, f"reference-{uuid.uuid4().hex}")
        with self._calls:
            (outputs,) = self._collect([submit], use_tqdm=False).values()
        return encoded_reference(outputs)

    def _collect(self, submits: list[Submit], use_tqdm: bool) -> dict[str, list[OmniRequestOutput]]:
        """Run requests, as many at a time as the stages can work on."""
        outputs: dict[str, dict[str, list[OmniRequestOutput]]] = {
            submit.request_id: {} for submit in submits
        }
        waiting = set(outputs)
        if not waiting:
            return {}
        later = iter(submits)
        with tqdm(total=len(waiting), desc="Processed prompts", disable=not use_tqdm) as progress:
            try:
                for submit in islice(later, sum(pool.capacity for pool in self._engine.pools)):
                    self._engine.send(submit)
                for message in self._messages():
                    if isinstance(message, ErrorMessage):
                        if message.request_id in waiting or message.request_id is None:
                            self._check_open()  # by `close`, whatever has become of the request
                            raise message.to_exception()
                        continue
                    if not isinstance(message, Emit) or message.request_id not in waiting:
                        continue
                    output = message.output
                    by_modality = outputs[message.request_id]
                    by_modality.setdefault(output.final_output_type, []).append(output)
                    if message.last:
                        waiting.discard(message.request_id)
                        progress.update(1)
                        for submit in islice(later, 1):
                            self._engine.send(submit)
                    if not waiting:
                        break
            finally:
                if waiting:
                    self._engine.send(Abort(tuple(waiting)))
        order = (*self.pipeline.output_modalities, "reference")
        return {
            request_id: [
                OmniRequestOutput.join(by_modality[modality])
                for modality in order
                if modality in by_modality
            ]
            for request_id, by_modality in outputs.items()
        }

    def _messages(self) -> Iterator[Message]:
        while True:
            try:
                yield from self._engine.receive_sync(timeout=POLL_S)
            except janus.SyncQueueEmpty:
                if not self._engine.alive:
                    self._check_open()
                    raise EngineDeadError("Orchestrator process is not alive") from None

    def close(self) -> None:
        """Stop every stage. Idempotent."""
        self._closed = True
        self._launched.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("Omni")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _at_the_end(submit: Submit) -> Submit:
    """The request with text wanted once, at its end."""

    def final_only(params: SamplingParams | None) -> SamplingParams | None:
        if params is None:
            return None
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return params

    return msgspec.structs.replace(submit, params=tuple(map(final_only, submit.params)))
