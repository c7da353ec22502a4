# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v3's codec is v2's (see `higgs_audio_v2`), with its weights among the model's.

They are taken from there unless the environment names a codec, or the checkpoint has a folder of
one (row A-66). Codes that are none of the codec become 0 (row A-65).
"""

import torch
from transformers import HiggsAudioV2TokenizerConfig

from vllm_omni.config.hf.higgs_audio_v3 import HiggsAudioV3Config
from vllm_omni.diffusion.programs.higgs_audio_v2 import check_groups, load_parts
from vllm_omni.diffusion.programs.higgs_files import codec_place, known_place
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, find_tensors, read_tensors
from vllm_omni.errors import OmniConfigError
from vllm_omni.pipelines.higgs_multimodal_qwen3 import delays

PREFIX = "tied.embedding.modality_embeddings.0.model."
"""Of the codec's weights in the model's files, which say nothing of its sizes."""
_RATES = (8, 5, 4, 2, 3)


def published_config() -> HiggsAudioV2TokenizerConfig:
    """Of `bosonai/higgs-audio-v2-tokenizer`."""
    rates = list(_RATES)
    return HiggsAudioV2TokenizerConfig(
        acoustic_model_config={"downsampling_ratios": rates, "upsampling_ratios": rates},
        target_bandwidths=[0.5, 1, 1.5, 2],
    )


def load(ctx: LoadContext) -> Loaded:
    """Load the codec, in float32.

    Raises:
        OmniConfigError: There is none, or it does not fit the model.
    """
    whole = checkpoint_config(ctx)
    if not isinstance(whole, HiggsAudioV3Config):
        raise OmniConfigError(f"checkpoint {ctx.model!r} is no Higgs-Audio v3")
    config, tensors, place = _codec(ctx)
    check_groups(ctx, config, whole.audio_encoder_config.num_codebooks, place)
    return load_parts(ctx, config, tensors, delays(whole), other=0)


def _codec(
    ctx: LoadContext,
) -> tuple[HiggsAudioV2TokenizerConfig, dict[str, torch.Tensor], str]:
    """Its config, its weights (none if they are to be random), and where they are from."""
    known = known_place(ctx)
    if known is None:
        if ctx.random_weights:
            return published_config(), {}, ctx.model
        if tensors := find_tensors(ctx, PREFIX):
            return published_config(), tensors, ctx.model
    place, folder = known or codec_place(ctx)
    config = HiggsAudioV2TokenizerConfig.from_pretrained(
        place.model, subfolder=folder, revision=place.revision
    )
    tensors = {} if ctx.random_weights else read_tensors(place, "", folder)
    return config, tensors, place.model
