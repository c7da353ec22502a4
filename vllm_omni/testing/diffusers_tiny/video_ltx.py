# SPDX-License-Identifier: Apache-2.0
"""LTX-Video, and LTX-2 with its soundtrack."""

from typing import Any

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.media import VideoExample, first_frame
from vllm_omni.testing.diffusers_tiny.parts import HIDDEN, flow_match, t5_encoder
from vllm_omni.testing.diffusers_tiny.recipe import Recipe
from vllm_omni.testing.diffusers_tiny.tokenizers import VOCABULARY
from vllm_omni.testing.diffusers_tiny.video_parts import IMAGE_PATCH, IMAGE_SIZE

LATENTS = 8
SHIFT = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}
TEXT_LAYERS = 2
MEL_BINS = 16
AUDIO_LATENTS = 4
AUDIO_SCALE = 4
"""How much smaller the sound's latents are than its mel spectrogram, in both directions."""


def ltx_vae() -> AutoencoderKLLTXVideo:
    """Latents are smaller by 8 in space and by 4 in time."""
    blocks = (8, 8, 8, 8)
    halved = (True, True, False, False)
    plain = (False,) * 4
    return AutoencoderKLLTXVideo(
        latent_channels=LATENTS,
        block_out_channels=blocks,
        decoder_block_out_channels=blocks,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=halved,
        decoder_spatio_temporal_scaling=halved,
        decoder_inject_noise=(False,) * 5,
        upsample_residual=plain,
        upsample_factor=(1,) * 4,
        patch_size=2,
    )


def ltx(**shift: Any) -> LTXPipeline:
    return LTXPipeline(
        scheduler=flow_match(**(shift or SHIFT)),
        vae=ltx_vae(),
        text_encoder=t5_encoder(),
        tokenizer=tokenizers.t5(),
        transformer=LTXVideoTransformer3DModel(
            in_channels=LATENTS,
            out_channels=LATENTS,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=HIDDEN,
        ),
    )


def ltx_095() -> LTXPipeline:
    """Checkpoints since 0.9.5 shift the same for all sizes, which conditions on frames need."""
    return ltx(shift=1.5)


def gemma3() -> Gemma3ForConditionalGeneration:
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=Gemma3TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=HIDDEN,
                intermediate_size=2 * HIDDEN,
                num_hidden_layers=TEXT_LAYERS,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                max_position_embeddings=2048,
                layer_types=["sliding_attention", "full_attention"],
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=2,
            ),
            vision_config=SiglipVisionConfig(
                hidden_size=HIDDEN,
                intermediate_size=2 * HIDDEN,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=IMAGE_SIZE,
                patch_size=IMAGE_PATCH,
            ),
            mm_tokens_per_image=4,
            boi_token_index=VOCABULARY - 3,
            eoi_token_index=VOCABULARY - 2,
            image_token_index=VOCABULARY - 1,
        )
    )


def ltx2_vae() -> AutoencoderKLLTX2Video:
    """Latents are smaller by 8 in space and by 4 in time."""
    return AutoencoderKLLTX2Video(
        latent_channels=LATENTS,
        block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        layers_per_block=(1,) * 3,
        decoder_layers_per_block=(1,) * 3,
        spatio_temporal_scaling=(True,) * 2,
        decoder_spatio_temporal_scaling=(True,) * 2,
        decoder_inject_noise=(False,) * 3,
        downsample_type=("spatiotemporal",) * 2,
        upsample_type=("spatiotemporal",) * 2,
        upsample_residual=(True,) * 2,
        upsample_factor=(1,) * 2,
        patch_size=2,
    )


def connector(modality: str) -> dict[str, Any]:
    return {
        f"{modality}_connector_num_attention_heads": 2,
        f"{modality}_connector_attention_head_dim": HIDDEN // 2,
        f"{modality}_connector_num_layers": 1,
        f"{modality}_connector_num_learnable_registers": 8,
    }


def ltx2() -> LTX2Pipeline:
    return LTX2Pipeline(
        scheduler=flow_match(**SHIFT),
        vae=ltx2_vae(),
        audio_vae=AutoencoderKLLTX2Audio(
            base_channels=AUDIO_LATENTS * MEL_BINS // AUDIO_SCALE,
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            resolution=32,
            latent_channels=AUDIO_LATENTS,
            mel_bins=MEL_BINS,
        ),
        text_encoder=gemma3(),
        tokenizer=tokenizers.gemma(1024),
        connectors=LTX2TextConnectors(
            caption_channels=HIDDEN,
            text_proj_in_factor=TEXT_LAYERS + 1,
            rope_double_precision=False,
            **connector("video"),
            **connector("audio"),
        ),
        transformer=LTX2VideoTransformer3DModel(
            in_channels=LATENTS,
            out_channels=LATENTS,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            audio_in_channels=AUDIO_LATENTS * MEL_BINS // AUDIO_SCALE,
            audio_out_channels=AUDIO_LATENTS * MEL_BINS // AUDIO_SCALE,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            num_layers=2,
            caption_channels=HIDDEN,
            vae_scale_factors=(4, 8, 8),
            rope_double_precision=False,
        ),
        vocoder=LTX2Vocoder(
            in_channels=2 * MEL_BINS,
            hidden_channels=32,
            upsample_kernel_sizes=[12, 10, 8, 4],
            upsample_factors=[6, 5, 4, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3]],
        ),
    )


FIRST = {"image": first_frame}
LTX2_GUIDANCE = {"spatio_temporal_guidance_blocks": [1], "max_sequence_length": 128}
RECIPES = {
    "ltx": Recipe(
        ltx,
        (
            VideoExample("LTXPipeline"),
            VideoExample("LTXImageToVideoPipeline", inputs=FIRST),
        ),
    ),
    "ltx_095": Recipe(
        ltx_095,
        (
            VideoExample("LTXPipeline"),
            VideoExample("LTXConditionPipeline", inputs=FIRST),
        ),
    ),
    "ltx2": Recipe(
        ltx2,
        (
            VideoExample("LTX2Pipeline", fixed=LTX2_GUIDANCE),
            VideoExample("LTX2ImageToVideoPipeline", inputs=FIRST, fixed=LTX2_GUIDANCE),
        ),
    ),
}
