# SPDX-License-Identifier: Apache-2.0
"""DAC's decoder for sounds of different lengths at once.

Its convolutions look at both sides, and beyond the end of a sound they see zeros. What comes behind
the end in a batch is therefore made zero before each of them: every sound is what it is alone.

Reference: transformers' `DacDecoder`, whose layers these are.
"""

import torch
from transformers.models.dac.modeling_dac import DacDecoder


def decode(decoder: DacDecoder, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Decode sounds; nothing waits for the device.

    Args:
        decoder: Its transposed convolutions give a multiple of what they take.
        frames: [b, width, n], any numbers behind the lengths.
        lengths: int64 [b], valid frames of each sound.

    Returns:
        [b, samples]; a sound is followed by any numbers.
    """
    hidden = decoder.conv1(_cleared(frames, _behind(frames, lengths)))
    hidden = _cleared(hidden, _behind(hidden, lengths))
    for block in decoder.block:
        hidden = block.conv_t1(block.snake1(hidden))
        lengths = lengths * block.conv_t1.stride[0]
        behind = _behind(hidden, lengths)
        hidden = _cleared(hidden, behind)
        # Of a unit's two convolutions the second one looks at one position alone.
        for unit in (block.res_unit1, block.res_unit2, block.res_unit3):
            hidden = _cleared(unit(hidden), behind)
    return decoder.tanh(decoder.conv2(decoder.snake1(hidden)))[:, 0]


def _behind(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Where [b, width, n] is behind the lengths, bool [b, 1, n]."""
    return (torch.arange(hidden.shape[2], device=hidden.device) >= lengths[:, None])[:, None]


def _cleared(hidden: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(behind, 0)
