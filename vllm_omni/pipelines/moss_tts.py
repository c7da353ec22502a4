# SPDX-License-Identifier: Apache-2.0
"""MOSS-TTS (its delay model): moss_tts (rows of text and codes) -> moss_tts_codec (sound).

Reference: `processing_moss_tts.py` and `modeling_moss_tts.py` of the published checkpoints, whose
user message this lays out. Texts are said as they are: the reference's newer processor rewrites
some (numbers, marks) before.
"""

from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as brief
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.errors import OmniClientError, OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import token_ids, whole_number
from vllm_omni.pipelines.speech import CodecEdge
from vllm_omni.speech.delay import delayed
from vllm_omni.speech.family import EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.layout import Layout
from vllm_omni.speech.request import SpeechRequest
from vllm_omni.speech.text import first_control

ARCHITECTURE = "MossTTSDelayModel"
SAMPLE_RATE = 24000
"""Hz, of recordings and of the sound that is made."""
MAX_REFERENCES = 5
"""Speakers of a dialogue."""
LANGUAGES = (
    "Chinese",
    "English",
    "German",
    "Spanish",
    "French",
    "Japanese",
    "Italian",
    "Hungarian",
    "Korean",
    "Russian",
    "Persian",
    "Arabic",
    "Polish",
    "Portuguese",
    "Czech",
    "Danish",
    "Swedish",
    "Greek",
    "Turkish",
)
"""Of the model's card."""
LENGTH = "tokens"
WORDS = ("quality", "sound_event", "ambient_sound")
"""Further fields of a message: how many frames the sound should have, and what it is like."""
MAX_WORDS = 500
"""Characters of one."""
MAX_LENGTH = 40_960
"""Frames: positions of the published checkpoints."""
CONTENT = "\x00"
"""Stands for a message's content where the chat template is read."""
NONE = "None"
"""What a field without a value says."""


def delays(groups: int) -> tuple[int, ...]:
    """Of each group, in rows."""
    return tuple(range(groups))


def end_token(config: PretrainedConfig) -> int:
    """What counts as sampled with the last row; no code."""
    return int(config.audio_vocab_size + 1)


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The end of the sound stops the model."""
    return {"stop_token_ids": [end_token(config)], "ignore_eos": True, "detokenize": False}


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint."""
    if config.n_vq < 1:
        yield Problem("n_vq", config.n_vq, "should be at least 1")
    size = config.audio_vocab_size + 1
    yield from whole_number("audio_pad_code", config.audio_pad_code, size, "audio_vocab_size + 1")
    names = [
        "pad_token_id",
        "im_end_token_id",
        "audio_user_slot_token_id",
        "audio_assistant_gen_slot_token_id",
        "audio_assistant_delay_slot_token_id",
        "audio_start_token_id",
        "audio_end_token_id",
    ]
    words = config.language_config.vocab_size
    yield from token_ids(config.to_dict(), "", names, words, "language_config.vocab_size")


def _check_fields(request: SpeechRequest) -> None:
    """See that a message's further fields are what they should be.

    Raises:
        OmniClientError: One is not.
    """
    for name in (LENGTH, *WORDS):
        value = request.extra.get(name)
        wrong = None if value is None else (_length if name == LENGTH else _words)(value)
        if wrong is not None:
            raise OmniClientError(f"extra.{name}: {wrong}", param=f"extra.{name}")


def _length(value: Any) -> str | None:
    """What is wrong with a number of frames."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_LENGTH:
        return None
    return f"should be a whole number of frames, 1 to {MAX_LENGTH}, not {brief(value)}"


def _words(value: Any) -> str | None:
    """What is wrong with words."""
    if not isinstance(value, str):
        return f"should be words, not {brief(value)}"
    if len(value) > MAX_WORDS:
        return f"has {len(value)} characters, at most {MAX_WORDS} are taken"
    if (position := first_control(value)) is not None:
        return f"has the control character {value[position]!a} at position {position}"
    return None


class MossTTS:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.

    Raises:
        OmniConfigError: Its chat template is none of a message.
    """

    encoder_rate = SAMPLE_RATE
    offer = SpeechOffer(
        sample_rate=SAMPLE_RATE,
        languages=LANGUAGES,
        instructions=True,
        max_references=MAX_REFERENCES,
        speaker_embeddings=False,
        streams_text=False,
        reads_transcripts=False,
        extra=frozenset({LENGTH, *WORDS}),
        check=_check_fields,
    )

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        self._config = config
        self._tokenizer = tokenizer
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": CONTENT}], add_generation_prompt=True, tokenize=False
        )
        before, found, after = str(turn).partition(CONTENT)
        if not found:
            raise OmniConfigError(f"the chat template of {model!r} leaves out a message's content")
        self._before = self._special(before)
        self._after = self._special(after)

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`."""
        config = self._config
        made = _Rows(config)
        made.say(self._before)
        made.say(self._plain("<user_inst>\n- Reference(s):\n"))
        for index, encoded in enumerate(references):
            line = f"[S{index + 1}]:\n"
            made.say(self._plain(f"\n{line}" if index else line))
            made.sound(encoded["codes"])
        if not references:
            made.say(self._plain(NONE))
        made.say(self._plain(_fields(request)))
        made.say(self._after)
        return made.made(config.audio_pad_code)

    def _special(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain(self, text: str) -> list[int]:
        """Token ids of which none is special, whatever the text holds."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(ids["input_ids"])


def _fields(request: SpeechRequest) -> str:
    """What follows the references in a message."""
    extra = request.extra
    fields = {
        "Instruction": request.instructions,
        "Tokens": extra.get(LENGTH),
        "Quality": extra.get("quality"),
        "Sound Event": extra.get("sound_event"),
        "Ambient Sound": extra.get("ambient_sound"),
        "Language": request.language,
        "Text": request.text,
    }
    lines = [f"- {name}:\n{NONE if value is None else value}" for name, value in fields.items()]
    return "\n".join(["", *lines, "</user_inst>"])


class _Rows(Layout):
    """A prompt of which every position has a text token and a row of codes."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.n_vq)
        self._config = config
        self._padding = torch.full((1, config.n_vq), config.audio_pad_code, dtype=torch.int32)

    def say(self, ids: Sequence[int]) -> None:
        """Text tokens, without codes."""
        self.both(ids, self._padding.expand(len(ids), -1))

    def sound(self, rows: torch.Tensor) -> None:
        """Frames of a recording, int [n, groups], in their slots."""
        config, pad = self._config, self._config.audio_pad_code
        self.say([config.audio_start_token_id])
        slots = delayed(rows.int(), delays(config.n_vq), pad, pad)[:-1]
        self.both([config.audio_user_slot_token_id] * len(slots), slots)
        self.say([config.audio_end_token_id])


def rows_to_codec(ctx: EdgeContext) -> CodecEdge:
    """Rows of the delay pattern, and windows of the frames in them; before the sound begins, a row
    has no code."""
    return CodecEdge(
        ctx,
        end_ids=frozenset({end_token(ctx.config)}),
        drops_unfed=False,
        policy=ChunkPolicy(initial=2, steady=25),
        options={},
        lag=ctx.config.n_vq - 1,
        silent_id=ctx.config.audio_pad_code,
    )


PIPELINE = Pipeline(
    name="moss_tts",
    architectures=(ARCHITECTURE,),
    stages=(
        Stage(
            "moss_tts",
            engine="ar",
            arch="MossTTSTalker",
            shared_sections=("language_config",),
            emits=("codes",),
            row_driven=True,
            owns_tokenizer=True,
            default_sampling={
                "temperature": 1.7,
                "top_k": 25,
                "top_p": 0.8,
                "max_tokens": 4096,
            },
            sampling_constraints=constraints,
        ),
        Stage(
            "moss_tts_codec",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:moss_tts",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("moss_tts", "moss_tts_codec", rows_to_codec),),
    problems=problems,
    speech=MossTTS,
)
