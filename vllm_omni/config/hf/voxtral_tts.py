# SPDX-License-Identifier: Apache-2.0
"""A Voxtral TTS checkpoint's `params.json`, in Mistral's own layout.

vLLM reads the backbone's part of such a file; the parts for sound are under `multimodal`. Fields
and their meaning are those of the published file of `mistralai/Voxtral-4B-TTS-2603`.
"""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

MODEL_TYPE = "voxtral_tts"
ARCHITECTURE = "VoxtralTTSForConditionalGeneration"
SPECIAL_CODES = 2
"""Each group has so many before its own: `EMPTY` and `END`."""
EMPTY, END = 0, 1
"""Special codes: no sound, and (of the first group) the end of the speech."""
DECODING_STEPS = 7
"""Of the flow, where the file does not say."""
_TABLE_MULTIPLE = 128
"""Embedding tables and heads are padded to a multiple of this."""


@strict
class VoxtralAcousticConfig(PreTrainedConfig):
    """The flow-matching transformer that makes a frame's acoustic codes.

    Attributes:
        input_dim: Width of the backbone.
        n_decoding_steps: Euler steps.
    """

    model_type = "voxtral_tts_acoustic"
    base_config_key = "acoustic_config"

    input_dim: int = 3072
    dim: int = 3072
    n_layers: int = 3
    head_dim: int = 128
    hidden_dim: int = 9216
    n_heads: int = 32
    n_kv_heads: int = 8
    use_biases: bool = False
    norm_eps: float = 1e-5
    n_decoding_steps: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.n_decoding_steps is None:
            self.n_decoding_steps = DECODING_STEPS
        super().__post_init__(**kwargs)


@strict
class VoxtralCodecConfig(PreTrainedConfig):
    """The codec: convolutions and transformers in turn, over patches of samples.

    Attributes:
        pretransform_patch_size: Samples of a patch.
        attn_sliding_window_size: Positions before itself that a patch attends to; halved where the
            encoder halves the rate, if `half_attn_window_upon_downsampling`.
        encoder_transformer_lengths_str: Layers of each transformer, separated by commas. Likewise
            the others: of the convolution after it (encoder), or before it (decoder).
    """

    model_type = "voxtral_tts_codec"
    base_config_key = "codec_config"

    channels: int = 1
    sampling_rate: int = 24000
    pretransform_patch_size: int = 240
    patch_proj_kernel_size: int = 7
    semantic_codebook_size: int = 8192
    semantic_dim: int = 256
    acoustic_codebook_size: int = 21
    acoustic_dim: int = 36
    conv_weight_norm: bool = True
    causal: bool = True
    attn_sliding_window_size: int = 16
    half_attn_window_upon_downsampling: bool = True
    dim: int = 1024
    hidden_dim: int = 4096
    head_dim: int = 128
    n_heads: int = 8
    n_kv_heads: int = 8
    qk_norm: bool = True
    qk_norm_eps: float = 1e-6
    use_biases: bool = False
    norm_eps: float = 1e-2
    layer_scale: bool = True
    encoder_transformer_lengths_str: str = "2,2,2,2"
    encoder_convs_kernels_str: str = "4,4,4,3"
    encoder_convs_strides_str: str = "2,2,2,1"
    decoder_transformer_lengths_str: str = "2,2,2,2"
    decoder_convs_kernels_str: str = "3,4,4,4"
    decoder_convs_strides_str: str = "1,2,2,2"

    @property
    def encoder_strides(self) -> tuple[int, ...]:
        """Of the encoder's convolutions."""
        return numbers(self.encoder_convs_strides_str)

    @property
    def decoder_strides(self) -> tuple[int, ...]:
        """Of the decoder's convolutions."""
        return numbers(self.decoder_convs_strides_str)

    @property
    def patches_per_frame(self) -> int:
        """Patches that a frame of codes stands for."""
        return math.prod(self.decoder_strides)

    @property
    def samples_per_frame(self) -> int:
        """Samples that a frame of codes stands for."""
        return self.pretransform_patch_size * self.patches_per_frame

    @property
    def latent_dim(self) -> int:
        """Numbers of a frame, once its codes are looked up."""
        return self.semantic_dim + self.acoustic_dim

    @property
    def innermost_window(self) -> int:
        """Attention window at the rate of frames."""
        if not self.half_attn_window_upon_downsampling:
            return self.attn_sliding_window_size
        return self.attn_sliding_window_size // math.prod(self.encoder_strides)


@strict
class VoxtralTTSConfig(PreTrainedConfig):
    """The whole checkpoint.

    Attributes:
        vocab_size: Tokens of the text.
        semantic_codebook_size: Codes of the first group, without the special ones.
        acoustic_codebook_size: Levels of each further group, likewise.
        n_acoustic_codebook: Further groups.
        voices: Number of each voice, by name; what it sounds like is in `voice_embedding/`.
    """

    model_type = MODEL_TYPE
    sub_configs = {  # noqa: RUF012 - transformers' own field
        "acoustic_config": VoxtralAcousticConfig,
        "codec_config": VoxtralCodecConfig,
    }

    acoustic_config: dict | PreTrainedConfig | None = None
    codec_config: dict | PreTrainedConfig | None = None
    vocab_size: int = 131072
    hidden_size: int = 3072
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    rope_parameters: dict | None = None
    max_position_embeddings: int = 65536
    tie_word_embeddings: bool = True
    semantic_codebook_size: int = 8192
    acoustic_codebook_size: int = 21
    n_acoustic_codebook: int = 36
    voices: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.acoustic_config, PreTrainedConfig):
            self.acoustic_config = VoxtralAcousticConfig(**(self.acoustic_config or {}))
        if not isinstance(self.codec_config, PreTrainedConfig):
            self.codec_config = VoxtralCodecConfig(**(self.codec_config or {}))
        self.voices = self.voices or {}
        super().__post_init__(**kwargs)

    @property
    def groups(self) -> int:
        """Codes per frame."""
        return 1 + self.n_acoustic_codebook

    @property
    def code_sizes(self) -> tuple[int, ...]:
        """Codes of each group, the special ones included."""
        acoustic = self.acoustic_codebook_size + SPECIAL_CODES
        semantic = self.semantic_codebook_size + SPECIAL_CODES
        return (semantic, *[acoustic] * self.n_acoustic_codebook)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "VoxtralTTSConfig":
        """From what vLLM makes of `params.json`, if `is_voxtral_tts`.

        Raises:
            ValueError: A section is missing, or a value is of a wrong kind.
        """
        given = config.to_dict()
        multimodal = given["multimodal"]
        codec = multimodal.get("audio_tokenizer_args")
        if not isinstance(codec, dict):
            raise ValueError("multimodal.audio_tokenizer_args is missing")
        codes = dict(multimodal["audio_model_args"])
        codes.update(_code_sizes(codes))
        own = {name: given[name] for name in cls.__annotations__ if name in given}
        rope = given.get("rope_parameters") or {
            "rope_type": "default",
            "rope_theta": float(given.get("rope_theta", 1e6)),
        }
        return cls(
            **{
                **own,
                "rope_parameters": rope,
                "architectures": [ARCHITECTURE],
                "dtype": given.get("dtype"),
                "acoustic_config": _known(
                    VoxtralAcousticConfig, codes.get("acoustic_transformer_args") or {}
                ),
                "codec_config": _known(VoxtralCodecConfig, codec),
                "voices": codec.get("voice") or {},
                **{name: codes[name] for name in _CODE_SIZES},
            }
        )


_CODE_SIZES = ("semantic_codebook_size", "acoustic_codebook_size", "n_acoustic_codebook")


def is_voxtral_tts(config: PreTrainedConfig) -> bool:
    """Whether this is what vLLM makes of a Voxtral TTS checkpoint's `params.json`."""
    multimodal = config.to_dict().get("multimodal")
    return isinstance(multimodal, dict) and isinstance(multimodal.get("audio_model_args"), dict)


def numbers(text: str) -> tuple[int, ...]:
    """`2,2,2` as numbers."""
    return tuple(int(number) for number in text.split(","))


def padded(size: int) -> int:
    """Size of a table or head for so many entries."""
    return -(-size // _TABLE_MULTIPLE) * _TABLE_MULTIPLE


def _code_sizes(codes: dict[str, Any]) -> dict[str, int]:
    """Some files give the sizes of all groups as one text, `codebook_sizes`."""
    if "codebook_sizes" not in codes:
        return {}
    semantic, *acoustic = numbers(codes["codebook_sizes"])
    return dict(zip(_CODE_SIZES, (semantic, acoustic[0], len(acoustic)), strict=True))


def _known(kind: type[PreTrainedConfig], section: dict[str, Any]) -> dict[str, Any]:
    """What of a section its config has: others concern training."""
    return {key: value for key, value in section.items() if key in kind.__annotations__}
