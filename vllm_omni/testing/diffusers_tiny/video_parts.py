# SPDX-License-Identifier: Apache-2.0
"""Components that several families of videos and sounds have in common."""

from collections.abc import Sequence

from diffusers import AutoencoderKLHunyuanVideo, AutoencoderKLWan
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    RobertaTokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from vllm_omni.testing.diffusers_tiny.parts import HIDDEN
from vllm_omni.testing.diffusers_tiny.tokenizers import VOCABULARY

IMAGE_SIZE = 32
"""Pixels of a side of what an image encoder sees."""
IMAGE_PATCH = 8
IMAGE_TOKENS = (IMAGE_SIZE // IMAGE_PATCH) ** 2 + 1


def umt5_encoder(width: int = HIDDEN) -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=VOCABULARY,
            d_model=width,
            d_kv=8,
            d_ff=2 * width,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=32,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )


def clip_vision_config() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        projection_dim=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=IMAGE_PATCH,
    )


def clip_vision() -> CLIPVisionModel:
    return CLIPVisionModel(clip_vision_config())


def clip_image_processor() -> CLIPImageProcessor:
    return CLIPImageProcessor(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    )


def wan_vae(
    latent_channels: int = 16,
    *,
    dim_mult: Sequence[int] = (1, 1, 1, 1),
    residual: bool = False,
    patch_size: int | None = None,
) -> AutoencoderKLWan:
    """Latents are smaller by 8 (16 with `patch_size` 2) in space and by 4 in time."""
    pixels = 3 * (patch_size or 1) ** 2
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=latent_channels,
        dim_mult=list(dim_mult),
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1 * (index % 3 - 1) for index in range(latent_channels)],
        latents_std=[1.0 + 0.1 * (index % 4) for index in range(latent_channels)],
        is_residual=residual,
        patch_size=patch_size,
        in_channels=pixels,
        out_channels=pixels,
        scale_factor_spatial=8 * (patch_size or 1),
    )


def hunyuan_video_vae(latent_channels: int = 4, scale: int = 8) -> AutoencoderKLHunyuanVideo:
    """Latents are smaller by `scale` in space and by 4 in time."""
    return AutoencoderKLHunyuanVideo(
        latent_channels=latent_channels,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.5,
        spatial_compression_ratio=scale,
        temporal_compression_ratio=4,
        mid_block_add_attention=True,
    )


def roberta(max_length: int = 77) -> RobertaTokenizer:
    """Bytes between `<s>` and `</s>`; the tokenizer of CLAP."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return RobertaTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length)
