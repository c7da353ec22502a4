# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1 and 2.2: text, image, first-last frame and video to video, VACE, Animate."""

from collections.abc import Mapping
from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.media import (
    Shot,
    VideoExample,
    clip,
    first_frame,
    last_frame,
    mask_clip,
)
from vllm_omni.testing.diffusers_tiny.parts import HIDDEN
from vllm_omni.testing.diffusers_tiny.recipe import Recipe, picture
from vllm_omni.testing.diffusers_tiny.video_parts import (
    IMAGE_TOKENS,
    clip_image_processor,
    clip_vision,
    umt5_encoder,
    wan_vae,
)

LATENTS = 16
MASKED = 2 * LATENTS + 4
"""Channels of noise, of the image's latents and of the mask that says which frames are given."""
TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_dim": HIDDEN,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}
FACE_SIZE = 16
"""Pixels of a side of Animate's face crops."""


def text_parts() -> dict[str, Any]:
    return {"tokenizer": tokenizers.t5(), "text_encoder": umt5_encoder()}


def scheduler() -> UniPCMultistepScheduler:
    """The published checkpoints' scheduler."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=3.0,
    )


def transformer(channels: int = LATENTS, **options: Any) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        in_channels=channels, out_channels=LATENTS, **(TRANSFORMER | options)
    )


def wan21_t2v() -> WanPipeline:
    return WanPipeline(
        **text_parts(), vae=wan_vae(), scheduler=scheduler(), transformer=transformer()
    )


def wan22_t2v() -> WanPipeline:
    """Two transformers: one for high noise and one for low."""
    return WanPipeline(
        **text_parts(),
        vae=wan_vae(),
        scheduler=scheduler(),
        transformer=transformer(),
        transformer_2=transformer(),
        boundary_ratio=0.875,
    )


def wan22_ti2v(pipeline_class: type[WanPipeline] = WanPipeline) -> WanPipeline:
    """The 5B model: more latent channels, smaller latents, a timestep for each token."""
    channels = 48
    return pipeline_class(
        **text_parts(),
        vae=wan_vae(channels, residual=True, patch_size=2),
        scheduler=scheduler(),
        transformer=WanTransformer3DModel(
            in_channels=channels, out_channels=channels, **TRANSFORMER
        ),
        expand_timesteps=True,
    )


def wan21_i2v(positions: int | None = None) -> WanImageToVideoPipeline:
    """The image is seen by CLIP too.

    Args:
        positions: Tokens of both images where the last frame is given as well.
    """
    return WanImageToVideoPipeline(
        **text_parts(),
        vae=wan_vae(),
        scheduler=scheduler(),
        image_processor=clip_image_processor(),
        image_encoder=clip_vision(),
        transformer=transformer(
            MASKED,
            image_dim=HIDDEN,
            added_kv_proj_dim=TRANSFORMER["num_attention_heads"]
            * TRANSFORMER["attention_head_dim"],
            pos_embed_seq_len=positions,
        ),
    )


def wan21_flf2v() -> WanImageToVideoPipeline:
    return wan21_i2v(2 * IMAGE_TOKENS)


def wan22_i2v() -> WanImageToVideoPipeline:
    return WanImageToVideoPipeline(
        **text_parts(),
        vae=wan_vae(),
        scheduler=scheduler(),
        transformer=transformer(MASKED),
        transformer_2=transformer(MASKED),
        boundary_ratio=0.9,
    )


def wan21_vace() -> WanVACEPipeline:
    mask_channels = 64
    return WanVACEPipeline(
        **text_parts(),
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=WanVACETransformer3DModel(
            in_channels=LATENTS,
            out_channels=LATENTS,
            vace_layers=[0, 1],
            vace_in_channels=2 * LATENTS + mask_channels,
            **TRANSFORMER,
        ),
    )


def wan22_animate() -> WanAnimatePipeline:
    return WanAnimatePipeline(
        **text_parts(),
        vae=wan_vae(),
        scheduler=scheduler(),
        image_processor=clip_image_processor(),
        image_encoder=clip_vision(),
        transformer=WanAnimateTransformer3DModel(
            in_channels=MASKED,
            latent_channels=LATENTS,
            out_channels=LATENTS,
            image_dim=HIDDEN,
            added_kv_proj_dim=TRANSFORMER["num_attention_heads"]
            * TRANSFORMER["attention_head_dim"],
            motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
            motion_encoder_size=FACE_SIZE,
            motion_style_dim=8,
            motion_dim=4,
            motion_encoder_dim=16,
            face_encoder_hidden_dim=16,
            face_encoder_num_heads=2,
            inject_face_latents_blocks=2,
            **TRANSFORMER,
        ),
    )


def faces(shot: Shot) -> list[Any]:
    return [picture(FACE_SIZE, FACE_SIZE, shot.seed + index) for index in range(shot.frames)]


def wan(pipeline: str, fixed: Mapping[str, Any] | None = None, **options: Any) -> VideoExample:
    """Prompts of at most 64 tokens; the default is 512."""
    return VideoExample(pipeline, fixed={"max_sequence_length": 64} | (fixed or {}), **options)


FTFY = ("ftfy",)
RECIPES = {
    "wan21_t2v": Recipe(
        wan21_t2v,
        (
            wan("WanPipeline"),
            wan(
                "WanVideoToVideoPipeline",
                frames=None,
                inputs={"video": clip},
                fixed={"strength": 0.9},
                needs=FTFY,
            ),
        ),
    ),
    "wan22_t2v": Recipe(wan22_t2v, (wan("WanPipeline"),)),
    "wan22_ti2v": Recipe(
        wan22_ti2v,
        (
            wan("WanPipeline"),
            wan("WanImageToVideoPipeline", inputs={"image": first_frame}, needs=FTFY),
        ),
    ),
    "wan21_i2v": Recipe(
        wan21_i2v,
        (wan("WanImageToVideoPipeline", inputs={"image": first_frame}, needs=FTFY),),
    ),
    "wan21_flf2v": Recipe(
        wan21_flf2v,
        (
            wan(
                "WanImageToVideoPipeline",
                inputs={"image": first_frame, "last_image": last_frame},
                needs=FTFY,
            ),
        ),
    ),
    "wan22_i2v": Recipe(
        wan22_i2v,
        (wan("WanImageToVideoPipeline", inputs={"image": first_frame}, needs=FTFY),),
    ),
    "wan21_vace": Recipe(
        wan21_vace,
        (wan("WanVACEPipeline", inputs={"video": clip, "mask": mask_clip}, needs=FTFY),),
    ),
    "wan22_animate": Recipe(
        wan22_animate,
        (
            wan(
                "WanAnimatePipeline",
                frames="segment_frame_length",
                inputs={"image": first_frame, "pose_video": clip, "face_video": faces},
                needs=FTFY,
            ),
        ),
    ),
}
