# SPDX-License-Identifier: Apache-2.0
"""Dia: encoder and decoder (rows of a delay pattern) -> DAC (sound).

Reference: transformers' `DiaForConditionalGeneration` and `DiaProcessor`. A text is bytes, with
`[S1]` and `[S2]` where another one speaks. What a recording holds is continued: its codes come
before the speech, and what is said in it before the text.

The positions of a prompt are explained in `vllm_omni.models.dia`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regex as re
import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.errors import OmniClientError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import equal, token_ids
from vllm_omni.pipelines.speech import CodecEdge
from vllm_omni.speech.delay import delayed
from vllm_omni.speech.family import NOTHING, EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.request import SpeechRequest

ARCHITECTURE = "DiaForConditionalGeneration"
SAMPLE_RATE = 44100
"""Hz, of recordings and of the sound that is made."""
SPEAKERS = ("[S1]", "[S2]")
"""A text begins with one of these."""
_SPEAKER = re.compile(r"\[S\d{1,9}\]")


def lanes(decoder: PretrainedConfig) -> int:
    """Positions of a text token: keys of cross-attention per key of self-attention."""
    return int(decoder.cross_num_key_value_heads // decoder.num_key_value_heads)


def end_token(config: PretrainedConfig) -> int:
    """What counts as sampled with the row that ends the stream; no code."""
    return int(config.decoder_config.vocab_size)


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The last row of the pattern stops the decoder."""
    return {"stop_token_ids": [end_token(config)], "ignore_eos": True, "detokenize": False}


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint."""
    decoder, own = config.decoder_config, "decoder_config."
    for name in ("num_attention_heads", "head_dim"):
        value = decoder.to_dict()[name]
        other = f"cross_{name}"
        yield from equal(f"{own}{other}", decoder.to_dict()[other], f"{own}{name}", value)
    width = config.encoder_config.hidden_size
    other = "encoder_config.hidden_size"
    yield from equal(f"{own}cross_hidden_size", decoder.cross_hidden_size, other, width)
    for name, of in (
        ("cross_num_key_value_heads", "num_key_value_heads"),
        ("cross_num_attention_heads", "cross_num_key_value_heads"),
    ):
        number, divisor = decoder.to_dict()[name], decoder.to_dict()[of]
        if number % divisor:
            yield Problem(f"{own}{name}", number, f"should be a multiple of {own}{of}, {divisor}")
    delays = list(config.delay_pattern)
    if delays != sorted(delays) or delays[0] != 0 or delays[-1] == 0:
        yield Problem("delay_pattern", delays, "should ascend from 0")
    names = ["bos_token_id", "eos_token_id", "pad_token_id"]
    size = decoder.vocab_size
    yield from token_ids(decoder.to_dict(), own, names, size, f"{own}vocab_size")


def _check_speakers(request: SpeechRequest) -> None:
    """See that a text, and what is said in a recording, names speakers that there are.

    Raises:
        OmniClientError: It does not.
    """
    said = [("references.text", str(reference.text)) for reference in request.references]
    for field, text in [("text", request.text), *said]:
        for mark in _SPEAKER.findall(text):
            if mark not in SPEAKERS:
                known = ", ".join(SPEAKERS)
                raise OmniClientError(
                    f"{field}: unknown speaker {mark}; this model has {known}", param=field
                )


class Dia:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.
    """

    encoder_rate = SAMPLE_RATE
    offer = SpeechOffer(
        sample_rate=SAMPLE_RATE,
        max_references=1,
        needs_transcript=True,
        speaker_embeddings=False,
        streams_text=False,
        unread_sampling=frozenset({"repetition_penalty"}),
        check=_check_speakers,
    )

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`. Speech begins with the first speaker, unless the text says else."""
        config = self._config
        begin = config.decoder_config.bos_token_id
        said = [str(reference.text).strip() for reference in request.references]
        tokens = self._tokens(" ".join([*said, request.text]))
        beginning = torch.full((1, len(config.delay_pattern)), begin)
        spoken = torch.cat([beginning, *(each["codes"].long() for each in references)])
        # Of the first rows that are made, the prompt says the groups whose turn has not come.
        rows = delayed(spoken, tuple(config.delay_pattern), begin, NOTHING)[:-1]
        text = torch.tensor(tokens).repeat_interleave(lanes(config.decoder_config))
        silent = torch.full((len(text), rows.shape[1]), NOTHING)
        return SpeechPrompt(
            length=len(text) + len(spoken),
            text=torch.cat([text, torch.full((len(rows),), NOTHING)]),
            codes=torch.cat([silent, rows]),
            placeholder=begin,
            context=text.int().numpy().tobytes(),
        )

    def _tokens(self, text: str) -> list[int]:
        """Token ids, of bytes and of who speaks.

        Raises:
            OmniClientError: There are more than the encoder takes.
        """
        marked = text if text.lstrip().startswith(SPEAKERS) else f"{SPEAKERS[0]} {text}"
        ids = list(self._tokenizer(marked, add_special_tokens=False)["input_ids"])
        most = self._config.encoder_config.max_position_embeddings
        if len(ids) > most:
            raise OmniClientError(
                f"text: it has {len(ids)} bytes, what is said in the recording included, and this "
                f"model takes {most}; say it in parts",
                param="text",
            )
        return ids


def talker_to_code2wav(ctx: EdgeContext) -> CodecEdge:
    """Rows of the delay pattern, and windows of the frames that they hold.

    What ended before there was a whole frame is no sound (row A-65).
    """
    return CodecEdge(
        ctx,
        end_ids=frozenset({end_token(ctx.config)}),
        drops_unfed=False,
        policy=ChunkPolicy(initial=4, steady=64, right_holdback=10),
        options={},
        lag=max(ctx.config.delay_pattern),
    )


PIPELINE = Pipeline(
    name="dia",
    architectures=(ARCHITECTURE,),
    files=(("tokenizer_config.json",),),
    stages=(
        Stage(
            "dia",
            engine="ar",
            arch="DiaTalker",
            emits=("codes",),
            row_driven=True,
            # As the authors' examples have it; a row is 11.6 ms.
            default_sampling={
                "temperature": 1.8,
                "top_k": 45,
                "top_p": 0.9,
                "max_tokens": 3072,
            },
            sampling_constraints=constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:dia",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("dia", "code2wav", talker_to_code2wav),),
    problems=problems,
    speech=Dia,
)
