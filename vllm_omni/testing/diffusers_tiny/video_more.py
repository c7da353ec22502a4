# SPDX-License-Identifier: Apache-2.0
"""CogVideoX, Mochi, Kandinsky 5, SANA-Video, SkyReels-V2 and Helios."""

from typing import Any

from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLMochi,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeliosPipeline,
    HeliosScheduler,
    HeliosTransformer3DModel,
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
)
from transformers import Gemma2Config, Gemma2Model

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.media import VideoExample, first_frame
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    clip_text,
    flow_match,
    qwen2_5_vl,
    qwen2_vl_processor,
    t5_encoder,
)
from vllm_omni.testing.diffusers_tiny.recipe import Recipe
from vllm_omni.testing.diffusers_tiny.tokenizers import VOCABULARY
from vllm_omni.testing.diffusers_tiny.video_parts import (
    hunyuan_video_vae,
    umt5_encoder,
    wan_vae,
)

LATENTS = 16
SMALL_LATENTS = 4
MOCHI_LATENTS = 12
ATTENTION = {"num_attention_heads": 2, "attention_head_dim": 16}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def cogvideox_parts(channels: int) -> dict[str, Any]:
    """Latents are smaller by 8 in space and by 4 in time."""
    return {
        "tokenizer": tokenizers.t5(),
        "text_encoder": t5_encoder(),
        "vae": AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8),
            latent_channels=SMALL_LATENTS,
            layers_per_block=1,
            norm_num_groups=2,
            sample_height=32,
            sample_width=32,
        ),
        "transformer": CogVideoXTransformer3DModel(
            **ATTENTION,
            in_channels=channels,
            out_channels=SMALL_LATENTS,
            time_embed_dim=16,
            text_embed_dim=HIDDEN,
            num_layers=2,
            sample_width=4,
            sample_height=4,
            sample_frames=5,
            use_rotary_positional_embeddings=True,
        ),
        "scheduler": CogVideoXDDIMScheduler(
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            snr_shift_scale=1.0,
            timestep_spacing="trailing",
        ),
    }


def cogvideox() -> CogVideoXPipeline:
    return CogVideoXPipeline(**cogvideox_parts(SMALL_LATENTS))


def cogvideox_i2v() -> CogVideoXImageToVideoPipeline:
    return CogVideoXImageToVideoPipeline(**cogvideox_parts(2 * SMALL_LATENTS))


def mochi() -> MochiPipeline:
    """Latents are smaller by 8 in space and by 6 in time."""
    return MochiPipeline(
        scheduler=flow_match(invert_sigmas=True),
        vae=AutoencoderKLMochi(
            encoder_block_out_channels=(32,) * 4,
            decoder_block_out_channels=(32,) * 4,
            latent_channels=MOCHI_LATENTS,
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=t5_encoder(),
        tokenizer=tokenizers.t5(),
        transformer=MochiTransformer3DModel(
            **ATTENTION,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=MOCHI_LATENTS,
            text_embed_dim=HIDDEN,
            time_embed_dim=16,
        ),
    )


def kandinsky5_parts() -> dict[str, Any]:
    return {
        "transformer": Kandinsky5Transformer3DModel(
            in_visual_dim=SMALL_LATENTS,
            in_text_dim=HIDDEN,
            in_text_dim2=HIDDEN,
            time_dim=16,
            out_visual_dim=SMALL_LATENTS,
            model_dim=32,
            ff_dim=64,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            visual_cond=True,
        ),
        "vae": hunyuan_video_vae(SMALL_LATENTS),
        "text_encoder": qwen2_5_vl(),
        "tokenizer": qwen2_vl_processor(),
        "text_encoder_2": clip_text(),
        "tokenizer_2": tokenizers.clip(),
        "scheduler": flow_match(shift=5.0),
    }


def kandinsky5() -> Kandinsky5T2VPipeline:
    return Kandinsky5T2VPipeline(**kandinsky5_parts())


def kandinsky5_i2v() -> Kandinsky5I2VPipeline:
    return Kandinsky5I2VPipeline(**kandinsky5_parts())


def sana_parts() -> dict[str, Any]:
    return {
        "tokenizer": tokenizers.gemma(),
        "text_encoder": Gemma2Model(
            Gemma2Config(
                vocab_size=VOCABULARY,
                hidden_size=HIDDEN,
                intermediate_size=2 * HIDDEN,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                max_position_embeddings=2048,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=2,
            )
        ),
        "vae": wan_vae(LATENTS),
        "transformer": SanaVideoTransformer3DModel(
            **ATTENTION,
            in_channels=LATENTS,
            out_channels=LATENTS,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=HIDDEN,
            sample_size=4,
        ),
    }


def sana_video() -> SanaVideoPipeline:
    return SanaVideoPipeline(
        **sana_parts(),
        scheduler=DPMSolverMultistepScheduler(**FLOW, flow_shift=8.0),
    )


def sana_video_i2v() -> SanaImageToVideoPipeline:
    return SanaImageToVideoPipeline(
        **sana_parts(), scheduler=FlowMatchEulerDiscreteScheduler(shift=8.0)
    )


def skyreels_parts() -> dict[str, Any]:
    return {
        "tokenizer": tokenizers.t5(),
        "text_encoder": umt5_encoder(),
        "vae": wan_vae(LATENTS),
        "transformer": SkyReelsV2Transformer3DModel(
            **ATTENTION,
            in_channels=LATENTS,
            out_channels=LATENTS,
            text_dim=HIDDEN,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=64,
        ),
        "scheduler": UniPCMultistepScheduler(**FLOW, flow_shift=8.0),
    }


def skyreels_v2() -> SkyReelsV2Pipeline:
    return SkyReelsV2Pipeline(**skyreels_parts())


def skyreels_v2_df() -> SkyReelsV2DiffusionForcingPipeline:
    return SkyReelsV2DiffusionForcingPipeline(**skyreels_parts())


def helios() -> HeliosPipeline:
    """Makes a video chunk by chunk, each seeing the ones before it."""
    return HeliosPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=umt5_encoder(),
        vae=wan_vae(LATENTS),
        scheduler=HeliosScheduler(stages=1, stage_range=[0, 1], gamma=1.0),
        transformer=HeliosTransformer3DModel(
            **ATTENTION,
            in_channels=LATENTS,
            out_channels=LATENTS,
            text_dim=HIDDEN,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            rope_dim=(8, 4, 4),
        ),
    )


def soften_kandinsky5(pipeline: Kandinsky5T2VPipeline) -> None:
    """Steps as large as the random weights make them multiply rounding errors from step to step."""
    pipeline.transformer.out_layer.out_layer.weight.mul_(0.1)


FIRST = {"image": first_frame}
FTFY = ("ftfy",)
SHORT = {"max_sequence_length": 64}
"""Tokens of prompts; the default is 512."""
SANA = {"use_resolution_binning": False}
RECIPES = {
    "cogvideox": Recipe(cogvideox, (VideoExample("CogVideoXPipeline", default_frames=9),)),
    "cogvideox_i2v": Recipe(
        cogvideox_i2v,
        (VideoExample("CogVideoXImageToVideoPipeline", default_frames=9, inputs=FIRST),),
    ),
    "mochi": Recipe(mochi, (VideoExample("MochiPipeline", default_frames=7),)),
    "kandinsky5": Recipe(
        kandinsky5, (VideoExample("Kandinsky5T2VPipeline"),), tune=soften_kandinsky5
    ),
    "kandinsky5_i2v": Recipe(
        kandinsky5_i2v,
        (VideoExample("Kandinsky5I2VPipeline", default_frames=17, inputs=FIRST),),
        tune=soften_kandinsky5,
    ),
    "sana_video": Recipe(
        sana_video, (VideoExample("SanaVideoPipeline", frames="frames", fixed=SANA),)
    ),
    "sana_video_i2v": Recipe(
        sana_video_i2v,
        (VideoExample("SanaImageToVideoPipeline", frames="frames", inputs=FIRST, fixed=SANA),),
    ),
    "skyreels_v2": Recipe(
        skyreels_v2, (VideoExample("SkyReelsV2Pipeline", fixed=SHORT, needs=FTFY),)
    ),
    "skyreels_v2_df": Recipe(
        skyreels_v2_df,
        (
            VideoExample(
                "SkyReelsV2DiffusionForcingPipeline",
                fixed={**SHORT, "base_num_frames": 5, "overlap_history": None},
                needs=FTFY,
            ),
        ),
    ),
    "helios": Recipe(
        helios,
        (
            VideoExample(
                "HeliosPipeline",
                default_frames=9,
                fixed={**SHORT, "num_latent_frames_per_chunk": 3},
                needs=FTFY,
            ),
        ),
    ),
}
