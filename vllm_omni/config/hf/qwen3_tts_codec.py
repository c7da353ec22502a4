# SPDX-License-Identifier: Apache-2.0
"""`speech_tokenizer/config.json` of a Qwen3-TTS checkpoint (`qwen3_tts_tokenizer_12hz`).

Fields and defaults are those of the authors' package, `qwen-tts` 0.1.1.
"""

from huggingface_hub.dataclasses import strict
from transformers import MimiConfig, PretrainedConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)


@strict
class Qwen3TTSCodecDecoderConfig(Qwen3OmniMoeCode2WavConfig):
    """Codes to sound: Qwen3-Omni's decoder behind a quantizer of its own.

    Attributes:
        codebook_dim: Width of a dequantized frame.
        latent_dim: Width before and after the transformer.
        head_dim: Of the attention; None divides `hidden_size`.
    """

    model_type = "qwen3_tts_tokenizer_12hz_decoder"
    base_config_key = "decoder_config"

    codebook_dim: int = 512
    latent_dim: int = 1024
    head_dim: int | None = None

    def __post_init__(self, **kwargs) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


@strict
class Qwen3TTSCodecConfig(PretrainedConfig):
    """The codec: sound to codes by a Mimi encoder, codes to sound by a decoder.

    Attributes:
        encoder_valid_num_quantizers: Codes per frame: the first of those that the encoder makes.
        input_sample_rate: Of sound to encode, Hz.
        output_sample_rate: Of decoded sound, Hz.
        encode_downsample_rate: Samples to encode per frame.
        decode_upsample_rate: Decoded samples per frame.
    """

    model_type = "qwen3_tts_tokenizer_12hz"
    sub_configs = {  # noqa: RUF012 - transformers' own field
        "encoder_config": MimiConfig,
        "decoder_config": Qwen3TTSCodecDecoderConfig,
    }

    encoder_config: dict | PretrainedConfig | None = None
    decoder_config: dict | PretrainedConfig | None = None
    encoder_valid_num_quantizers: int = 16
    input_sample_rate: int = 24000
    output_sample_rate: int = 24000
    encode_downsample_rate: int = 1920
    decode_upsample_rate: int = 1920

    def __post_init__(self, **kwargs) -> None:
        if not isinstance(self.encoder_config, PretrainedConfig):
            self.encoder_config = MimiConfig(**(self.encoder_config or {}))
        if not isinstance(self.decoder_config, PretrainedConfig):
            self.decoder_config = Qwen3TTSCodecDecoderConfig(**(self.decoder_config or {}))
        super().__post_init__(**kwargs)
