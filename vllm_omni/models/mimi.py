# SPDX-License-Identifier: Apache-2.0
"""Mimi, transformers' own, with the calls that a codec stage makes."""

import torch
from torch import nn
from transformers import MimiModel
from transformers.models.mimi.modeling_mimi import MimiConv1d


def keep_sizes_on_host(module: nn.Module) -> None:
    """Give Mimi's convolutions their sizes on the CPU.

    transformers keeps them in buffers, which move with the weights; then each call waits for the
    device to tell how much it has to pad, and cannot be part of a CUDA graph.
    """
    for each in module.modules():
        if isinstance(each, MimiConv1d):
            each.stride = each.stride.cpu()
            each.kernel_size = each.kernel_size.cpu()
            each.padding_total = each.padding_total.cpu()


class MimiEncoding(MimiModel):
    """Recordings to codes."""

    def frames(self, samples: torch.Tensor, groups: int) -> torch.Tensor:
        """The first `groups` codes of each frame; the last frame may lack samples.

        Args:
            samples: float32 [batch, samples].
            groups: Codes per frame.

        Returns:
            int32 [batch, frames, groups].
        """
        sound = samples[:, None].to(self.dtype)
        codes = self.encode(sound, num_quantizers=groups, return_dict=True).audio_codes
        return codes.transpose(1, 2).int()

    def whole_frames(self, samples: torch.Tensor, groups: int) -> torch.Tensor:
        """As `frames`; of whole frames, each depends on nothing after it."""
        return self.frames(samples, groups)


class MimiCodec(MimiEncoding):
    """The whole codec. Causal: `frame_size` samples per frame, exactly."""

    def latents(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, groups, frames] -> [batch, frames, width], what the transformer makes."""
        embeds = self.upsample(self.quantizer.decode(codes)).transpose(1, 2)
        hidden = self.decoder_transformer(embeds, return_dict=True).last_hidden_state
        return hidden.reshape(len(hidden), codes.shape[2], -1)

    def samples(self, latents: torch.Tensor) -> torch.Tensor:
        """[batch, frames, width] -> float32 [batch, samples]."""
        hidden = latents.reshape(len(latents), -1, self.config.hidden_size)
        return self.decoder(hidden.transpose(1, 2))[:, 0].float()
