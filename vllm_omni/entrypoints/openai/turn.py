# SPDX-License-Identifier: Apache-2.0
"""What a chat request asks for beyond vLLM's chat, checked against the running pipeline."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import random_uuid

from vllm_omni.config.pipeline import Pipeline
from vllm_omni.config.sampling import SAMPLING_KEYS
from vllm_omni.engine.sampling import overlaid
from vllm_omni.entrypoints.openai.protocol.chat import (
    DEFAULT_AUDIO_FORMAT,
    OmniChatCompletionRequest,
    VoiceId,
)
from vllm_omni.entrypoints.openai.stage_metrics import stages_told
from vllm_omni.errors import OmniClientError
from vllm_omni.media.audio_encode import check_format
from vllm_omni.outputs import StageMetrics

AUDIO_LIFETIME_S = 3600
_SAMPLING_KEYS = SAMPLING_KEYS - {"output_kind"}  # `stream` decides


class PipelineInfo(Protocol):
    """What is asked of the engine client to check a request."""

    pipeline: Pipeline
    voices: tuple[str, ...]

    def default_sampling_params(self, stage_id: int) -> SamplingParams | None: ...


@dataclass(slots=True)
class Turn:
    """One request's choices beyond text, and what is learnt while it runs.

    Attributes:
        modalities: What the client gets, in the request's order.
        audio_format: Format of the sound.
        voice: Speaker in the checkpoint's spelling, or None for its default.
        sampling: Overrides per stage; None if the request has none.
        information: Passed to the pipeline.
        wants_metrics: The client asked for the stages' timing.
        audio_id: Name of the sound.
        expires_at: When `audio_id` is forgotten, in Unix seconds.
        transcript: What is said in the sound.
        stage_metrics: Filled in with the request's last output.
    """

    modalities: tuple[str, ...]
    audio_format: str = DEFAULT_AUDIO_FORMAT
    voice: str | None = None
    sampling: list[dict[str, Any]] | None = None
    information: dict[str, Any] = field(default_factory=dict)
    wants_metrics: bool = False
    audio_id: str = field(default_factory=lambda: f"audio_{random_uuid()}")
    expires_at: int = field(default_factory=lambda: int(time.time()) + AUDIO_LIFETIME_S)
    transcript: str = ""
    stage_metrics: tuple[StageMetrics, ...] = ()

    @property
    def has_audio(self) -> bool:
        """Whether the client gets sound."""
        return "audio" in self.modalities

    @property
    def has_text(self) -> bool:
        """Whether the client gets text other than the sound's transcript."""
        return "text" in self.modalities

    @property
    def is_plain(self) -> bool:
        """Whether vLLM's own chat can serve it unchanged."""
        return not (self.has_audio or self.sampling or self.information or self.wants_metrics)

    def metrics(self) -> dict[str, Any]:
        """The stages' timing as the client gets it."""
        return {"stages": stages_told(self.stage_metrics)}


def read_turn(request: OmniChatCompletionRequest, engine: PipelineInfo) -> Turn:
    """Check a request's multi-stage fields and gather them.

    Raises:
        OmniClientError: A field is invalid; names it.
    """
    modalities = _modalities(request, engine.pipeline)
    audio = request.audio
    turn = Turn(
        modalities=modalities,
        audio_format=_audio_format(audio.format if audio else DEFAULT_AUDIO_FORMAT),
        voice=_voice(request, engine.voices),
        sampling=_sampling(request.sampling_params_list, engine.pipeline),
        information=_information(request),
        wants_metrics=request.return_stage_metrics,
    )
    if turn.has_audio:
        _check_audio_limits(request)
    return turn


def _modalities(request: OmniChatCompletionRequest, pipeline: Pipeline) -> tuple[str, ...]:
    known = pipeline.output_modalities
    wanted = request.modalities
    if wanted is None:
        wanted = ["text", "audio"] if request.audio and "audio" in known else ["text"]
    if not wanted:
        raise OmniClientError(
            f"`modalities` must name at least one of {list(known)}.", param="modalities"
        )
    for modality in wanted:
        if modality not in known:
            raise OmniClientError(
                f"`modalities`: {modality!r} is not supported by this model; "
                f"it gives {list(known)}.",
                param="modalities",
            )
    return tuple(dict.fromkeys(wanted))


def _audio_format(name: str) -> str:
    check_format(name.lower())
    return name.lower()


def _voice(request: OmniChatCompletionRequest, voices: Sequence[str]) -> str | None:
    given = request.audio.voice if request.audio else None
    candidates = {
        "audio.voice": given.id if isinstance(given, VoiceId) else given,
        "voice": request.voice,
        "speaker": request.speaker,
    }
    for param, name in candidates.items():
        if name is None:
            continue
        for voice in voices:
            if voice.lower() == name.lower():
                return voice
        offer = f"this model's voices are {list(voices)}" if voices else "this model has no voices"
        raise OmniClientError(f"`{param}`: unknown voice {name!r}; {offer}.", param=param)
    return None


def _information(request: OmniChatCompletionRequest) -> dict[str, Any]:
    information = dict(request.additional_information or {})
    for name, value in (("language", request.language), ("instructions", request.instructions)):
        if value is not None:
            information[name] = value
    return information


def _sampling(
    given: list[dict[str, Any] | None] | None, pipeline: Pipeline
) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    names = [stage.name for stage in pipeline.stages]
    if len(given) != len(names):
        raise OmniClientError(
            f"`sampling_params_list` must have one entry per stage ({len(names)}: {names}), "
            f"got {len(given)}.",
            param="sampling_params_list",
        )
    for i, entry in enumerate(given):
        unknown = sorted(set(entry or ()) - _SAMPLING_KEYS)
        if unknown:
            raise OmniClientError(
                f"`sampling_params_list.{i}` has unknown sampling parameters: {unknown}.",
                param=f"sampling_params_list.{i}.{unknown[0]}",
            )
    return [dict(entry or {}) for entry in given]


def _check_audio_limits(request: OmniChatCompletionRequest) -> None:
    if (request.n or 1) > 1:
        raise OmniClientError("`n` must be 1 when `modalities` has audio.", param="n")
    for i, entry in enumerate(request.sampling_params_list or ()):
        if (entry or {}).get("n", 1) != 1:
            raise OmniClientError(
                "`n` must be 1 when `modalities` has audio.", param=f"sampling_params_list.{i}.n"
            )
    if request.use_beam_search:
        raise OmniClientError(
            "`use_beam_search` cannot be used when `modalities` has audio.",
            param="use_beam_search",
        )


def stage_sampling_params(
    turn: Turn, engine: PipelineInfo, entry: SamplingParams, stream: bool
) -> tuple[SamplingParams, list[SamplingParams | None] | None]:
    """Lay the request's overrides over each stage's parameters.

    Args:
        turn: The request's choices.
        engine: Gives the defaults of the stages after the entry.
        entry: What vLLM's fields of the request (`temperature`, ...) make of the entry stage.
        stream: The text is streamed.

    Returns:
        The entry stage's, and one entry per stage (None where nothing was overridden), or None if
        nothing at all was.

    Raises:
        OmniClientError: A value is invalid; names it.
    """
    if turn.sampling is None:
        return entry, None
    entry_id = engine.pipeline.stage_id(engine.pipeline.entry.name)
    result: list[SamplingParams | None] = [None] * len(turn.sampling)
    for i, overrides in enumerate(turn.sampling):
        if not overrides:
            continue
        if i == entry_id:
            entry = _overlaid(entry, _bounded(overrides, entry), i)
            kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
            entry.output_kind = kind
        else:
            result[i] = _overlaid(_sampled(engine.default_sampling_params(i), i), overrides, i)
    return entry, result


def _sampled(defaults: SamplingParams | None, index: int) -> SamplingParams:
    if defaults is None:
        raise OmniClientError(
            f"`sampling_params_list.{index}` must be null or {{}}: the stage does not sample.",
            param=f"sampling_params_list.{index}",
        )
    return defaults


def _bounded(overrides: dict[str, Any], entry: SamplingParams) -> dict[str, Any]:
    """Keep `max_tokens` within what the prompt leaves of the context."""
    wanted = overrides.get("max_tokens")
    if not isinstance(wanted, int) or entry.max_tokens is None:
        return overrides
    return overrides | {"max_tokens": min(wanted, entry.max_tokens)}


def _overlaid(base: SamplingParams, overrides: dict[str, Any], index: int) -> SamplingParams:
    """The parameters with some replaced, types and ranges checked as vLLM does."""
    fields = {name: getattr(base, name) for name in _SAMPLING_KEYS}
    return overlaid(overrides, fields, f"sampling_params_list.{index}")
