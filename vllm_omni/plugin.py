# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads through the `vllm.general_plugins` entry point, in every process."""

ARCHITECTURES = {
    "CsmTalker": "vllm_omni.models.csm:CsmTalker",
    "DiaTalker": "vllm_omni.models.dia:DiaTalker",
    "HiggsAudioV2Talker": "vllm_omni.models.higgs_audio_v2:HiggsAudioV2Talker",
    "HiggsAudioV3Talker": "vllm_omni.models.higgs_audio_v3:HiggsAudioV3Talker",
    "MossTTSTalker": "vllm_omni.models.moss_tts:MossTTSTalker",
    "Qwen2_5OmniTalker": "vllm_omni.models.qwen2_5_omni_talker:Qwen2_5OmniTalker",
    "Qwen3TTSTalker": "vllm_omni.models.qwen3_tts_talker:Qwen3TTSTalker",
    "VoxCPM2Talker": "vllm_omni.models.voxcpm2:VoxCPM2Talker",
    "VibeVoiceTalker": "vllm_omni.models.vibevoice:VibeVoiceTalker",
    "Qwen3OmniMoeTalker": "vllm_omni.models.qwen3_omni_moe_talker:Qwen3OmniMoeTalker",
    "VoxtralTTSTalker": "vllm_omni.models.voxtral_tts:VoxtralTTSTalker",
}
"""Model classes of ours, by architecture; imported when a stage needs one."""


def register() -> None:
    """Register what vLLM does not know: our architectures and config classes. Idempotent."""
    from vllm import ModelRegistry

    from vllm_omni.config.hf import register_configs
    from vllm_omni.start_report import join_start_log

    join_start_log()
    register_configs()
    known = ModelRegistry.get_supported_archs()
    for architecture, path in ARCHITECTURES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, path)
