# SPDX-License-Identifier: Apache-2.0
"""The offline front door: lists of prompts in, lists of outputs out."""

import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

import janus
import msgspec
from tqdm import tqdm
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.build import build_plan
from vllm_omni.engine.launcher import launch_pipeline
from vllm_omni.engine.messages import Abort, Emit, ErrorMessage, Message, Submit
from vllm_omni.entrypoints.requests import RequestFactory, StageParams
from vllm_omni.entrypoints.sounds import with_sounds_as_heard
from vllm_omni.entrypoints.speech import encoded_reference, speech_of
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import OmniDiffusionSamplingParams
from vllm_omni.inputs import ProgramInput
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.speech.family import EncodedReference

POLL_S = 1.0


class Omni:
    """A pipeline for scripts.

    Args:
        model: Folder or hub name of the checkpoint.
        deploy_config: A deploy YAML's path, the name of a packaged one, or a mapping.
        stage_overrides: By stage id or name.
        default_sampling_params: By stage id or name.
        async_chunk: Whether stages start before the one above has ended.
        stage_init_timeout: Seconds that one stage may take to start.
        init_timeout: Seconds that all of them may take.
        log_stats: Log vLLM's statistics.
        engine_args: Any stage key or engine argument of vLLM, for every stage that takes it.

    Raises:
        OmniConfigError: The configuration is wrong.
        StageStartError: A stage did not come up.

    Example:
        >>> prompt = "<|im_start|>user\\nHello!<|im_end|>\\n<|im_start|>assistant\\n"
        >>> with Omni(model="Qwen/Qwen3-Omni-30B-A3B-Instruct") as omni:
        ...     for output in omni.generate(prompt, output_modalities=["text", "audio"]):
        ...         print(output.final_output_type)

        In a script, under ``if __name__ == "__main__":``: on a GPU, stages are processes that
        import it.
    """

    def __init__(
        self,
        model: str,
        *,
        deploy_config: str | Path | Mapping[str, Any] | None = None,
        stage_overrides: str | Mapping[str, Any] | None = None,
        default_sampling_params: str | Mapping[str, Any] | None = None,
        async_chunk: bool | None = None,
        stage_init_timeout: float = 300.0,
        init_timeout: float = 600.0,
        log_stats: bool = False,
        **engine_args: Any,
    ) -> None:
        plan = build_plan(
            model,
            deploy_config=deploy_config,
            stage_overrides=stage_overrides,
            default_sampling_params=default_sampling_params,
            async_chunk=async_chunk,
            stage_init_timeout=stage_init_timeout,
            init_timeout=init_timeout,
            log_stats=log_stats,
            cli=engine_args,
            flag_style="{name}",
        )
        self._requests = RequestFactory(plan, owner=True)
        self.pipeline = plan.pipeline
        self._calls = threading.Lock()
        self._launched = launch_pipeline(plan)
        # A script that ends without `close` ends its stages too, before vLLM's own exit handlers.
        weakref.finalize(self, self._launched.shutdown)
        self._engine = self._launched.engine
        self._speech = speech_of(self._launched)

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
        """
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
                    raise EngineDeadError("Orchestrator process is not alive") from None

    def close(self) -> None:
        """Stop every stage. Idempotent."""
        self._launched.shutdown()

    def __enter__(self) -> Self:
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
