# SPDX-License-Identifier: Apache-2.0
"""VoxCPM2: language models and flow (frames of latents) -> codec (sound).

Reference: `VoxCPM2Model` of the authors' package, `voxcpm` 2.0.3. A prompt is the text and, if
there is one, a recording: before the text, as the voice to speak in, or, if its words are known,
behind it, to be gone on with. How a voice is to be, in words, stands in parentheses before the
text.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regex as re
import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import equal, whole_number
from vllm_omni.pipelines.speech import CodecEdge
from vllm_omni.speech.family import NOTHING, EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.request import SpeechRequest

CODEC_FILES = ("audiovae.safetensors", "audiovae.pth")
"""The codec's weights lie in one of these."""
GOES_ON, STOPS = 0, 1
"""What is sampled: whether a frame is the last one."""
SOUND_BEGINS, VOICE_BEGINS, VOICE_ENDS = 101, 103, 104
"""Text tokens that the model was taught."""
LEAST_FRAMES = 3
"""Speech has at least one more: the package's default `min_len`, 2, and the frame it ends with."""
HEARD_FRAMES = 3
"""Of speech that is gone on with, what new sound is decoded after, as in the package."""
_CHINESE = re.compile(r"[\u4e00-\u9fff]{2,}")


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The last frame stops the speech."""
    return {"stop_token_ids": [STOPS], "ignore_eos": True, "detokenize": False}


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint."""
    lm, codec = config.lm_config, config.audio_vae_config
    size = lm.get("vocab_size")
    yield from whole_number("lm_config.vocab_size", size, 1 << 31, "a size")
    if isinstance(size, int) and size <= VOICE_ENDS:
        yield Problem("lm_config.vocab_size", size, f"should be more than {VOICE_ENDS}")
    latent = codec["latent_dim"]
    yield from equal("feat_dim", config.feat_dim, "audio_vae_config.latent_dim", latent)
    own = "audio_vae_config."
    for name, supported in (
        ("use_noise_block", False),
        ("cond_type", "scale_bias"),
        ("cond_out_layer", False),
    ):
        if codec[name] != supported:
            yield Problem(
                f"{own}{name}", codec[name], f"should be {supported!r}: no other is known"
            )


class VoxCPM2:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.
    """

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        # The text was taught character by character.
        self._chinese = frozenset(
            word for word in tokenizer.get_vocab() if _CHINESE.fullmatch(word)
        )
        self.encoder_rate = config.audio_vae_config["sample_rate"]
        self.offer = SpeechOffer(
            sample_rate=config.audio_vae_config["out_sample_rate"],
            instructions=True,
            max_references=1,
            speaker_embeddings=False,
            streams_text=False,
        )

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`."""
        said = re.sub(r"\s+", " ", request.text)
        if request.instructions:
            said = f"({request.instructions.strip()}){said}"
        text: list[int] = []
        vectors: dict[int, torch.Tensor] = {}
        begun = None
        for reference, encoded in zip(request.references, references, strict=True):
            if reference.text:
                said = reference.text + said
                begun = encoded["begun"]
            else:
                text.append(VOICE_BEGINS)
                _add(text, vectors, encoded["latents"])
                text.append(VOICE_ENDS)
        text += [*self._ids(said), SOUND_BEGINS]
        if begun is not None:
            _add(text, vectors, begun)
        return SpeechPrompt(
            length=len(text),
            text=torch.tensor(text),
            codes=None,
            vectors=vectors,
            placeholder=GOES_ON,
            reference_codes=None if begun is None else begun[-HEARD_FRAMES:],
        )

    def _ids(self, text: str) -> list[int]:
        """Token ids of which none is special, whatever the text holds."""
        tokens: list[str] = []
        for token in self._tokenizer.tokenize(text, split_special_tokens=True):
            plain = token.replace("▁", "")
            tokens += plain if plain in self._chinese else [token]
        return list(self._tokenizer.convert_tokens_to_ids(tokens))


def _add(text: list[int], vectors: dict[int, torch.Tensor], frames: torch.Tensor) -> None:
    """Positions that are frames."""
    for frame in frames:
        vectors[len(text)] = frame
        text.append(NOTHING)


def latents_to_sound(ctx: EdgeContext) -> CodecEdge:
    """Frames of 0.16 s, in windows; the one that stops the speech has sound, too."""
    return CodecEdge(
        ctx,
        end_ids=frozenset(),
        drops_unfed=False,
        policy=ChunkPolicy(initial=1, steady=12),
        options={},
    )


PIPELINE = Pipeline(
    name="voxcpm2",
    architectures=("VoxCPM2ForConditionalGeneration",),
    stages=(
        Stage(
            "voxcpm2",
            engine="ar",
            arch="VoxCPM2Talker",
            shared_sections=("lm_config",),
            emits=("latents",),
            row_driven=True,
            owns_tokenizer=True,
            # The reference never samples whether speech ends.
            default_sampling={"temperature": 0.0, "max_tokens": 2000, "min_tokens": LEAST_FRAMES},
            sampling_constraints=constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:voxcpm2",
            config_name="audio_vae_config",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("voxcpm2", "code2wav", latents_to_sound),),
    files=(CODEC_FILES,),
    problems=problems,
    speech=VoxCPM2,
)
