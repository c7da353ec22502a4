# SPDX-License-Identifier: Apache-2.0
"""CSM: backbone and depth decoder (codec frames) -> Mimi (sound).

Reference: transformers' `CsmForConditionalGeneration.generate`, `CsmProcessor` and the checkpoint's
chat template. A prompt is a conversation: turns with the number of who speaks, their text and their
sound, of which the last one's is to be made.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.errors import OmniClientError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import equal, token_ids
from vllm_omni.pipelines.speech import CodecEdge
from vllm_omni.speech.family import NOTHING, EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.request import SpeechRequest

ARCHITECTURE = "CsmForConditionalGeneration"
SPEAKERS = tuple(str(number) for number in range(10))
"""Numbers are all that the model was taught; who is who, the turns before tell."""
MAX_TURNS = 16
"""Most recordings of a request; they have to fit in the model's 2048 positions, too."""
SPEAKER_OPTION = "speakers"
"""Names who speaks in each of the recordings."""


def end_ids(config: PretrainedConfig) -> tuple[int, int]:
    """What counts as sampled where a frame is the end.

    A frame ends the speech if all of its codes but the last one are `codebook_eos_token_id`. These
    ids belong to no code of the codec.

    Returns:
        For a frame that is nothing but end; for one whose last code differs, which has sound.
    """
    return config.vocab_size - 1, config.vocab_size - 2


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """Either end stops the speech. (`min_tokens` holds neither back, as in the reference.)"""
    return {"stop_token_ids": list(end_ids(config)), "ignore_eos": True, "detokenize": False}


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint."""
    codec, depth = config.codec_config, config.depth_decoder_config
    if codec.model_type != "mimi":
        yield Problem("codec_config.model_type", codec.model_type, "should be 'mimi'")
        return
    groups, size = config.num_codebooks, config.vocab_size
    yield from equal("num_codebooks", groups, "codec_config.num_quantizers", codec.num_quantizers)
    own = "depth_decoder_config."
    yield from equal(f"{own}num_codebooks", depth.num_codebooks, "num_codebooks", groups)
    yield from equal(f"{own}vocab_size", depth.vocab_size, "vocab_size", size)
    width = config.hidden_size
    yield from equal(f"{own}backbone_hidden_size", depth.backbone_hidden_size, "hidden_size", width)
    if size < codec.codebook_size + 2:
        least = codec.codebook_size + 2
        yield Problem(
            "vocab_size", size, f"should be at least {least}, codec_config.codebook_size + 2"
        )
    if not config.tie_codebooks_embeddings:
        yield Problem("tie_codebooks_embeddings", False, "should be true: one table serves both")
    yield from token_ids(
        config.to_dict(),
        "",
        ["codebook_eos_token_id"],
        codec.codebook_size,
        "codec_config.codebook_size",
    )


def speakers_of(request: SpeechRequest) -> Sequence[str]:
    """Who speaks in each of the recordings.

    Raises:
        OmniClientError: That is not said of each, or of one there is not.
    """
    given = request.extra.get(SPEAKER_OPTION)
    count = len(request.references)
    if given is None:
        return [str(request.voice)] * count
    field = f"extra.{SPEAKER_OPTION}"
    if not isinstance(given, list | tuple) or len(given) != count:
        raise OmniClientError(
            f"{field}: should list who speaks in each of {count} recordings", param=field
        )
    speakers = [str(speaker) for speaker in given]
    for speaker in speakers:
        if speaker not in SPEAKERS:
            known = ", ".join(SPEAKERS)
            raise OmniClientError(
                f"{field}: unknown {speaker!r}; this model has {known}", param=field
            )
    return speakers


class Csm:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.
    """

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        self._config = config
        self._tokenizer = tokenizer
        # As the chat template has them.
        self._begin, self._end = tokenizer.convert_tokens_to_ids(
            [tokenizer.bos_token, tokenizer.eos_token]
        )
        self.encoder_rate = config.codec_config.sampling_rate
        self.offer = SpeechOffer(
            sample_rate=config.codec_config.sampling_rate,
            voices=SPEAKERS,
            max_references=MAX_TURNS,
            needs_transcript=True,
            speaker_embeddings=False,
            streams_text=False,
            voice_beside_references=True,
            extra=frozenset({SPEAKER_OPTION}),
            check=speakers_of,
        )

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`. Unless said otherwise, the voice asked for speaks everywhere."""
        assert request.voice is not None  # there is a default
        text: list[int] = []
        codes: list[list[int]] = []
        nothing = [NOTHING] * self._config.num_codebooks
        end = [self._config.codebook_eos_token_id] * self._config.num_codebooks
        speakers = speakers_of(request)
        for speaker, said, encoded in zip(speakers, request.references, references, strict=True):
            assert said.text is not None  # the offer says that it is needed
            words = self._turn(speaker, said.text)
            frames = [*encoded["codes"].tolist(), end]
            text += [*words, *[NOTHING] * len(frames)]
            codes += [*[nothing] * len(words), *frames]
        words = self._turn(request.voice, request.text)
        text += words
        codes += [nothing] * len(words)
        return SpeechPrompt(
            length=len(text),
            text=torch.tensor(text),
            codes=torch.tensor(codes),
            placeholder=end_ids(self._config)[0],
        )

    def _turn(self, speaker: str, text: str) -> list[int]:
        """Token ids of who says what; no part of it is taken for a special token."""
        ids = self._tokenizer(
            f"[{speaker}]{text}", add_special_tokens=False, split_special_tokens=True
        )
        return [self._begin, *ids["input_ids"], self._end]


def frames_to_sound(ctx: EdgeContext) -> CodecEdge:
    """Codec frames, cut into windows. A frame that is nothing but end has no sound."""
    end, _ = end_ids(ctx.config)
    return CodecEdge(
        ctx,
        end_ids=frozenset({end}),
        drops_unfed=False,
        policy=ChunkPolicy(initial=2, steady=25, left_context=25),
        options={},
    )


PIPELINE = Pipeline(
    name="csm",
    architectures=(ARCHITECTURE,),
    stages=(
        Stage(
            "csm",
            engine="ar",
            arch="CsmTalker",
            shared_sections=("",),
            emits=("codes",),
            row_driven=True,
            owns_tokenizer=True,
            # As the authors' `Generator.generate` has it; 1125 frames are 90 s.
            default_sampling={
                "temperature": 0.9,
                "top_k": 50,
                "max_tokens": 1125,
                "extra_args": {"subtalker_sampling_params": {"temperature": 0.9, "top_k": 50}},
            },
            sampling_constraints=constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:csm",
            config_name="codec_config",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("csm", "code2wav", frames_to_sound),),
    problems=problems,
    speech=Csm,
)
