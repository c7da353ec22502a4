# SPDX-License-Identifier: Apache-2.0
"""Voxtral TTS: backbone and acoustic transformer (codec frames) -> codec (sound).

Described by mistral_common 1.13 (`encode_speech_request`) and the published checkpoint. A prompt is
how the voice sounds, as many vectors as its recording had frames, and then the text. Voices are
files of such vectors; a checkpoint with the codec's encoder takes recordings, too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.utils import cached_file
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.mistral import MistralTokenizer

from vllm_omni.config.hf.voxtral_tts import EMPTY, END
from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import equal
from vllm_omni.pipelines.speech import CodecEdge
from vllm_omni.speech.family import NOTHING, EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.request import SpeechRequest

ARCHITECTURE = "VoxtralTTSForConditionalGeneration"
VOICES = "voice_embedding"
"""Folder of the voices: of each a tensor [frames, hidden_size]."""
WEIGHTS = "consolidated.safetensors"
_ENCODER = "audio_tokenizer.encoder_blocks."


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The first code says that it was the end."""
    return {"stop_token_ids": [END], "ignore_eos": True, "detokenize": False}


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint.

    Raises:
        OmniConfigError: A voice's file is not what it should be.
    """
    codec, acoustic = config.codec_config, config.acoustic_config
    own = "multimodal.audio_tokenizer_args."
    codes = "multimodal.audio_model_args."
    for name in ("semantic_codebook_size", "acoustic_codebook_size"):
        value = config.to_dict()[name]
        yield from equal(f"{own}{name}", codec.to_dict()[name], f"{codes}{name}", value)
    groups = config.n_acoustic_codebook
    yield from equal(
        f"{own}acoustic_dim", codec.acoustic_dim, f"{codes}n_acoustic_codebook", groups
    )
    part = f"{codes}acoustic_transformer_args."
    # One head of the acoustic transformer reads the backbone's hidden state.
    for name in ("input_dim", "dim"):
        yield from equal(f"{part}{name}", acoustic.to_dict()[name], "dim", config.hidden_size)
    least = codec.patch_proj_kernel_size
    if codec.patches_per_frame < least:
        yield Problem(
            f"{own}decoder_convs_strides_str",
            codec.decoder_convs_strides_str,
            f"its product should be at least patch_proj_kernel_size, {least}",
        )
    for name, value in {"causal": codec.causal, "channels": codec.channels}.items():
        if value != 1:
            yield Problem(f"{own}{name}", value, "should be 1: the codec is causal and mono")
    for name in config.voices:
        if PurePath(name).name == name:
            _voice(model, name, config.hidden_size)
        else:
            yield Problem(f"{own}voice", name, "should be the name of a file, without a folder")


class VoxtralTTS:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.

    Raises:
        OmniConfigError: The tokenizer, or a voice's file, is not what it should be.
    """

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        if not isinstance(tokenizer, MistralTokenizer) or not tokenizer.instruct.audio_encoder:
            raise OmniConfigError(f"model {model!r}: tekken.json is no tokenizer for speech")
        self._config = config
        self._tokenizer = tokenizer
        self._audio = tokenizer.instruct.audio_encoder
        self._voices = {name: _voice(model, name, config.hidden_size) for name in config.voices}
        self.encoder_rate = config.codec_config.sampling_rate
        self.offer = SpeechOffer(
            sample_rate=config.codec_config.sampling_rate,
            voices=tuple(self._voices),
            max_references=1 if has_encoder(model) else 0,
            speaker_embeddings=False,
            streams_text=False,
            reads_transcripts=False,
        )

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`; what is heard in a recording is not asked for."""
        voice = None if references else self._voices[str(request.voice)]
        frames = _ended(references[0]["codes"]) if voice is None else None
        heard = len(voice if frames is None else frames)
        before = [*self._tokenizer.instruct.start(), self._audio.begin_audio_token]
        after = [
            self._audio.text_to_audio_token,
            *self._tokenizer.tokenizer.encode(request.text, bos=False, eos=False),
            self._audio.audio_to_text_token,
            self._audio.begin_audio_token,
        ]
        text = [*before, *[NOTHING] * heard, *after]
        codes = torch.full((len(text), self._config.groups), NOTHING)
        start = len(before)
        if frames is not None:
            codes[start : start + heard] = frames
        return SpeechPrompt(
            length=len(text),
            text=torch.tensor(text),
            codes=codes,
            placeholder=EMPTY,
            vectors={} if voice is None else dict(enumerate(voice, start)),
        )


def has_encoder(model: str) -> bool:
    """Whether a checkpoint has the codec's encoder; published ones do not."""
    return any(name.startswith(_ENCODER) for name in _tensor_names(model))


def _tensor_names(model: str) -> list[str]:
    """Of a checkpoint's weights; none if there are no weights."""
    index = cached_file(model, f"{WEIGHTS}.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        with open(index, encoding="utf-8") as file:
            return list(json.load(file)["weight_map"])
    path = cached_file(model, WEIGHTS, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return []
    with safe_open(path, framework="pt") as weights:
        return list(weights.keys())


def _voice(model: str, name: str, width: int) -> torch.Tensor:
    """A voice, float32 [frames, width]. Nothing in its file is executed.

    Raises:
        OmniConfigError: There is no such file, or it holds something else.
    """
    file = f"{VOICES}/{name}.pt"
    try:
        path = cached_file(model, file)
    except OSError as error:
        raise OmniConfigError(f"model {model!r}: it has no {file}: {error}") from error
    try:
        voice = torch.load(str(path), map_location="cpu", weights_only=True)
    except Exception as error:  # torch fails with whatever the bytes lead to
        raise OmniConfigError(f"{path}: cannot be read as a tensor: {error}") from error
    if not isinstance(voice, torch.Tensor) or voice.dim() != 2 or voice.shape[1] != width:
        raise OmniConfigError(f"{path}: should be a tensor [frames, {width}]")
    if not len(voice) or not voice.isfinite().all():
        raise OmniConfigError(f"{path}: should have frames, of finite numbers")
    return voice.float()


def _ended(codes: torch.Tensor) -> torch.Tensor:
    """A recording's frames and the one that ends it."""
    end = codes.new_full((1, codes.shape[1]), EMPTY)
    end[0, 0] = END
    return torch.cat([codes, end])


def frames_to_sound(ctx: EdgeContext) -> CodecEdge:
    """Codec frames, cut into windows. The frame that is the end has no sound."""
    return CodecEdge(
        ctx,
        end_ids=frozenset({END}),
        drops_unfed=False,
        policy=ChunkPolicy(initial=2, steady=25, left_context=25),
        options={},
    )


PIPELINE = Pipeline(
    name="voxtral_tts",
    architectures=(ARCHITECTURE,),
    stages=(
        Stage(
            "voxtral_tts",
            engine="ar",
            arch="VoxtralTTSTalker",
            shared_sections=("",),
            emits=("codes",),
            row_driven=True,
            owns_tokenizer=True,
            # The first code is the likeliest one, and what varies is the noise.
            default_sampling={"temperature": 0.0, "max_tokens": 2048, "seed": 42},
            sampling_constraints=constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:voxtral_tts",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("voxtral_tts", "code2wav", frames_to_sound),),
    problems=problems,
    speech=VoxtralTTS,
)
