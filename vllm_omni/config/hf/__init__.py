# SPDX-License-Identifier: Apache-2.0
"""Config classes of checkpoints that transformers does not know."""

from transformers import AutoConfig, PreTrainedConfig

from vllm_omni.config.hf.higgs_audio_v3 import HiggsAudioV3Config
from vllm_omni.config.hf.moss_tts import MossTTSConfig
from vllm_omni.config.hf.qwen3_tts import Qwen3TTSConfig
from vllm_omni.config.hf.voxcpm2 import VoxCPM2Config
from vllm_omni.config.hf.voxtral_tts import VoxtralTTSConfig, is_voxtral_tts


def register_configs() -> None:
    """Make `AutoConfig` read these checkpoints, in this process. Idempotent."""
    for known in (HiggsAudioV3Config, MossTTSConfig, Qwen3TTSConfig, VoxCPM2Config):
        AutoConfig.register(known.model_type, known, exist_ok=True)


def own_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Our class's config, of a checkpoint in Mistral's layout that vLLM reads in part only."""
    return VoxtralTTSConfig.of(config) if is_voxtral_tts(config) else config
