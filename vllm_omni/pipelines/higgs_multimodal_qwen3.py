# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v3: talker (rows of a delay pattern) -> code2wav (sound).

Reference: `sglang-omni` 0.1.3 (`models/higgs_tts`), through which the authors serve it, for prompts
and the delay pattern; row A-60 for what a row may hold. How something is said (`<|emotion:anger|>`,
`<|prosody:pause|>`, `<|sfx:laughter|>`) stands in the text, as tokens of the checkpoint's; every
other special token in a text is text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import equal
from vllm_omni.pipelines.speech import CodecEdge
from vllm_omni.speech.delay import delayed
from vllm_omni.speech.family import EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.layout import Layout
from vllm_omni.speech.request import SpeechRequest

ARCHITECTURE = "HiggsMultimodalQwen3ForConditionalGeneration"
SAMPLE_RATE = 24000
"""Hz, of recordings and of the sound that is made."""
TASK, REFERENCE_TEXT, REFERENCE, TEXT, SOUND = (
    "<|tts|>",
    "<|ref_text|>",
    "<|ref_audio|>",
    "<|text|>",
    "<|audio|>",
)
"""What stands before the parts of a prompt."""
CONTROL = re.compile(r"<\|\w+:[^<>]+\|>")
"""Tokens of a vocabulary that say how something is said."""


def delays(config: PretrainedConfig) -> tuple[int, ...]:
    """Of each group, in rows."""
    return tuple(range(config.audio_encoder_config.num_codebooks))


def end_token(config: PretrainedConfig) -> int:
    """What counts as sampled with the last row; no code."""
    return int(config.audio_encoder_config.vocab_size)


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The last row of the pattern stops the talker."""
    return {"stop_token_ids": [end_token(config)], "ignore_eos": True, "detokenize": False}


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint."""
    codes, path = config.audio_encoder_config, "audio_encoder_config."
    if codes.encoder_type != "discrete":
        yield Problem(
            f"{path}encoder_type", codes.encoder_type, "should be 'discrete': others transcribe"
        )
    if not codes.use_delay_pattern:
        yield Problem(f"{path}use_delay_pattern", False, "should be true")
    if codes.num_codebooks < 1:
        yield Problem(f"{path}num_codebooks", codes.num_codebooks, "should be at least 1")
    if codes.vocab_size < 3:
        yield Problem(f"{path}vocab_size", codes.vocab_size, "should be at least 3")
    if codes.out_dim is not None:
        width = config.text_config.hidden_size
        yield from equal(f"{path}out_dim", codes.out_dim, "text_config.hidden_size", width)


class HiggsAudioV3:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.

    Raises:
        OmniConfigError: The tokenizer lacks tokens of the prompt.
    """

    encoder_rate = SAMPLE_RATE
    offer = SpeechOffer(
        sample_rate=SAMPLE_RATE, max_references=1, speaker_embeddings=False, streams_text=False
    )

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._added: Mapping[str, int] = tokenizer.get_added_vocab()
        missing = [name for name in (TASK, REFERENCE, TEXT, SOUND) if name not in self._added]
        if missing:
            raise OmniConfigError(f"the tokenizer of {model!r} lacks {', '.join(missing)}")
        controls = sorted(filter(CONTROL.fullmatch, self._added))
        self._control = re.compile(f"({'|'.join(map(re.escape, controls))})") if controls else None

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`."""
        made = Layout(self._config.audio_encoder_config.num_codebooks)
        made.say([self._added[TASK]])
        for reference, encoded in zip(request.references, references, strict=True):
            # Older checkpoints know the sound of a recording alone.
            if reference.text and REFERENCE_TEXT in self._added:
                made.say([self._added[REFERENCE_TEXT], *self._said(reference.text)])
            made.say([self._added[REFERENCE]])
            made.sound(self._rows(encoded["codes"]))
        made.say([self._added[TEXT], *self._said(request.text), self._added[SOUND]])
        return made.made(self._config.audio_encoder_config.begin)

    def _rows(self, codes: torch.Tensor) -> torch.Tensor:
        """Of a recording, without the row of nothing but end codes."""
        config = self._config
        begin, end = config.audio_encoder_config.begin, config.audio_encoder_config.end
        return delayed(codes.int(), delays(config), begin, end)[:-1]

    def _said(self, text: str) -> list[int]:
        """Token ids, of which only those that say how are special."""
        ids: list[int] = []
        pieces = [text] if self._control is None else self._control.split(text)
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._added[piece])
            else:
                plain = self._tokenizer(piece, add_special_tokens=False, split_special_tokens=True)
                ids.extend(plain["input_ids"])
        return ids


def talker_to_code2wav(ctx: EdgeContext) -> CodecEdge:
    """Rows of the delay pattern, the last one included, and windows of the frames in them.

    What ended before there was a whole frame is no sound (row A-65).
    """
    return CodecEdge(
        ctx,
        end_ids=frozenset(),
        drops_unfed=False,
        policy=ChunkPolicy(initial=1, steady=25, right_holdback=10),
        options={},
        lag=max(delays(ctx.config)),
    )


PIPELINE = Pipeline(
    name="higgs_multimodal_qwen3",
    architectures=(ARCHITECTURE,),
    stages=(
        Stage(
            "higgs_audio_v3",
            engine="ar",
            arch="HiggsAudioV3Talker",
            shared_sections=("text_config",),
            emits=("codes",),
            row_driven=True,
            owns_tokenizer=True,
            default_sampling={
                "temperature": 1.0,
                "top_k": 50,
                "top_p": 0.95,
                "max_tokens": 2048,
            },
            sampling_constraints=constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:higgs_audio_v3",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("higgs_audio_v3", "code2wav", talker_to_code2wav),),
    problems=problems,
    speech=HiggsAudioV3,
)
