# SPDX-License-Identifier: Apache-2.0
"""Config classes of checkpoints that transformers does not know."""

from transformers import AutoConfig

from vllm_omni.config.hf.qwen3_tts import Qwen3TTSConfig


def register_configs() -> None:
    """Make `AutoConfig` read these checkpoints, in this process. Idempotent."""
    AutoConfig.register(Qwen3TTSConfig.model_type, Qwen3TTSConfig, exist_ok=True)
