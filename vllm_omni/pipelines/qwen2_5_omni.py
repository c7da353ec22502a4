# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni: thinker -> talker -> code2wav.

Reference: `generate` of transformers' `Qwen2_5OmniForConditionalGeneration`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from transformers import PretrainedConfig, Qwen2_5OmniConfig

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import equal, token_ids
from vllm_omni.pipelines.speakers import SPEAKERS_FILE, speakers
from vllm_omni.pipelines.speech import NO_ROW, CodecEdge, TalkerEdge, TalkerPlan, find_voice

ARCHITECTURES = ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel")
DEFAULT_VOICE = "Chelsie"
PROCESSOR_FILES = (("preprocessor_config.json", "processor_config.json"),)
CODEC_FLAG = 0x80
"""Bit of a kind: the codec embedding of the position's own token id is added."""


class RowKind(IntEnum):
    """What a talker position is made of (the low seven bits of a kind)."""

    TEXT_PAD = 0
    """The thinker's embedding of the text pad token."""
    TEXT_EOS = 1
    """Likewise of the text end token."""
    REPLY = 2
    """The row's `hidden` plus its `embeds`."""
    MEDIA = 3
    """The row's `hidden`."""
    SPEAKER = 8
    """`SPEAKER + k`: the thinker's embedding of the k-th speaker's start token."""


def voices(config: PretrainedConfig, model_dir: str) -> tuple[str, ...]:
    """Speakers of the checkpoint."""
    return tuple(speakers(model_dir))


def problems(config: Qwen2_5OmniConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint that should speak."""
    talker, thinker = config.talker_config, config.thinker_config.text_config
    dit = config.token2wav_config.dit_config
    yield from token_ids(
        talker.to_dict(),
        "talker_config.",
        [f"tts_codec_{name}_token_id" for name in ("pad", "start", "end", "mask")],
        talker.vocab_size,
        "talker_config.vocab_size",
    )
    whose = "thinker_config.text_config.vocab_size"
    yield from token_ids(
        talker.to_dict(),
        "talker_config.",
        ["tts_text_pad_token_id", "tts_text_end_token_id"],
        thinker.vocab_size,
        whose,
    )
    yield from equal(
        "talker_config.embedding_size",
        talker.embedding_size,
        "thinker_config.text_config.hidden_size",
        thinker.hidden_size,
    )
    for name, speaker in speakers(model).items():
        path = f"{SPEAKERS_FILE}: {name}"
        yield from token_ids(
            {"bos_token": speaker.bos_token}, f"{path}.", ["bos_token"], thinker.vocab_size, whose
        )
        yield from equal(
            f"{path}.cond's width",
            speaker.conditioning.shape[-1],
            "token2wav_config.dit_config.enc_emb_dim",
            dit.enc_emb_dim,
        )
        yield from equal(
            f"{path}.ref_mel's width",
            speaker.reference_mel.shape[-1],
            "token2wav_config.dit_config.mel_dim",
            dit.mel_dim,
        )


def talker_constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The pad and end codes stop the talker; the thinker's end token means nothing to it."""
    return {
        "stop_token_ids": sorted(_end_ids(config)),
        "ignore_eos": True,
        "detokenize": False,
    }


def talker_plan(
    config: Qwen2_5OmniConfig, speaker: int, prompt_token_ids: Sequence[int]
) -> TalkerPlan:
    """The talker's prompt: the thinker's whole prompt, a speaker mark and the reply's first token.

    Args:
        config: The checkpoint's config.
        speaker: Number of the speaker in the speakers' file.
        prompt_token_ids: The thinker's, placeholders expanded.
    """
    talker, thinker = config.talker_config, config.thinker_config
    media_ids = {thinker.audio_token_index, thinker.image_token_index, thinker.video_token_index}
    length = len(prompt_token_ids)
    kinds = [RowKind.MEDIA if t in media_ids else RowKind.REPLY for t in prompt_token_ids]
    return TalkerPlan(
        token_ids=[
            *[talker.tts_codec_mask_token_id] * length,
            talker.tts_codec_pad_token_id,
            talker.tts_codec_start_token_id,
        ],
        rows=[*range(length), NO_ROW, length],
        kinds=bytes([*kinds, RowKind.SPEAKER + speaker | CODEC_FLAG, RowKind.REPLY | CODEC_FLAG]),
        resume=length + 1,
        resume_kind=RowKind.REPLY,
        end_kind=RowKind.TEXT_EOS,
    )


def thinker_to_talker(ctx: EdgeContext) -> TalkerEdge:
    """Rows of the prompt and of the reply."""
    names = tuple(speakers(ctx.model))
    speaker = names.index(find_voice(ctx.voice, names, DEFAULT_VOICE))
    return TalkerEdge(ctx, lambda prompt: talker_plan(ctx.config, speaker, prompt))


def talker_to_code2wav(ctx: EdgeContext) -> CodecEdge:
    """Codec frames (one code each) for a decoder that needs them all.

    A model call looks two blocks back and one ahead, and the solver's calls build on each other, so
    every sample depends on the whole reply: exact sound is decoded at its end. A deployment that
    sets `codec_chunk_frames` trades that for an earlier start: the sound then comes in windows of
    whole attention blocks, each an approximation that more left context makes closer.
    """
    names = tuple(speakers(ctx.model))
    wants_windows = "codec_chunk_frames" in ctx.extra
    return CodecEdge(
        ctx,
        end_ids=_end_ids(ctx.config),
        drops_unfed=False,
        policy=block_windows(ctx.config) if wants_windows else ChunkPolicy.one_shot(),
        options={"voice": find_voice(ctx.voice, names, DEFAULT_VOICE)},
    )


def block_windows(config: Qwen2_5OmniConfig) -> ChunkPolicy:
    """Windows of whole attention blocks: what a stream of sound is cut into, if it is."""
    dit = config.token2wav_config.dit_config
    block = math.lcm(dit.block_size, dit.repeats) // dit.repeats
    return ChunkPolicy(
        initial=2 * block,
        steady=8 * block,
        left_context=4 * block,
        right_holdback=block,
        align=block,
    )


def _end_ids(config: PretrainedConfig) -> frozenset[int]:
    talker = config.talker_config
    return frozenset({talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id})


THINKER_ARCH = "Qwen2_5OmniThinkerForConditionalGeneration"
THINKER_SECTIONS = tuple(f"thinker_config.{each}_config" for each in ("text", "vision", "audio"))

PIPELINE = Pipeline(
    name="qwen2_5_omni",
    architectures=ARCHITECTURES,
    stages=(
        Stage(
            "thinker",
            engine="ar",
            arch=THINKER_ARCH,
            shared_sections=THINKER_SECTIONS,
            config_name="thinker_config",
            emits=("embeds", "hidden", "positions"),
            final_output="text",
            owns_tokenizer=True,
        ),
        Stage(
            "talker",
            engine="ar",
            arch="Qwen2_5OmniTalker",
            shared_sections=("talker_config",),
            config_name="talker_config",
            needs="audio",
            emits=("codes",),
            row_driven=True,
            default_sampling={
                "temperature": 0.9,
                "top_k": 40,
                "top_p": 0.8,
                "repetition_penalty": 1.05,
                "max_tokens": 4096,
            },
            sampling_constraints=talker_constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:qwen2_5_omni",
            config_name="token2wav_config",
            needs="audio",
            final_output="audio",
        ),
    ),
    edges=(
        Edge("thinker", "talker", thinker_to_talker),
        Edge("talker", "code2wav", talker_to_code2wav),
    ),
    voices=voices,
    default_voice=DEFAULT_VOICE,
    files=PROCESSOR_FILES,
    problems=problems,
)

THINKER_ONLY = Pipeline(
    name="qwen2_5_omni_thinker_only",
    architectures=ARCHITECTURES,
    stages=(
        Stage(
            "thinker",
            engine="ar",
            arch=THINKER_ARCH,
            shared_sections=THINKER_SECTIONS,
            config_name="thinker_config",
            final_output="text",
            owns_tokenizer=True,
        ),
    ),
    files=PROCESSOR_FILES,
)
