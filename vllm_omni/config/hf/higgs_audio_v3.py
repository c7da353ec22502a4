# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a Higgs-Audio v3 checkpoint (`model_type: higgs_multimodal_qwen3`).

Fields and defaults are those of `sglang-omni` 0.1.3, through which the authors serve it. Published
files have `rope_theta: null` in `text_config`, which means 1e6 there, not transformers' default.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, Qwen3Config

ROPE_THETA = 1_000_000.0
SPECIAL_CODES = 2
"""The last codes of a group's vocabulary are none of the codec: begin, end."""


@strict
class HiggsAudioV3EncoderConfig(PreTrainedConfig):
    """How sound is fed: codes of several groups, embedded by one weight.

    Attributes:
        encoder_type: `discrete`; other ones are of checkpoints that transcribe.
        num_codebooks: Codes per frame.
        vocab_size: Codes per group, begin and end included.
        tie_word_embeddings: The heads are the embeddings.
        use_delay_pattern: Group k is k rows late.
    """

    model_type = "higgs_audio_encoder"
    base_config_key = "audio_encoder_config"

    encoder_type: str = "discrete"
    num_codebooks: int = 8
    vocab_size: int = 1026
    out_dim: int | None = None
    tie_word_embeddings: bool = True
    use_delay_pattern: bool = True

    @property
    def begin(self) -> int:
        """The begin code."""
        return self.vocab_size - 2

    @property
    def end(self) -> int:
        """The end code."""
        return self.vocab_size - 1


@strict
class HiggsAudioV3Config(PreTrainedConfig):
    """The whole checkpoint.

    Attributes:
        text_config: The backbone, a Qwen3.
        audio_token_id: Stands for rows of codes in the reference's prompts.
    """

    model_type = "higgs_multimodal_qwen3"
    sub_configs = {  # noqa: RUF012 - transformers' own field
        "text_config": Qwen3Config,
        "audio_encoder_config": HiggsAudioV3EncoderConfig,
    }

    text_config: dict | PreTrainedConfig | None = None
    audio_encoder_config: dict | PreTrainedConfig | None = None
    audio_token_id: int = -100

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.text_config, PreTrainedConfig):
            self.text_config = _backbone(self.text_config or {})
        if not isinstance(self.audio_encoder_config, PreTrainedConfig):
            self.audio_encoder_config = HiggsAudioV3EncoderConfig(
                **(self.audio_encoder_config or {})
            )
        super().__post_init__(**kwargs)

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> PreTrainedConfig:
        """The config of what reads and writes tokens."""
        return self.text_config


def _backbone(raw: dict[str, Any]) -> Qwen3Config:
    raw = dict(raw)
    theta = raw.pop("rope_theta", None) or ROPE_THETA
    given = raw.pop("rope_parameters", None) or {}
    rope = {key: value for key, value in given.items() if value is not None}
    return Qwen3Config(**raw, rope_parameters={"rope_type": "default", "rope_theta": theta, **rope})
