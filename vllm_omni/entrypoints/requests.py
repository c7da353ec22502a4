# SPDX-License-Identifier: Apache-2.0
"""From what a caller says to what the orchestrator takes: checks, defaults, parameters."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from vllm_omni.config.plan import DeploymentPlan, StagePlan
from vllm_omni.config.problems import did_you_mean
from vllm_omni.engine.messages import Submit
from vllm_omni.engine.sampling import (
    check_extra,
    check_frames,
    constrain,
    default_params,
    merge_request,
)
from vllm_omni.entrypoints.generation_inputs import generation_input, merged_params
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import Lora, OmniDiffusionSamplingParams
from vllm_omni.inputs import ProgramInput
from vllm_omni.speech.family import REFERENCE

StageParams = SamplingParams | OmniDiffusionSamplingParams | Mapping[str, Any] | None
"""What a caller may say about one stage."""

ENTRY_KWARGS: Mapping[str, type] = {
    "prompt_text": str,
    "lora_request": LoRARequest,
    "tokenization_kwargs": Mapping,
    "trace_headers": Mapping,
    "priority": int,
    "data_parallel_rank": int,
    "session_id": str,
    "kv_hints": object,
    "reasoning_ended": bool,
    "reasoning_parser_kwargs": Mapping,
}
"""Further arguments of vLLM's `EngineClient.generate`, which go to the entry stage."""


class RequestFactory:
    """Makes `Submit` messages for one deployment.

    Args:
        plan: The deployment.
        owner: Requests come from whoever owns this machine: they may name its files.
    """

    def __init__(self, plan: DeploymentPlan, *, owner: bool = False) -> None:
        self._owner = owner
        self._pipeline = plan.pipeline
        self._entry_id = self._pipeline.stage_id(self._pipeline.entry.name)
        self._constraints = [_constraints(stage, plan) for stage in plan.stages]
        self.defaults: list[SamplingParams | None] = [
            default_params(stage.default_sampling, constraints) if _samples(stage) else None
            for stage, constraints in zip(plan.stages, self._constraints, strict=True)
        ]
        self._entry_defaults = plan.entry.default_sampling
        self.voices = _voices(plan)

    def make(
        self,
        prompt: Any,
        request_id: str,
        sampling_params: SamplingParams | OmniDiffusionSamplingParams | None,
        sampling_params_list: Sequence[StageParams] | None,
        output_modalities: Sequence[str],
        voice: str | None,
        arrival: float,
        entry_kwargs: dict[str, Any],
    ) -> Submit:
        """A request for the orchestrator.

        Raises:
            OmniClientError: Naming the field at fault.
        """
        _check_kwargs(entry_kwargs)
        modalities = self._modalities(output_modalities)
        if self._pipeline.entry.takes_generation:
            given, field = self._entry_params(sampling_params, sampling_params_list)
            generation = merged_params(self._entry_defaults, given, field)
            if generation.lora is not None and not self._owner:
                _check_lora(generation.lora, field)
            return Submit(
                request_id=request_id,
                prompt=generation_input(prompt, generation),
                params=(None,) * len(self.defaults),
                modalities=modalities,
                voice=None,
                arrival=arrival,
                entry_kwargs=entry_kwargs,
            )
        params = self._params(sampling_params, sampling_params_list)
        entry = params[self._entry_id]
        if modalities != {"text"} and isinstance(entry, SamplingParams) and entry.n > 1:
            raise OmniClientError("n > 1 is for text only: ask for one at a time", param="n")
        for stage_id, other in enumerate(params):
            if stage_id != self._entry_id and other is not None and other.n != 1:
                raise OmniClientError(
                    "only the first stage can give more than one completion",
                    param=f"sampling_params_list.{stage_id}.n",
                )
        return Submit(
            request_id=request_id,
            prompt=prompt,
            params=params,
            modalities=modalities,
            voice=self._voice(voice),
            arrival=arrival,
            entry_kwargs=entry_kwargs,
        )

    def make_encoding(self, prompt: ProgramInput, request_id: str) -> Submit:
        """A request for what the codec makes of a recording."""
        return Submit(
            request_id=request_id,
            prompt=prompt,
            params=(None,) * len(self.defaults),
            modalities=frozenset({REFERENCE}),
            voice=None,
            arrival=time.monotonic(),
        )

    def _entry_params(self, entry: Any, by_stage: Sequence[Any] | None) -> tuple[Any, str]:
        """What was said about the entry stage, and in which field."""
        if entry is not None or by_stage is None:
            return entry, "sampling_params"
        if len(by_stage) != len(self.defaults):
            raise OmniClientError(
                f"one entry per stage is wanted: {len(self.defaults)}, got {len(by_stage)}",
                param="sampling_params_list",
            )
        return by_stage[self._entry_id], f"sampling_params_list.{self._entry_id}"

    def _modalities(self, wanted: Sequence[str]) -> frozenset[str]:
        if isinstance(wanted, str) or not isinstance(wanted, Iterable):
            raise _wrong_type("output_modalities", "a list of names", wanted, param="modalities")
        wanted = tuple(wanted)
        known = self._pipeline.output_modalities
        for modality in wanted:
            if modality not in known:
                raise OmniClientError(
                    f"unknown output modality {modality!r}: this model makes {', '.join(known)}",
                    param="modalities",
                )
        if not wanted:
            raise OmniClientError("ask for at least one output modality", param="modalities")
        return frozenset(wanted)

    def _voice(self, voice: str | None) -> str | None:
        if voice is None:
            return self.voices[0] if self.voices else None
        if not isinstance(voice, str):
            raise _wrong_type("voice", "a name or None", voice, param="audio.voice")
        for known in self.voices:
            if known.casefold() == voice.casefold():
                return known
        have = f"this model has {', '.join(self.voices)}" if self.voices else "this model has none"
        raise OmniClientError(f"unknown voice {voice!r}: {have}", param="audio.voice")

    def _params(
        self,
        entry: SamplingParams | None,
        by_stage: Sequence[SamplingParams | Mapping[str, Any] | None] | None,
    ) -> tuple[SamplingParams | None, ...]:
        stages = len(self.defaults)
        if entry is not None and not isinstance(entry, SamplingParams):
            raise _wrong_type("sampling_params", "SamplingParams or None", entry)
        if by_stage is not None and (
            not isinstance(by_stage, Sequence) or isinstance(by_stage, str | bytes)
        ):
            raise _wrong_type("sampling_params_list", "a list, one entry per stage,", by_stage)
        overrides = list(by_stage) if by_stage is not None else [None] * stages
        if len(overrides) != stages:
            raise OmniClientError(
                f"one entry per stage is wanted: {stages}, got {len(overrides)}",
                param="sampling_params_list",
            )
        if entry is not None:
            overrides[self._entry_id] = entry
        fields = [f"sampling_params_list.{i}" for i in range(stages)]
        if entry is not None:
            fields[self._entry_id] = "sampling_params"
        return tuple(
            self._stage_params(i, base, override, field)
            for i, (base, override, field) in enumerate(
                zip(self.defaults, overrides, fields, strict=True)
            )
        )

    def _stage_params(
        self, stage_id: int, base: SamplingParams | None, override: Any, field: str
    ) -> SamplingParams | None:
        if base is None:
            return None
        params = merge_request(base, override, field)
        # The entry stage's come from `vllm_xargs` of any of vLLM's routes.
        xargs = "vllm_xargs" if stage_id == self._entry_id else f"{field}.extra_args"
        check_extra(params, xargs)
        if self._pipeline.stages[stage_id].row_driven:
            check_frames(params, field)
        return constrain(params, self._constraints[stage_id])


def _check_kwargs(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        wanted = ENTRY_KWARGS.get(name)
        if wanted is None:
            raise OmniClientError(
                f"unknown argument {name!r}{did_you_mean(name, ENTRY_KWARGS)}", param=name
            )
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise _wrong_type(name, f"a {wanted.__name__}", value)


def _check_lora(lora: Lora, field: str) -> None:
    if lora.path is not None:
        raise OmniClientError(
            f"`{field}.lora.path`: name an adapter that the server knows; its operator says which "
            "(--lora-modules name=path)",
            param=f"{field}.lora.path",
        )


def _wrong_type(
    name: str, wanted: str, value: object, *, param: str | None = None
) -> OmniClientError:
    return OmniClientError(
        f"`{name}` should be {wanted}, not {type(value).__name__}", param=param or name
    )


def _samples(stage: StagePlan) -> bool:
    return stage.stage.engine == "ar"


def _constraints(stage: StagePlan, plan: DeploymentPlan) -> Mapping[str, Any]:
    make = stage.stage.sampling_constraints
    return {} if make is None else make(plan.hf_config)


def _voices(plan: DeploymentPlan) -> tuple[str, ...]:
    """The checkpoint's speakers, the default one first."""
    pipeline = plan.pipeline
    if pipeline.voices is None:
        return ()
    voices = pipeline.voices(plan.hf_config, plan.model)
    default = (pipeline.default_voice or "").casefold()
    return tuple(sorted(voices, key=lambda voice: voice.casefold() != default))
