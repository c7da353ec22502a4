# SPDX-License-Identifier: Apache-2.0
"""Sizes of Dia's sequences in vLLM, as its config and its model class have them (see `dia`)."""

from transformers import DiaConfig, PretrainedConfig

from vllm_omni.pipelines.dia import lanes

STREAMS = 2
"""Of the decoder: one that hears the text and one that does not."""
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Of which vLLM's attention backends take any."""


def head_size(config: PretrainedConfig) -> int:
    """Of the attention: the decoder's, and a number for each kind of position."""
    needed = config.head_dim + 1 + lanes(config)
    return next(size for size in HEAD_SIZES if size >= needed)


def input_width(config: DiaConfig) -> int:
    """Of what is fed at a position: a frame; what a text token is encoded to, in both streams; and
    which lane it is."""
    text = STREAMS * config.encoder_config.hidden_size
    return config.decoder_config.hidden_size + text + lanes(config.decoder_config)
