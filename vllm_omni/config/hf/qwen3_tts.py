# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a Qwen3-TTS checkpoint (`model_type: qwen3_tts`).

Fields, defaults and their meaning are those of the authors' package, `qwen-tts` 0.1.1; but where
its default ids lie outside of its default vocabulary, they are those of the published checkpoints.
Rotary settings are `rope_parameters`, as everywhere in transformers 5, whichever way a file says
them.
"""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, Qwen3OmniMoeTalkerCodePredictorConfig


@strict
class Qwen3TTSSpeakerEncoderConfig(PreTrainedConfig):
    """The network that makes a speaker embedding out of a recording (an ECAPA-TDNN).

    Attributes:
        mel_dim: Bands of the mel spectrogram that it takes.
        enc_dim: Size of a speaker embedding.
        enc_channels: Channels after each block; the last ones are those of the aggregation.
        enc_kernel_sizes: Kernel size of each block.
        enc_dilations: Dilation of each block.
        enc_attention_channels: Inner channels of the pooling over time.
        enc_res2net_scale: Parts into which a block splits its channels.
        enc_se_channels: Inner channels of the squeeze and excitation.
        sample_rate: Of the recording, Hz.
    """

    model_type = "qwen3_tts_speaker_encoder"
    base_config_key = "speaker_encoder_config"

    mel_dim: int = 128
    enc_dim: int = 1024
    enc_channels: list[int] | tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: list[int] | tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: list[int] | tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128
    sample_rate: int = 24000


@strict
class Qwen3TTSTalkerCodePredictorConfig(Qwen3OmniMoeTalkerCodePredictorConfig):
    """The transformer that completes a codec frame: Qwen3-Omni's, at its own width.

    Attributes:
        use_sliding_window: Without it, `sliding_window` says nothing.
    """

    model_type = "qwen3_tts_talker_code_predictor"

    use_sliding_window: bool = False

    def __post_init__(self, **kwargs) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        super().__post_init__(**kwargs)


@strict
class Qwen3TTSTalkerConfig(PreTrainedConfig):
    """The codec language model: a Qwen3 decoder over text and codec frames.

    Attributes:
        vocab_size: First codes of a frame, then the ids below, languages and speakers.
        text_vocab_size: Tokens of the text.
        text_hidden_size: Width of the text's embeddings, before they are projected.
        num_code_groups: Codes per frame.
        position_id_per_seconds: Frames per second, rounded.
        spk_id: Id of each voice, by lower-case name.
        spk_is_dialect: For each voice, the language (a key of `codec_language_id`) that it speaks
            when no other than Chinese is asked for, or False.
        codec_language_id: Id of each language, by lower-case name; names with `dialect` in them
            cannot be asked for by themselves.
    """

    model_type = "qwen3_tts_talker"
    base_config_key = "talker_config"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers' own field
    sub_configs = {"code_predictor_config": Qwen3TTSTalkerCodePredictorConfig}  # noqa: RUF012
    ignore_keys_at_rope_validation = {"mrope_section", "interleaved", "mrope_interleaved"}  # noqa: RUF012

    code_predictor_config: dict | PreTrainedConfig | None = None
    vocab_size: int = 3072
    hidden_size: int = 1024
    intermediate_size: int = 2048
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    attention_dropout: float | int = 0.0
    num_code_groups: int = 32
    text_vocab_size: int = 151936
    text_hidden_size: int = 2048
    codec_eos_token_id: int = 2150
    codec_think_id: int = 2154
    codec_nothink_id: int = 2155
    codec_think_bos_id: int = 2156
    codec_think_eos_id: int = 2157
    codec_pad_id: int = 2148
    codec_bos_id: int = 2149
    position_id_per_seconds: int = 13
    spk_id: dict | None = None
    spk_is_dialect: dict | None = None
    codec_language_id: dict | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs) -> None:
        if not isinstance(self.code_predictor_config, PreTrainedConfig):
            self.code_predictor_config = Qwen3TTSTalkerCodePredictorConfig(
                **(self.code_predictor_config or {})
            )
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.spk_id = self.spk_id or {}
        self.spk_is_dialect = self.spk_is_dialect or {}
        self.codec_language_id = self.codec_language_id or {}
        super().__post_init__(**kwargs)


@strict
class Qwen3TTSConfig(PreTrainedConfig):
    """The whole checkpoint.

    Attributes:
        tokenizer_type: Which codec `speech_tokenizer/` is: `qwen3_tts_tokenizer_12hz`.
        tts_model_size: `0b6` or `1b7`; the smaller one's voices take no instructions.
        tts_model_type: How the voice is chosen: `base` (a recording), `custom_voice` (by name) or
            `voice_design` (in words).
    """

    model_type = "qwen3_tts"
    sub_configs = {  # noqa: RUF012 - transformers' own field
        "talker_config": Qwen3TTSTalkerConfig,
        "speaker_encoder_config": Qwen3TTSSpeakerEncoderConfig,
    }

    talker_config: dict | PreTrainedConfig | None = None
    speaker_encoder_config: dict | PreTrainedConfig | None = None
    tokenizer_type: str | None = None
    tts_model_size: str | None = None
    tts_model_type: str | None = None
    im_start_token_id: int = 151644
    im_end_token_id: int = 151645
    assistant_token_id: int = 77091
    tts_pad_token_id: int = 151671
    tts_bos_token_id: int = 151672
    tts_eos_token_id: int = 151673

    def __post_init__(self, **kwargs) -> None:
        if not isinstance(self.talker_config, PreTrainedConfig):
            self.talker_config = Qwen3TTSTalkerConfig(**(self.talker_config or {}))
        if not isinstance(self.speaker_encoder_config, PreTrainedConfig):
            self.speaker_encoder_config = Qwen3TTSSpeakerEncoderConfig(
                **(self.speaker_encoder_config or {})
            )
        super().__post_init__(**kwargs)

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> PreTrainedConfig:
        """The config of what reads and writes tokens: the talker's."""
        return self.talker_config
