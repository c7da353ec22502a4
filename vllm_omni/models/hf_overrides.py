# SPDX-License-Identifier: Apache-2.0
"""Turning a checkpoint's config into the config of one of its stages.

vLLM's `hf_overrides` takes a callable; these are picklable by reference, so they reach every
process. vLLM also calls them with an empty config to learn the model type, which must come back
unchanged.
"""

from copy import deepcopy

from transformers import (
    CsmConfig,
    DiaConfig,
    HiggsAudioV2Config,
    PretrainedConfig,
    Qwen2_5OmniConfig,
    Qwen3OmniMoeConfig,
    VibeVoiceConfig,
)

from vllm_omni.config.hf import own_config
from vllm_omni.config.hf.higgs_audio_v3 import HiggsAudioV3Config
from vllm_omni.config.hf.moss_tts import MossTTSConfig
from vllm_omni.config.hf.qwen3_tts import Qwen3TTSConfig
from vllm_omni.config.hf.voxcpm2 import VoxCPM2Config
from vllm_omni.config.hf.voxtral_tts import VoxtralTTSConfig
from vllm_omni.models.dia_sizes import STREAMS, head_size, input_width
from vllm_omni.pipelines.dia import lanes

HIGGS_AUDIO_V2_TALKER = "HiggsAudioV2Talker"
VOXTRAL_TTS_TALKER = "VoxtralTTSTalker"
_MROPE_KEYS = ("mrope_section", "mrope_interleaved", "interleaved")
QWEN3_MROPE_SECTION = [24, 20, 20]
"""What transformers' Qwen3-Omni rotary embedding assumes if the config does not say."""


def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The talker's config of an omni checkpoint, as our talker classes and vLLM expect it."""
    config = own_config(config)
    if isinstance(config, Qwen3OmniMoeConfig):
        return _qwen3_talker(config)
    if isinstance(config, Qwen2_5OmniConfig):
        return _stage_config(config, config.talker_config, "Qwen2_5OmniTalker")
    if isinstance(config, Qwen3TTSConfig):
        return _qwen3_tts_talker(config)
    if isinstance(config, CsmConfig):
        return _stage_config(config, config, "CsmTalker")
    if isinstance(config, HiggsAudioV2Config):
        return _higgs_audio_v2_talker(config)
    if isinstance(config, HiggsAudioV3Config):
        return _higgs_audio_v3_talker(config)
    if isinstance(config, MossTTSConfig):
        return _moss_tts_talker(config)
    if isinstance(config, VibeVoiceConfig):
        return _vibevoice_talker(config)
    if isinstance(config, VoxCPM2Config):
        return _voxcpm2_talker(config)
    if isinstance(config, VoxtralTTSConfig):
        return _voxtral_tts_talker(config)
    if isinstance(config, DiaConfig):
        return _dia_talker(config)
    return config


def _qwen3_talker(config: Qwen3OmniMoeConfig) -> PretrainedConfig:
    talker = _stage_config(config, config.talker_config, "Qwen3OmniMoeTalker")
    talker.tts_pad_token_id = config.tts_pad_token_id
    talker.tts_bos_token_id = config.tts_bos_token_id
    talker.tts_eos_token_id = config.tts_eos_token_id
    # Published configs say `interleaved` here, which vLLM does not read; transformers' class
    # interleaves whatever the config says.
    talker.text_config.rope_parameters = {
        "mrope_section": QWEN3_MROPE_SECTION,
        **talker.text_config.rope_parameters,
        "mrope_interleaved": True,
    }
    return talker


def _qwen3_tts_talker(config: Qwen3TTSConfig) -> PretrainedConfig:
    talker = _stage_config(config, config.talker_config, "Qwen3TTSTalker")
    talker.tts_pad_token_id = config.tts_pad_token_id
    # Its three dimensions of position are always equal: vLLM need not know that there are three.
    rope = talker.rope_parameters
    talker.rope_parameters = {key: value for key, value in rope.items() if key not in _MROPE_KEYS}
    return talker


def _higgs_audio_v2_talker(config: HiggsAudioV2Config) -> PretrainedConfig:
    if config.architectures == [HIGGS_AUDIO_V2_TALKER]:
        return config
    talker = _stage_config(config, config, HIGGS_AUDIO_V2_TALKER)
    talker.text_vocab_size = config.vocab_size
    # What is sampled: the first group's codes, and an id for the end, which only all groups show.
    talker.vocab_size = config.codebook_size + 1
    # vLLM's name for the width of what is fed: with a flag that says what is sound.
    talker.projection_dim = config.hidden_size + 1
    return talker


def _higgs_audio_v3_talker(config: HiggsAudioV3Config) -> PretrainedConfig:
    talker = _stage_config(config, config.text_config, "HiggsAudioV3Talker")
    codes = config.audio_encoder_config
    talker.num_codebooks = codes.num_codebooks
    talker.codebook_size = codes.vocab_size
    talker.tie_codes = codes.tie_word_embeddings
    talker.text_vocab_size = talker.vocab_size
    # What is sampled: the first group's codes, and an id for the end of the whole stream.
    talker.vocab_size = codes.vocab_size + 1
    return talker


def _moss_tts_talker(config: MossTTSConfig) -> PretrainedConfig:
    talker = _stage_config(config, config.language_config, "MossTTSTalker")
    talker.num_codebooks = config.n_vq
    talker.codebook_size = config.audio_vocab_size + 1
    talker.audio_pad_code = config.audio_pad_code
    talker.slot_tokens = {
        "start": config.audio_start_token_id,
        "stop": config.audio_end_token_id,
        "generate": config.audio_assistant_gen_slot_token_id,
        "delay": config.audio_assistant_delay_slot_token_id,
        "end": config.im_end_token_id,
        "pad": config.pad_token_id,
    }
    talker.text_vocab_size = talker.vocab_size
    # What is sampled: the first group's codes, and an id for the end of the whole stream.
    talker.vocab_size = talker.codebook_size + 1
    return talker


def _vibevoice_talker(config: VibeVoiceConfig) -> PretrainedConfig:
    talker = _stage_config(config, config, "VibeVoiceTalker")
    # vLLM's name for the width of what is fed: with the number of the segment.
    talker.text_config.projection_dim = talker.text_config.hidden_size + 1
    return talker


def _voxcpm2_talker(config: VoxCPM2Config) -> PretrainedConfig:
    talker = _stage_config(config, config, "VoxCPM2Talker")
    # What vLLM wants to know of a language model.
    names = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_size")
    lm = config.lm_config
    for name in names:
        setattr(talker, name, lm[name])
    talker.num_hidden_layers = lm["num_hidden_layers"] + config.residual_lm_num_layers
    talker.head_dim = lm["kv_channels"] or lm["hidden_size"] // lm["num_attention_heads"]
    # A frame goes on, or is the last one.
    talker.vocab_size = 2
    # vLLM's name for the width of what is fed: with a flag that says what is a frame, and frames.
    talker.projection_dim = talker.hidden_size + 1 + config.patch_size * config.feat_dim
    return talker


def _voxtral_tts_talker(config: VoxtralTTSConfig) -> PretrainedConfig:
    if config.architectures == [VOXTRAL_TTS_TALKER]:
        return config
    talker = _stage_config(config, config, VOXTRAL_TTS_TALKER)
    talker.text_vocab_size = config.vocab_size
    # What is sampled: the first group's codes.
    talker.vocab_size = config.code_sizes[0]
    return talker


def _dia_talker(config: DiaConfig) -> PretrainedConfig:
    """What vLLM has to know of its sequences (see `models.dia`), and the whole config as `dia`."""
    own = config.decoder_config
    text = config.encoder_config.max_position_embeddings * lanes(own)
    talker = PretrainedConfig(
        architectures=["DiaTalker"],
        dia=deepcopy(config),
        head_dim=head_size(own),
        hidden_size=STREAMS * own.hidden_size,
        intermediate_size=own.intermediate_size,
        max_position_embeddings=text + own.max_position_embeddings,
        num_attention_heads=STREAMS * own.num_attention_heads,
        num_hidden_layers=own.num_hidden_layers,
        num_key_value_heads=STREAMS * own.num_key_value_heads,
        # vLLM's name for the width of what is fed.
        projection_dim=input_width(config),
        # An id for the end, which only a whole row shows.
        vocab_size=own.vocab_size + 1,
    )
    return _stage_config(config, talker, "DiaTalker")


def _stage_config(
    config: PretrainedConfig, stage: PretrainedConfig, architecture: str
) -> PretrainedConfig:
    """A copy of `stage` with what belongs to the checkpoint as a whole."""
    stage = deepcopy(stage)
    stage.architectures = [architecture]
    stage.name_or_path = config.name_or_path
    if stage.dtype is None:
        stage.dtype = config.dtype
    quantization = vars(config).get("quantization_config")
    if quantization is not None:
        stage.quantization_config = quantization
    return stage
