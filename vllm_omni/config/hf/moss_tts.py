# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a MOSS-TTS checkpoint (`model_type: moss_tts_delay`) and of its codec.

Fields and defaults are those of the code that comes with the published checkpoints
(`configuration_moss_tts.py`, `configuration_moss_audio_tokenizer.py`).
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, Qwen3Config


@strict
class MossTTSConfig(PreTrainedConfig):
    """The whole checkpoint.

    Attributes:
        language_config: The backbone, a Qwen3.
        n_vq: Codes per frame: 32 of MOSS-TTS, 16 of its relatives.
        audio_vocab_size: Codes of the codec per group; one more is embedded, `audio_pad_code`.
        audio_user_slot_token_id: Text token beside the rows of a recording in a prompt.
        audio_assistant_gen_slot_token_id: Text token of a row of the sound that is made.
        audio_assistant_delay_slot_token_id: Likewise, of the rows after its last frame has begun.
        audio_pad_code: Stands where there is no code.
    """

    model_type = "moss_tts_delay"
    sub_configs = {"language_config": Qwen3Config}  # noqa: RUF012 - transformers' own field

    language_config: dict | PreTrainedConfig | None = None
    n_vq: int = 32
    pad_token_id: int = 151643
    im_start_token_id: int = 151644
    im_end_token_id: int = 151645
    audio_vocab_size: int = 1024
    audio_user_slot_token_id: int = 151654
    audio_assistant_gen_slot_token_id: int = 151656
    audio_assistant_delay_slot_token_id: int = 151662
    audio_start_token_id: int = 151652
    audio_end_token_id: int = 151653
    audio_pad_code: int = 1024
    sampling_rate: int = 24000

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.language_config, PreTrainedConfig):
            self.language_config = Qwen3Config(**(self.language_config or {}))
        super().__post_init__(**kwargs)

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> PreTrainedConfig:
        """The config of what reads and writes tokens."""
        return self.language_config


@strict
class MossAudioTokenizerConfig(PreTrainedConfig):
    """The codec: transformers between patches that change the rate.

    Attributes:
        downsample_rate: Samples per frame.
        causal_transformer_context_duration: What a position attends to, seconds, of transformers
            that do not say it themselves.
        encoder_kwargs: Modules, each `PatchedPretransform` or `Transformer` with its sizes.
        decoder_kwargs: Likewise.
        quantizer_kwargs: Sizes of the residual quantizer.
        number_channels: Of the sound; 1 here.
    """

    model_type = "moss-audio-tokenizer"

    sampling_rate: int = 24000
    downsample_rate: int = 1920
    causal_transformer_context_duration: float = 10.0
    encoder_kwargs: list[dict] | None = None
    decoder_kwargs: list[dict] | None = None
    quantizer_type: str | None = None
    quantizer_kwargs: dict | None = None
    number_channels: int | None = None
