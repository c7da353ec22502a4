# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS: talker (codec frames) -> code2wav (sound).

Reference: `generate` of the authors' package `qwen-tts` (`Qwen3TTSForConditionalGeneration`,
`Qwen3TTSModel`). Three kinds of checkpoint: CustomVoice (named speakers), VoiceDesign (a voice in
words) and Base (the voice of a recording).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import token_ids
from vllm_omni.pipelines.speech import CodecEdge
from vllm_omni.speech.family import NOTHING, EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.request import SpeechRequest

ARCHITECTURE = "Qwen3TTSForConditionalGeneration"
SAMPLE_RATE = 24000
"""Hz, of recordings and of the sound that is made."""
TASKS = {"base": "Base", "custom_voice": "CustomVoice", "voice_design": "VoiceDesign"}
"""`task_type`s, as users know them, by `tts_model_type`."""
AUTO = "Auto"
"""The language that is none in particular."""
DIALECT = "dialect"
"""In the names of languages that are spoken by certain speakers only."""
ROLE = "<|im_start|>assistant\n"
INSTRUCTIONS = "<|im_start|>user\n{}<|im_end|>\n"


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The end code stops the talker, but not before the second frame."""
    return {
        "stop_token_ids": [config.talker_config.codec_eos_token_id],
        "ignore_eos": True,
        "detokenize": False,
        "min_tokens": 2,
    }


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint."""
    if config.tts_model_type not in TASKS:
        known = ", ".join(TASKS)
        yield Problem("tts_model_type", config.tts_model_type, f"should be one of {known}")
    talker = config.talker_config
    names = ("bos_id", "eos_token_id", "pad_id", "think_id", "nothink_id", "think_bos_id")
    codes = talker.vocab_size
    yield from token_ids(
        talker.to_dict(),
        "talker_config.",
        [f"codec_{name}" for name in (*names, "think_eos_id")],
        codes,
        "talker_config.vocab_size",
    )
    for table in ("spk_id", "codec_language_id"):
        ids = talker.to_dict().get(table) or {}
        where = f"talker_config.{table}."
        yield from token_ids(ids, where, list(ids), codes, "talker_config.vocab_size")
    yield from token_ids(
        config.to_dict(),
        "",
        ["tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id"],
        talker.text_vocab_size,
        "talker_config.text_vocab_size",
    )


class _Positions:
    """A prompt that is being put together: a text token and a frame per position."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self.text: list[int] = []
        self.codes: list[list[int]] = []
        self.vectors: dict[int, torch.Tensor] = {}

    def add(self, text: int = NOTHING, codes: Sequence[int] = ()) -> None:
        """One more; codes that are not given are nothing."""
        self.text.append(text)
        self.codes.append([*codes, *[NOTHING] * (self._groups - len(codes))])


class Qwen3TTS:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.
    """

    encoder_rate = SAMPLE_RATE

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        self._config = config
        self._talker = config.talker_config
        self._tokenizer = tokenizer
        self._task = TASKS[config.tts_model_type]
        clones = self._task == "Base"
        languages = [name for name in self._talker.codec_language_id if DIALECT not in name]
        # The small CustomVoice model was not taught to follow instructions.
        small = config.tts_model_size == "0b6"
        self.offer = SpeechOffer(
            sample_rate=SAMPLE_RATE,
            voices=tuple(self._talker.spk_id) if self._task == "CustomVoice" else (),
            languages=(AUTO, *languages),
            tasks=(self._task,),
            instructions=self._task == "VoiceDesign" or (not clones and not small),
            max_references=1 if clones else 0,
            needs_reference=clones,
            needs_transcript=clones,
            embedding_size=self._talker.hidden_size if clones else None,
        )

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`; the layout of `Qwen3TTSForConditionalGeneration.generate`."""
        made = _Positions(self._talker.num_code_groups)
        if request.instructions:
            for token in self._wrapped(INSTRUCTIONS, request.instructions):
                made.add(token)
        for token in self._ids(ROLE):
            made.add(token)
        self._add_voice(made, request, references)
        text = self._spoken(request.text)
        non_streaming = request.non_streaming
        if non_streaming is None:
            non_streaming = self._task != "Base"
        codes = None
        if references and not request.x_vector_only:
            (reference,) = request.references
            assert reference.text is not None  # the offer says that it is needed
            codes = references[0]["codes"]
            text = [*self._spoken(reference.text), *text]
            trailing = self._add_continuation(made, text, codes, non_streaming)
        else:
            trailing = self._add_text(made, text, non_streaming)
        length = len(made.text)
        for token in trailing:
            made.add(token)
        return SpeechPrompt(
            length=length,
            text=torch.tensor(made.text),
            codes=torch.tensor(made.codes),
            vectors=made.vectors,
            placeholder=self._talker.codec_pad_id,
            reference_codes=codes,
        )

    def _add_voice(
        self, made: _Positions, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> None:
        """Language and speaker, all but the last of them beside `tts_pad`."""
        talker = self._talker
        language = self._language(request)
        if language is None:
            codes = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        else:
            codes = [
                talker.codec_think_id,
                talker.codec_think_bos_id,
                language,
                talker.codec_think_eos_id,
            ]
        pad = self._config.tts_pad_token_id
        for code in codes:
            made.add(pad, [code])
        vector = self._vector(request, references)
        if vector is not None:
            made.vectors[len(made.text)] = vector
            made.add(pad)
        elif request.voice is not None:
            made.add(pad, [talker.spk_id[request.voice]])
        made.add(self._config.tts_bos_token_id, [talker.codec_pad_id])

    def _language(self, request: SpeechRequest) -> int | None:
        """The code of the language, or None to leave it to the model."""
        talker = self._talker
        language = request.language or AUTO
        if request.voice is not None and language in (AUTO, "chinese"):
            dialect = talker.spk_is_dialect.get(request.voice)
            if dialect:
                return int(talker.codec_language_id[dialect])
        return None if language == AUTO else int(talker.codec_language_id[language])

    def _vector(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> torch.Tensor | None:
        if request.speaker_embedding is not None:
            return torch.from_numpy(request.speaker_embedding).float()
        return references[0]["x_vector"] if references else None

    def _add_text(self, made: _Positions, text: list[int], non_streaming: bool) -> list[int]:
        """What is to be said; the tokens that follow with the first frames."""
        config, talker = self._config, self._talker
        if not non_streaming:
            made.add(text[0], [talker.codec_bos_id])
            return [*text[1:], config.tts_eos_token_id]
        for token in [*text, config.tts_eos_token_id]:
            made.add(token, [talker.codec_pad_id])
        made.add(config.tts_pad_token_id, [talker.codec_bos_id])
        return []

    def _add_continuation(
        self, made: _Positions, text: list[int], codes: torch.Tensor, non_streaming: bool
    ) -> list[int]:
        """A recording with its transcript, to be gone on with."""
        config, talker = self._config, self._talker
        text = [*text, config.tts_eos_token_id]
        frames: list[list[int]] = [[talker.codec_bos_id], *codes.tolist()]
        pad = config.tts_pad_token_id
        if non_streaming:
            for token in text:
                made.add(token, [talker.codec_pad_id])
            for frame in frames:
                made.add(pad, frame)
            return []
        for i, frame in enumerate(frames):
            made.add(text[i] if i < len(text) else pad, frame)
        return text[len(frames) :]

    def _spoken(self, text: str) -> list[int]:
        # A leading line break would become one token with that of the role.
        return self._ids(text.lstrip("\r\n"), plain=True)

    def _wrapped(self, template: str, text: str) -> list[int]:
        before, after = template.split("{}")
        return [*self._ids(before), *self._spoken(text), *self._ids(after)]

    def _ids(self, text: str, plain: bool = False) -> list[int]:
        """Token ids; of plain text no part is taken for a special token."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=plain)
        return list(ids["input_ids"])


def talker_to_code2wav(ctx: EdgeContext) -> CodecEdge:
    """Codec frames, cut into windows.

    A frame is completed when its first code is fed, in the reference, so the last one of a stream
    that `max_tokens` ended is dropped.
    """
    return CodecEdge(
        ctx,
        end_ids=frozenset({ctx.config.talker_config.codec_eos_token_id}),
        drops_unfed=True,
        policy=ChunkPolicy(initial=2, steady=25, left_context=25),
        options={},
    )


PIPELINE = Pipeline(
    name="qwen3_tts",
    architectures=(ARCHITECTURE,),
    stages=(
        Stage(
            "qwen3_tts",
            engine="ar",
            arch="Qwen3TTSTalker",
            shared_sections=("talker_config",),
            config_name="talker_config",
            emits=("codes",),
            row_driven=True,
            owns_tokenizer=True,
            default_sampling={
                "temperature": 0.9,
                "top_k": 50,
                "top_p": 1.0,
                "repetition_penalty": 1.05,
                "max_tokens": 2048,
                "extra_args": {
                    "subtalker_sampling_params": {"temperature": 0.9, "top_k": 50, "top_p": 1.0}
                },
            },
            sampling_constraints=constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:qwen3_tts",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("qwen3_tts", "code2wav", talker_to_code2wav),),
    problems=problems,
    speech=Qwen3TTS,
)
