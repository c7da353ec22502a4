# SPDX-License-Identifier: Apache-2.0
"""Cosmos 1, Predict 2 and Predict 2.5: text and video to world, text to image."""

from typing import Any

from diffusers import (
    AutoencoderKLCosmos,
    Cosmos2_5_PredictBasePipeline,
    Cosmos2TextToImagePipeline,
    Cosmos2VideoToWorldPipeline,
    CosmosTextToWorldPipeline,
    CosmosTransformer3DModel,
    CosmosVideoToWorldPipeline,
    DiffusionPipeline,
    EDMEulerScheduler,
    UniPCMultistepScheduler,
)

from vllm_omni.testing.diffusers_tiny import safety, tokenizers
from vllm_omni.testing.diffusers_tiny.media import VideoExample, first_frame
from vllm_omni.testing.diffusers_tiny.parts import HIDDEN, flow_match, qwen2_5_vl, t5_encoder
from vllm_omni.testing.diffusers_tiny.recipe import Recipe
from vllm_omni.testing.diffusers_tiny.video_parts import wan_vae

LATENTS = 16
SMALL_LATENTS = 4


def transformer(channels: int, out_channels: int, **options: Any) -> CosmosTransformer3DModel:
    return CosmosTransformer3DModel(
        in_channels=channels,
        out_channels=out_channels,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        **({"text_embed_dim": HIDDEN} | options),
    )


def cosmos_vae() -> AutoencoderKLCosmos:
    """Latents are smaller by 8 in space and in time."""
    return AutoencoderKLCosmos(
        latent_channels=SMALL_LATENTS,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        latents_mean=None,
        latents_std=None,
    )


def cosmos1_parts() -> dict[str, Any]:
    return {
        "text_encoder": t5_encoder(),
        "tokenizer": tokenizers.t5(),
        "vae": cosmos_vae(),
        "scheduler": EDMEulerScheduler(
            sigma_min=0.002,
            sigma_max=80,
            sigma_data=0.5,
            sigma_schedule="karras",
            rho=7.0,
            final_sigmas_type="sigma_min",
        ),
        "safety_checker": safety.LenientSafetyChecker(),
    }


def cosmos2_parts() -> dict[str, Any]:
    return {
        "text_encoder": t5_encoder(),
        "tokenizer": tokenizers.t5(),
        "vae": wan_vae(LATENTS),
        "scheduler": flow_match(use_karras_sigmas=True),
        "safety_checker": safety.LenientSafetyChecker(),
    }


def cosmos1_t2w() -> CosmosTextToWorldPipeline:
    return CosmosTextToWorldPipeline(
        **cosmos1_parts(), transformer=transformer(SMALL_LATENTS, SMALL_LATENTS)
    )


def cosmos1_v2w() -> CosmosVideoToWorldPipeline:
    """One more channel says which frames are given."""
    return CosmosVideoToWorldPipeline(
        **cosmos1_parts(), transformer=transformer(SMALL_LATENTS + 1, SMALL_LATENTS)
    )


def cosmos2_t2i() -> Cosmos2TextToImagePipeline:
    return Cosmos2TextToImagePipeline(
        **cosmos2_parts(), transformer=transformer(LATENTS, LATENTS, extra_pos_embed_type=None)
    )


def cosmos2_v2w() -> Cosmos2VideoToWorldPipeline:
    return Cosmos2VideoToWorldPipeline(
        **cosmos2_parts(), transformer=transformer(LATENTS + 1, LATENTS, extra_pos_embed_type=None)
    )


def cosmos25() -> Cosmos2_5_PredictBasePipeline:
    """Its text is what all layers of Qwen2.5-VL say."""
    text_encoder = qwen2_5_vl()
    layers = text_encoder.config.text_config.num_hidden_layers
    parts = cosmos2_parts() | {
        "text_encoder": text_encoder,
        "tokenizer": tokenizers.qwen(),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
    }
    return Cosmos2_5_PredictBasePipeline(
        **parts,
        transformer=transformer(
            LATENTS + 1,
            LATENTS,
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=layers * HIDDEN,
            encoder_hidden_states_channels=HIDDEN,
        ),
    )


def name_safety_checker(pipeline: DiffusionPipeline) -> None:
    """Diffusers would write the last folder of the module's path only."""
    checker = type(pipeline.safety_checker)
    pipeline.register_to_config(safety_checker=(checker.__module__, checker.__name__))


def world(pipeline: str, **options: Any) -> VideoExample:
    """Prompts of at most 64 tokens; the default is 512."""
    fixed = {"max_sequence_length": 64}
    return VideoExample(pipeline, default_frames=9, fixed=fixed, **options)


FIRST = {"image": first_frame}
RECIPES = {
    "cosmos1_t2w": Recipe(
        cosmos1_t2w, (world("CosmosTextToWorldPipeline"),), tune=name_safety_checker
    ),
    "cosmos1_v2w": Recipe(
        cosmos1_v2w, (world("CosmosVideoToWorldPipeline", inputs=FIRST),), tune=name_safety_checker
    ),
    "cosmos2_t2i": Recipe(
        cosmos2_t2i,
        (world("Cosmos2TextToImagePipeline", frames=None, output="images"),),
        tune=name_safety_checker,
    ),
    "cosmos2_v2w": Recipe(
        cosmos2_v2w,
        (world("Cosmos2VideoToWorldPipeline", inputs=FIRST),),
        tune=name_safety_checker,
    ),
    "cosmos25": Recipe(
        cosmos25,
        (world("Cosmos2_5_PredictBasePipeline"),),
        tune=name_safety_checker,
    ),
}
