# SPDX-License-Identifier: Apache-2.0
"""What transformers itself answers: the reference of the parity tests.

``HFOmni`` runs the model's own ``generate`` in float32, greedy in every stage, and records what
passes between the stages. Nothing is re-implemented: the sub-models' ``generate`` is wrapped for
the duration of one call.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL.Image import Image
from transformers import (
    AutoConfig,
    AutoProcessor,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeForConditionalGeneration,
)

SAMPLE_RATE = 24_000
MODELS = {
    "qwen2_5_omni": Qwen2_5OmniForConditionalGeneration,
    "qwen3_omni_moe": Qwen3OmniMoeForConditionalGeneration,
}


@dataclass(frozen=True)
class Media:
    """Decoded media in the order of the parts that stand for them in the messages.

    ``audios`` are mono float32 ``[n]`` at 16 kHz; ``videos`` are uint8 ``[T, H, W, 3]``. With
    ``audio_in_video`` the i-th video's sound is interleaved with it and stands in ``audios`` (in
    the order of the prompt), without a part of its own.
    """

    images: Sequence[Image] = ()
    audios: Sequence[np.ndarray] = ()
    videos: Sequence[np.ndarray] = ()
    audio_in_video: bool = False


@dataclass(frozen=True)
class Reference:
    """One request's results. T = prompt length + generated tokens - 1 (the last is never fed).

    ``embeds`` and ``hidden`` are float32 ``[T, H]`` thinker rows: the input embeddings (media
    features in place) and the layer that the talker accepts (Qwen3: ``accept_hidden_layer``;
    Qwen2.5: the last, after the final norm). ``talker_prompt`` is float32 ``[P, D]``: the
    rows that the talker's ``generate`` is given (Qwen3: talker width; Qwen2.5: embedding width,
    before projection and without the codec pad and start embeddings that its forward adds to the
    last two rows). ``frames`` is int64 ``[F, groups]``, without the end code. ``waveform``
    is float32 ``[N]``. They and the rows are ``None`` for text-only requests. ``margins`` are the
    least top-1 to top-2 logit distances of each greedy stage.
    """

    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    embeds: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    talker_prompt: torch.Tensor | None = None
    frames: torch.Tensor | None = None
    talker_finished: bool = False
    waveform: torch.Tensor | None = None
    sample_rate: int = SAMPLE_RATE
    margins: dict[str, float] = field(default_factory=dict)


class HFOmni:
    """A checkpoint in transformers, float32 on the CPU."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = AutoConfig.from_pretrained(self.path)
        self.family = self.config.model_type
        self.processor = AutoProcessor.from_pretrained(self.path)
        self.model = MODELS[self.family].from_pretrained(self.path, dtype=torch.float32).eval()
        if self.family == "qwen3_omni_moe":
            # transformers 5.19 reads audio_config.n_window here whenever a prompt holds both sound
            # and pictures, but neither the config class nor the published configs have it.
            self.model.talker.config.audio_config = self.config.thinker_config.audio_config
        tokenizer = self.processor.tokenizer
        self.end_token_id: int = tokenizer.eos_token_id
        self.pad_token_id: int = tokenizer.pad_token_id

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """The chat template's text, ending with the generation prompt."""
        return self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )

    def inputs(self, prompt: str, media: Media = Media(), **videos_kwargs: Any) -> dict[str, Any]:
        """The processor's tensors, batch of one, media placeholders expanded.

        Qwen3: sounds are first padded with zeros to a whole number of hops, as vLLM's processor
        does (transformers alone drops the last partial hop, one feature frame less).
        """
        audios = list(media.audios)
        if self.family == "qwen3_omni_moe":
            hop = self.processor.feature_extractor.hop_length
            audios = [np.pad(audio, (0, -len(audio) % hop)) for audio in audios]
        return dict(
            self.processor(
                text=prompt,
                images=list(media.images) or None,
                audio=audios or None,
                videos=list(media.videos) or None,
                use_audio_in_video=media.audio_in_video,
                return_tensors="pt",
                **videos_kwargs,
            )
        )

    @torch.no_grad()
    def run(
        self,
        messages: list[dict[str, Any]] | str,
        media: Media = Media(),
        *,
        audio: bool = True,
        speaker: str | None = None,
        max_tokens: int = 16,
        talker_max_tokens: int = 32,
        repetition_penalty: float = 1.0,
        ignore_eos: bool = False,
        noise_seed: int = 0,
        **videos_kwargs: Any,
    ) -> Reference:
        """Answer one chat (or one templated prompt string), greedily.

        ``talker_max_tokens`` bounds sampled layer-0 codes. Qwen3 loses the frame of the last one
        when the bound ends it (its residual codes are predicted in the next step), so at most
        ``talker_max_tokens - 1`` frames come back. ``ignore_eos`` keeps both the thinker and the
        talker from ending by themselves. ``noise_seed`` seeds the global generator right before
        Qwen2.5's token-to-wave, which draws its initial noise from it. ``max_tokens`` must be at
        least 2 with audio (Qwen2.5's ``generate`` fails on a reply of one token).
        """
        prompt = messages if isinstance(messages, str) else self.prompt(messages)
        inputs = self.inputs(prompt, media, **videos_kwargs)
        prompt_length = inputs["input_ids"].shape[1]
        options: dict[str, Any] = {
            "use_audio_in_video": media.audio_in_video,
            "thinker_max_new_tokens": max_tokens,
            "thinker_do_sample": False,
            "thinker_pad_token_id": self.pad_token_id,
            "thinker_eos_token_id": None if ignore_eos else self.end_token_id,
            "thinker_output_logits": True,
            "thinker_return_dict_in_generate": True,
        }
        if not audio:
            flag = "generation_mode" if self.family == "qwen2_5_omni" else "return_audio"
            options[flag] = "text" if self.family == "qwen2_5_omni" else False
        else:
            options |= self._talker_options(talker_max_tokens, repetition_penalty, ignore_eos)
            if speaker is not None:
                options["speaker"] = speaker
        with _recorded(self.model, noise_seed if audio else None) as calls:
            self.model.generate(**inputs, **options)

        thought = calls["thinker"].result
        sequence = thought.sequences[0].tolist()
        token_ids = sequence[prompt_length:]
        result = {
            "prompt": prompt,
            "prompt_token_ids": sequence[:prompt_length],
            "token_ids": token_ids,
            "text": self.processor.tokenizer.decode(token_ids, skip_special_tokens=True),
        }
        margins = {"thinker": _margin(thought.logits)}
        if audio:
            result |= self._speech(thought, calls, margins)
        return Reference(**result, margins=margins)

    def _talker_options(
        self, max_tokens: int, repetition_penalty: float, ignore_eos: bool
    ) -> dict[str, Any]:
        options: dict[str, Any] = {
            "talker_max_new_tokens": max_tokens,
            "talker_do_sample": False,
            "talker_repetition_penalty": repetition_penalty,
        }
        talker = self.config.talker_config
        if self.family == "qwen2_5_omni":
            pad, end = talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id
            options["talker_eos_token_id"] = [pad, end]
        if ignore_eos:
            options["talker_min_new_tokens"] = max_tokens
        return options

    def _speech(
        self, thought: Any, calls: dict[str, "_Call"], margins: dict[str, float]
    ) -> dict[str, Any]:
        talked = calls["talker"]
        layer = -1
        if self.family == "qwen3_omni_moe":
            layer = self.config.talker_config.accept_hidden_layer
            end = self.config.talker_config.codec_eos_token_id
            codes = [step[-1] for step in talked.result.hidden_states if step[-1] is not None]
            frames = torch.cat(codes)
            ids = talked.result.sequences[0]
            finished = bool(ids[-1] == end)
            margins["code_predictor"] = _margin(calls["code_predictor"].logits)
        else:
            ids = talked.result.sequences[0, talked.kwargs["input_ids"].shape[1] :]
            ends = torch.isin(ids, torch.tensor(talked.kwargs["eos_token_id"]))
            finished = bool(ends.any())
            length = int(ends.nonzero()[0, 0]) if finished else len(ids)
            frames = ids[:length, None]
        margins["talker"] = _margin(talked.logits)
        return {
            "embeds": torch.cat([step[0] for step in thought.hidden_states], dim=1)[0],
            "hidden": torch.cat([step[layer] for step in thought.hidden_states], dim=1)[0],
            "talker_prompt": talked.prompt_rows[0],
            "frames": frames,
            "talker_finished": finished,
            "waveform": calls["wave"].result.reshape(-1).float(),
        }

    @torch.no_grad()
    def waveform_one_shot(
        self, frames: torch.Tensor, *, speaker: str = "Chelsie", noise_seed: int = 0
    ) -> torch.Tensor:
        """Decode int64 ``[F, groups]`` frames in one call (no chunks); float32 ``[N]``.

        ``speaker`` and ``noise_seed`` matter to Qwen2.5 only.
        """
        if self.family == "qwen3_omni_moe":
            return self.model.code2wav(frames.T[None]).reshape(-1)
        voice = self.model.speaker_map[speaker]
        torch.manual_seed(noise_seed)
        return self.model.token2wav(
            frames.T, conditioning=voice["cond"], reference_mel=voice["ref_mel"]
        ).reshape(-1)


@dataclass
class _Call:
    """The recorded calls of one sub-model. ``prompt_rows`` are the first call's input rows."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    prompt_rows: torch.Tensor | None = None
    logits: list[torch.Tensor] = field(default_factory=list)


@contextmanager
def _recorded(model: Any, noise_seed: int | None) -> Iterator[dict[str, _Call]]:
    """Record what the stages of ``model`` are given and return; ``noise_seed=None``: text only."""
    calls: dict[str, _Call] = {}
    with ExitStack() as stack:

        def wrap(owner: Any, method: str, name: str, overrides: dict[str, Any]) -> None:
            inner = getattr(owner, method)
            call = calls.setdefault(name, _Call())

            def recorded(*args: Any, **kwargs: Any) -> Any:
                kwargs |= overrides
                rows = kwargs.get("inputs_embeds")
                if call.prompt_rows is None and rows is not None:
                    call.prompt_rows = rows
                call.kwargs, call.result = kwargs, inner(*args, **kwargs)
                logits = getattr(call.result, "scores", None)
                call.logits += [step[0] for step in logits or ()]
                return call.result

            stack.enter_context(mock.patch.object(owner, method, recorded))

        wrap(model.thinker, "generate", "thinker", {})
        if noise_seed is not None:
            scores = {"return_dict_in_generate": True, "output_scores": True}
            if hasattr(model, "code2wav"):
                wrap(model.talker, "generate", "talker", scores)
                wrap(model.talker.code_predictor, "generate", "code_predictor", scores)
                wrap(model.code2wav, "chunked_decode", "wave", {})
            else:
                _wrap_qwen2_5(model, stack, calls, wrap, scores, noise_seed)
        yield calls


def _wrap_qwen2_5(
    model: Any,
    stack: ExitStack,
    calls: dict[str, _Call],
    wrap: Any,
    scores: dict[str, Any],
    noise_seed: int,
) -> None:
    """Qwen2.5's ``generate`` takes the talker's bare sequences, and its decoder draws noise.

    It also hands the talker the thinker's pixels, which the talker does not use and transformers
    5.19 therefore rejects.
    """
    wrap(model.talker, "generate", "talker", scores)
    recorded = model.talker.generate

    def talk(**kwargs: Any) -> torch.Tensor:
        used = {key: value for key, value in kwargs.items() if not key.startswith("pixel_values")}
        return recorded(**used).sequences

    stack.enter_context(mock.patch.object(model.talker, "generate", talk))
    wrap(model.token2wav, "forward", "wave", {})
    decode = model.token2wav.forward

    def seeded(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(noise_seed)
        return decode(*args, **kwargs)

    stack.enter_context(mock.patch.object(model.token2wav, "forward", seeded))


def _margin(logits: Sequence[torch.Tensor]) -> float:
    """The least top-1 to top-2 distance over the steps; how safe greedy decoding is."""
    stacked = torch.stack([step.reshape(-1) for step in logits]).float()
    top = stacked.topk(2, dim=-1).values
    return float((top[:, 0] - top[:, 1]).min())
