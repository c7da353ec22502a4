# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni (MoE): thinker -> talker -> code2wav.

Reference: `generate` of transformers' `Qwen3OmniMoeForConditionalGeneration`.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from transformers import PretrainedConfig, Qwen3OmniMoeConfig

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.errors import OmniClientError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import equal, token_ids, whole_number
from vllm_omni.pipelines.speech import NO_ROW, CodecEdge, TalkerEdge, TalkerPlan, find_voice

ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
DEFAULT_VOICE = "Ethan"
PROCESSOR_FILES = (("preprocessor_config.json", "processor_config.json"),)
ROLE_LENGTH = 3
"""`<|im_start|>assistant\\n`: the talker hears this much of the reply's turn, then its specials."""
CODEC_FLAG = 0x80
"""Bit of a kind: the codec embedding of the position's own token id is added."""


class RowKind(IntEnum):
    """What a talker position is made of (the low seven bits of a kind)."""

    TTS_PAD = 0
    """The thinker's embedding of `tts_pad`, projected as text."""
    TTS_BOS = 1
    """Likewise of `tts_bos`."""
    TTS_EOS = 2
    """Likewise of `tts_eos`: the text has ended."""
    TEXT = 3
    """The row's `embeds`, projected as text."""
    MEDIA = 4
    """The row's `hidden`, projected as media."""


def talker_constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The end code stops the talker; the thinker's end token means nothing to it."""
    return {
        "stop_token_ids": [config.talker_config.codec_eos_token_id],
        "ignore_eos": True,
        "detokenize": False,
    }


def voices(config: PretrainedConfig, model_dir: str) -> tuple[str, ...]:
    """Speakers of the checkpoint."""
    return tuple(config.talker_config.speaker_id or ())


def problems(config: Qwen3OmniMoeConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint that should speak."""
    talker, thinker = config.talker_config, config.thinker_config.text_config
    codes = talker.text_config.vocab_size
    codec = ("bos_id", "eos_token_id", "pad_id", "nothink_id", "think_bos_id", "think_eos_id")
    whose = "talker_config.text_config.vocab_size"
    names = [f"codec_{name}" for name in codec]
    yield from token_ids(talker.to_dict(), "talker_config.", names, codes, whose)
    voices = talker.speaker_id
    if not isinstance(voices, Mapping) or not voices:
        yield Problem("talker_config.speaker_id", voices, "should name at least one speaker")
    else:
        yield from token_ids(voices, "talker_config.speaker_id.", list(voices), codes, whose)
    text = ("im_start", "user", "assistant", "tts_pad", "tts_bos", "tts_eos")
    yield from token_ids(
        config.to_dict(),
        "",
        [f"{name}_token_id" for name in text],
        thinker.vocab_size,
        "thinker_config.text_config.vocab_size",
    )
    layers = thinker.num_hidden_layers
    yield from whole_number(
        "talker_config.accept_hidden_layer",
        talker.accept_hidden_layer,
        layers,
        f"the thinker has {layers} layers",
    )
    yield from equal(
        "talker_config.thinker_hidden_size",
        talker.thinker_hidden_size,
        "thinker_config.text_config.hidden_size",
        thinker.hidden_size,
    )
    yield from equal(
        "talker_config.num_code_groups",
        talker.num_code_groups,
        "code2wav_config.num_quantizers",
        config.code2wav_config.num_quantizers,
    )


def talker_plan(
    config: Qwen3OmniMoeConfig, voice: str | None, prompt_token_ids: Sequence[int]
) -> TalkerPlan:
    """The talker's prompt: the user's turns, then the head of the reply with its specials.

    Raises:
        OmniClientError: The prompt has no assistant turn to be spoken.
    """
    talker, thinker = config.talker_config, config.thinker_config
    starts = [i for i, token in enumerate(prompt_token_ids) if token == config.im_start_token_id]
    replies = [i for i in starts if prompt_token_ids[i + 1 : i + 2] == [config.assistant_token_id]]
    if not replies:
        raise OmniClientError(
            "audio output needs a chat prompt that ends with an assistant turn; use the chat "
            "template, or ask for text only",
            param="modalities",
        )
    media_ids = {thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id}
    rows: list[int] = []
    # What comes before the first turn belongs to a turn that starts at 0.
    turns = starts if starts[0] == 0 else [0, *starts]
    for start, stop in zip(turns, [*turns[1:], len(prompt_token_ids)], strict=True):
        if prompt_token_ids[start + 1 : start + 2] == [config.user_token_id]:
            rows += range(start, stop)
    kinds = [RowKind.MEDIA if prompt_token_ids[row] in media_ids else RowKind.TEXT for row in rows]
    reply = replies[-1]
    rows += range(reply, reply + ROLE_LENGTH)
    kinds += [RowKind.TEXT] * ROLE_LENGTH
    token_ids = [talker.codec_pad_id] * len(rows)

    speakers = talker.speaker_id
    specials = (
        (talker.codec_nothink_id, RowKind.TTS_PAD),
        (talker.codec_think_bos_id, RowKind.TTS_PAD),
        (talker.codec_think_eos_id, RowKind.TTS_PAD),
        (speakers[find_voice(voice, tuple(speakers), DEFAULT_VOICE)], RowKind.TTS_PAD),
        (talker.codec_pad_id, RowKind.TTS_BOS),
        (talker.codec_bos_id, RowKind.TEXT),
    )
    token_ids += [token for token, _ in specials]
    first_text = reply + ROLE_LENGTH
    rows += [NO_ROW] * (len(specials) - 1) + [first_text]
    return TalkerPlan(
        token_ids=token_ids,
        rows=rows,
        kinds=bytes([*kinds, *(kind | CODEC_FLAG for _, kind in specials)]),
        resume=first_text + 1,
        resume_kind=RowKind.TEXT,
        end_kind=RowKind.TTS_EOS,
    )


def thinker_to_talker(ctx: EdgeContext) -> TalkerEdge:
    """Rows of the user's turns and of the reply."""
    return TalkerEdge(ctx, lambda prompt: talker_plan(ctx.config, ctx.voice, prompt))


def talker_to_code2wav(ctx: EdgeContext) -> CodecEdge:
    """Codec frames, cut into windows.

    A frame is completed when its first code is fed, in transformers, so the last one of a stream
    that `max_tokens` ended is dropped.
    """
    talker = ctx.config.talker_config
    return CodecEdge(
        ctx,
        end_ids=frozenset({talker.codec_eos_token_id}),
        drops_unfed=True,
        policy=ChunkPolicy(initial=4, steady=25, left_context=25),
        options={"voice": find_voice(ctx.voice, tuple(talker.speaker_id), DEFAULT_VOICE)},
    )


THINKER_ARCH = "Qwen3OmniMoeThinkerForConditionalGeneration"
THINKER_SECTIONS = tuple(f"thinker_config.{each}_config" for each in ("text", "vision", "audio"))

PIPELINE = Pipeline(
    name="qwen3_omni_moe",
    architectures=(ARCHITECTURE,),
    stages=(
        Stage(
            "thinker",
            engine="ar",
            arch=THINKER_ARCH,
            shared_sections=THINKER_SECTIONS,
            config_name="thinker_config",
            emits=("embeds", "hidden:accept", "positions"),
            final_output="text",
            owns_tokenizer=True,
        ),
        Stage(
            "talker",
            engine="ar",
            arch="Qwen3OmniMoeTalker",
            shared_sections=("talker_config.text_config",),
            config_name="talker_config",
            needs="audio",
            emits=("codes",),
            row_driven=True,
            default_sampling={
                "temperature": 0.9,
                "top_k": 50,
                "top_p": 1.0,
                "repetition_penalty": 1.05,
                "max_tokens": 4096,
                "extra_args": {
                    "subtalker_sampling_params": {"temperature": 1.0, "top_k": 50, "top_p": 0.8}
                },
            },
            sampling_constraints=talker_constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:qwen3_omni",
            config_name="code2wav_config",
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
    name="qwen3_omni_moe_thinker_only",
    architectures=(ARCHITECTURE,),
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
