# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v2: talker (rows of a delay pattern) -> code2wav (sound).

Reference: transformers' `HiggsAudioV2ForConditionalGeneration` and `HiggsAudioV2Processor`, whose
chat template this lays out: a system prompt with a description of the scene, recordings as turns of
their own (what is said, how it sounds), and the text to say.
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
from vllm_omni.speech.delay import delayed
from vllm_omni.speech.family import EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.layout import Layout
from vllm_omni.speech.request import SpeechRequest

ARCHITECTURE = "HiggsAudioV2ForConditionalGeneration"
SAMPLE_RATE = 24000
"""Hz, of recordings and of the sound that is made."""
MAX_REFERENCES = 8
SYSTEM = "Generate audio following instruction."
SCENE = "Audio is recorded from a quiet room."
"""Where and how it is spoken, if the request has no instructions."""
BEGIN = "<|begin_of_text|>"
HEADER = ("<|start_header_id|>", "<|end_header_id|>")
SCENE_MARKS = ("<|scene_desc_start|>", "<|scene_desc_end|>")
END_OF_TURN = "<|eot_id|>"
SOUND_BEGINS, SOUND_ENDS = "<|audio_out_bos|>", "<|audio_eos|>"


def delays(config: PretrainedConfig) -> tuple[int, ...]:
    """Of each group, in rows: the first row is all begin codes, then one group after another."""
    return tuple(range(1, config.num_codebooks + 1))


def end_token(config: PretrainedConfig) -> int:
    """What counts as sampled with the row that ends the stream; no code."""
    return int(config.codebook_size)


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The last row of the pattern stops the talker."""
    return {"stop_token_ids": [end_token(config)], "ignore_eos": True, "detokenize": False}


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint."""
    names = ["audio_stream_bos_id", "audio_stream_eos_id"]
    yield from token_ids(config.to_dict(), "", names, config.codebook_size, "codebook_size")


class HiggsAudioV2:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.
    """

    encoder_rate = SAMPLE_RATE
    offer = SpeechOffer(
        sample_rate=SAMPLE_RATE,
        instructions=True,
        max_references=MAX_REFERENCES,
        needs_transcript=True,
        speaker_embeddings=False,
        streams_text=False,
    )

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`; the layout of the processor's chat template."""
        made = Layout(self._config.num_codebooks)
        made.say(self._special(BEGIN))
        self._add_header(made, "system")
        made.say(self._plain(f"\n\n{SYSTEM}\n\n"))
        before, after = SCENE_MARKS
        scene = (request.instructions or SCENE).strip()
        made.say([*self._special(before), *self._plain(f"\n{scene}\n"), *self._special(after)])
        made.say(self._special(END_OF_TURN))
        for reference, encoded in zip(request.references, references, strict=True):
            assert reference.text is not None  # the offer says that it is needed
            self._add_text(made, reference.text)
            self._add_recording(made, encoded["codes"])
        self._add_text(made, request.text)
        self._add_header(made, "assistant")
        made.say([*self._plain("\n\n"), *self._special(SOUND_BEGINS)])
        return made.made(self._config.audio_stream_bos_id)

    def _add_text(self, made: Layout, text: str) -> None:
        self._add_header(made, "user")
        made.say([*self._plain(f"\n\n{text.strip()}"), *self._special(END_OF_TURN)])

    def _add_recording(self, made: Layout, codes: torch.Tensor) -> None:
        config = self._config
        begin, end = config.audio_stream_bos_id, config.audio_stream_eos_id
        self._add_header(made, "assistant")
        made.say([*self._plain("\n\n"), *self._special(SOUND_BEGINS)])
        made.sound(delayed(codes.int(), delays(config), begin, end))
        made.say([*self._special(SOUND_ENDS), *self._special(END_OF_TURN)])

    def _add_header(self, made: Layout, role: str) -> None:
        before, after = HEADER
        made.say([*self._special(before), *self._plain(role), *self._special(after)])

    def _special(self, token: str) -> list[int]:
        return list(self._tokenizer(token, add_special_tokens=False)["input_ids"])

    def _plain(self, text: str) -> list[int]:
        """Token ids of which none is special, whatever the text holds."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(ids["input_ids"])


def talker_to_code2wav(ctx: EdgeContext) -> CodecEdge:
    """Rows of the delay pattern, and windows of the frames that they hold.

    What ended before there was a whole frame is no sound (row A-65).
    """
    return CodecEdge(
        ctx,
        end_ids=frozenset({end_token(ctx.config)}),
        drops_unfed=False,
        policy=ChunkPolicy(initial=1, steady=25, right_holdback=10),
        options={},
        lag=max(delays(ctx.config)),
    )


PIPELINE = Pipeline(
    name="higgs_audio_v2",
    architectures=(ARCHITECTURE,),
    stages=(
        Stage(
            "higgs_audio_v2",
            engine="ar",
            arch="HiggsAudioV2Talker",
            shared_sections=("",),
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
            program="vllm_omni.diffusion.programs.code2wav:higgs_audio_v2",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("higgs_audio_v2", "code2wav", talker_to_code2wav),),
    problems=problems,
    speech=HiggsAudioV2,
)
