# SPDX-License-Identifier: Apache-2.0
"""Sounds and music: Stable Audio, Stable Audio 3, ACE-Step, LongCat-Audio, AudioLDM 2."""

from typing import Any

import torch
from diffusers import (
    AceStepPipeline,
    AceStepTransformer1DModel,
    AudioLDM2Pipeline,
    AudioLDM2ProjectionModel,
    AudioLDM2UNet2DConditionModel,
    AutoencoderKL,
    AutoencoderOobleck,
    AutoencoderSAME,
    DDIMScheduler,
    EDMDPMSolverMultistepScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTTransformer,
    LongCatAudioDiTVae,
    StableAudio3DiTModel,
    StableAudio3Pipeline,
    StableAudioDiTModel,
    StableAudioPipeline,
    StableAudioProjectionModel,
)
from diffusers.pipelines.ace_step import AceStepConditionEncoder
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder
from transformers import (
    ClapAudioConfig,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    ClapTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Model,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
    T5GemmaConfig,
    T5GemmaEncoderModel,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.media import AudioExample
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    flow_match,
    qwen3_config,
    t5_encoder,
)
from vllm_omni.testing.diffusers_tiny.recipe import Recipe
from vllm_omni.testing.diffusers_tiny.tokenizers import VOCABULARY
from vllm_omni.testing.diffusers_tiny.video_parts import roberta, umt5_encoder

LATENTS = 8


def oobleck(rate: int) -> AutoencoderOobleck:
    """One latent for 320 samples."""
    return AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[4, 8, 10],
        channel_multiples=[1, 2, 2],
        decoder_channels=8,
        decoder_input_channels=LATENTS,
        audio_channels=2,
        sampling_rate=rate,
    )


def stable_audio() -> StableAudioPipeline:
    """A second is 25 latents; at most two seconds."""
    return StableAudioPipeline(
        vae=oobleck(8000),
        text_encoder=t5_encoder(),
        projection_model=StableAudioProjectionModel(
            text_encoder_dim=HIDDEN, conditioning_dim=HIDDEN, min_value=0, max_value=2
        ),
        tokenizer=tokenizers.t5(max_length=64),
        transformer=StableAudioDiTModel(
            sample_size=50,
            in_channels=LATENTS,
            out_channels=LATENTS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_attention_heads=2,
            cross_attention_dim=HIDDEN,
            cross_attention_input_dim=HIDDEN,
            global_states_input_dim=2 * HIDDEN,
            time_proj_dim=32,
        ),
        scheduler=EDMDPMSolverMultistepScheduler(
            prediction_type="v_prediction",
            sigma_min=0.3,
            sigma_max=500,
            sigma_schedule="exponential",
        ),
    )


def stable_audio_3() -> StableAudio3Pipeline:
    """One latent for 64 samples, 125 latents a second; the scheduler adds noise at every step."""
    layers = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return StableAudio3Pipeline(
        vae=AutoencoderSAME(
            patch_size=16,
            encoder_channels=16,
            encoder_c_mults=[2],
            encoder_strides=[4],
            encoder_transformer_depths=[1],
            latent_dim=LATENTS,
            dim_heads=16,
            sliding_window=4,
            sampling_rate=8000,
        ),
        text_encoder=T5GemmaEncoderModel(
            T5GemmaConfig(encoder=dict(layers), decoder=dict(layers), is_encoder_decoder=False)
        ),
        tokenizer=tokenizers.gemma(64),
        duration_embedder=StableAudio3DurationEmbedder(output_dim=HIDDEN, fourier_dim=16),
        transformer=StableAudio3DiTModel(
            io_channels=LATENTS,
            embed_dim=HIDDEN,
            depth=2,
            num_heads=2,
            cond_token_dim=HIDDEN,
            global_cond_dim=HIDDEN,
            local_add_cond_dim=LATENTS + 1,
            timestep_features_dim=16,
            num_memory_tokens=4,
        ),
        scheduler=flow_match(stochastic_sampling=True),
    )


def ace_step() -> AceStepPipeline:
    """A second is 25 latents, as in the real model."""
    attention: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 16,
    }
    conditions = AceStepConditionEncoder(
        text_hidden_dim=HIDDEN,
        timbre_hidden_dim=LATENTS,
        num_lyric_encoder_hidden_layers=2,
        num_timbre_encoder_hidden_layers=2,
        **attention,
    )
    frames = torch.arange(conditions.silence_latent.shape[1])[:, None]
    conditions.silence_latent.copy_(torch.sin(frames * (1 + torch.arange(LATENTS)) / 7))
    return AceStepPipeline(
        vae=oobleck(8000),
        text_encoder=Qwen3Model(qwen3_config()),
        tokenizer=tokenizers.qwen(),
        transformer=AceStepTransformer1DModel(
            num_hidden_layers=2,
            in_channels=3 * LATENTS,
            audio_acoustic_hidden_dim=LATENTS,
            encoder_hidden_size=HIDDEN,
            **attention,
        ),
        condition_encoder=conditions,
        scheduler=flow_match(num_train_timesteps=1, shift=1.0),
    )


def longcat_audio() -> LongCatAudioDiTPipeline:
    """A second is 25 latents."""
    return LongCatAudioDiTPipeline(
        vae=LongCatAudioDiTVae(
            channels=8,
            c_mults=[1, 2, 2],
            strides=[4, 8, 10],
            latent_dim=LATENTS,
            encoder_latent_dim=2 * LATENTS,
            downsampling_ratio=320,
            sample_rate=8000,
        ),
        text_encoder=umt5_encoder(),
        tokenizer=tokenizers.t5(),
        transformer=LongCatAudioDiTTransformer(
            dit_dim=HIDDEN,
            dit_depth=2,
            dit_heads=2,
            dit_text_dim=HIDDEN,
            latent_dim=LATENTS,
        ),
        scheduler=flow_match(shift=1.0, invert_sigmas=True),
    )


def clap() -> ClapModel:
    return ClapModel(
        ClapConfig(
            text_config=ClapTextConfig(
                vocab_size=VOCABULARY,
                hidden_size=HIDDEN,
                intermediate_size=2 * HIDDEN,
                num_hidden_layers=2,
                num_attention_heads=2,
                projection_dim=HIDDEN,
                max_position_embeddings=80,
            ).to_dict(),
            audio_config=ClapAudioConfig(
                spec_size=64,
                window_size=4,
                num_mel_bins=64,
                hidden_size=HIDDEN,
                patch_embeds_hidden_size=16,
                projection_dim=HIDDEN,
                depths=[1, 1],
                num_attention_heads=[2, 2],
                num_hidden_layers=2,
            ).to_dict(),
            projection_dim=HIDDEN,
        )
    )


def audioldm2() -> AudioLDM2Pipeline:
    """Mel frames of 8 bins, 10 ms each; 16 samples a frame."""
    mel_bins, gpt_width = 8, 16
    widths = (None, gpt_width, HIDDEN)
    return AudioLDM2Pipeline(
        vae=AutoencoderKL(
            in_channels=1,
            out_channels=1,
            down_block_types=["DownEncoderBlock2D"] * 3,
            up_block_types=["UpDecoderBlock2D"] * 3,
            block_out_channels=(16,) * 3,
            latent_channels=4,
            norm_num_groups=4,
        ),
        text_encoder=clap(),
        text_encoder_2=t5_encoder(),
        projection_model=AudioLDM2ProjectionModel(HIDDEN, HIDDEN, gpt_width),
        language_model=GPT2LMHeadModel(
            GPT2Config(
                vocab_size=64,
                n_embd=gpt_width,
                n_layer=2,
                n_head=2,
                n_positions=256,
                max_new_tokens=4,
            )
        ),
        tokenizer=roberta(),
        tokenizer_2=tokenizers.t5(max_length=64),
        feature_extractor=ClapFeatureExtractor(feature_size=64, fft_window_size=64),
        unet=AudioLDM2UNet2DConditionModel(
            in_channels=4,
            out_channels=4,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=(widths, widths),
        ),
        scheduler=DDIMScheduler(
            beta_start=0.0015, beta_end=0.0195, beta_schedule="scaled_linear", clip_sample=False
        ),
        vocoder=SpeechT5HifiGan(
            SpeechT5HifiGanConfig(
                model_in_dim=mel_bins,
                sampling_rate=1600,
                upsample_initial_channel=16,
                upsample_rates=[4, 4],
                upsample_kernel_sizes=[8, 8],
                resblock_kernel_sizes=[3],
                resblock_dilation_sizes=[[1, 3]],
                normalize_before=False,
            )
        ),
    )


def soften_oobleck(pipeline: StableAudioPipeline) -> None:
    """Its layers have no norms, so that values grow from layer to layer."""
    pipeline.vae.decoder.conv2.weight_g.mul_(0.02)


def soften_longcat(pipeline: LongCatAudioDiTPipeline) -> None:
    """Its layers have no norms, so that values grow from layer to layer."""
    pipeline.vae.decoder.layers[-2].weight_g.mul_(0.01)


RECIPES = {
    "stable_audio": Recipe(
        stable_audio,
        (AudioExample("StableAudioPipeline", seconds="audio_end_in_s"),),
        tune=soften_oobleck,
    ),
    "stable_audio_3": Recipe(
        stable_audio_3, (AudioExample("StableAudio3Pipeline", seconds="duration"),)
    ),
    "ace_step": Recipe(
        ace_step,
        (
            AudioExample(
                "AceStepPipeline",
                negative=False,
                seconds="audio_duration",
                fixed={"lyrics": "[verse] a red square moves to the right", "shift": 1.0},
            ),
        ),
    ),
    "longcat_audio": Recipe(
        longcat_audio,
        (AudioExample("LongCatAudioDiTPipeline", seconds="audio_duration_s"),),
        tune=soften_longcat,
    ),
    "audioldm2": Recipe(audioldm2, (AudioExample("AudioLDM2Pipeline"),)),
}
