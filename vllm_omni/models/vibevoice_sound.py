# SPDX-License-Identifier: Apache-2.0
"""VibeVoice's frames as sound, one by one: the next one is fed what the last one sounds like.

Modules are transformers' own. What their convolutions look back on is a row of numbers per request
here, so that the requests of a step run together whatever each has said.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import VibeVoiceConfig
from transformers.models.vibevoice_acoustic_tokenizer.modeling_vibevoice_acoustic_tokenizer import (
    VibeVoiceAcousticTokenizerCausalConv1d,
    VibeVoiceAcousticTokenizerCausalConvTranspose1d,
    VibeVoiceAcousticTokenizerConv1dCacheLayer,
    VibeVoiceAcousticTokenizerConv1dPaddingCache,
    VibeVoiceAcousticTokenizerDecoderModel,
    VibeVoiceAcousticTokenizerEncoderModel,
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a request's row a convolution finds its past, [channels, length]."""

    key: str
    start: int
    channels: int
    length: int


class StreamedSound(nn.Module):
    """A frame of latents to samples, and these to what is heard in them.

    Args:
        config: The checkpoint's.

    Attributes:
        state_size: Numbers per request; all 0 before the first frame.
    """

    def __init__(self, config: VibeVoiceConfig) -> None:
        super().__init__()
        self.decoder = VibeVoiceAcousticTokenizerDecoderModel(config.audio_config.decoder_config)
        self.semantic_encoder = VibeVoiceAcousticTokenizerEncoderModel(config.semantic_model_config)
        self._decoder_places = _places(self.decoder, 0)
        decoder_size = _stop(self._decoder_places)
        self._encoder_places = _places(self.semantic_encoder, decoder_size)
        self.state_size = max(decoder_size, _stop(self._encoder_places))

    def forward(
        self, latents: torch.Tensor, past: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One frame of each request.

        Args:
            latents: [b, latent size], as the decoder takes them.
            past: [b, `state_size`]; what the last frame left.

        Returns:
            Samples [b, hop], what is heard [b, semantic size], and what this frame leaves.
        """
        state = past.clone()
        samples = self.decoder(
            latents[:, :, None], padding_cache=_cache(state, self._decoder_places), use_cache=True
        ).audio
        heard = self.semantic_encoder(
            samples, padding_cache=_cache(state, self._encoder_places), use_cache=True
        ).latents
        return samples[:, 0], heard[:, -1], state


def _places(model: nn.Module, start: int) -> list[_Place]:
    """Of all convolutions that look back, one after another."""
    kinds = (
        VibeVoiceAcousticTokenizerCausalConv1d,
        VibeVoiceAcousticTokenizerCausalConvTranspose1d,
    )
    places = []
    for module in model.modules():
        if isinstance(module, kinds):
            places.append(_Place(module.cache_key, start, module.in_channels, module.left_pad))
            start = _stop(places)
    return places


def _stop(places: list[_Place]) -> int:
    last = places[-1]
    return last.start + math.prod((last.channels, last.length))


def _cache(
    state: torch.Tensor, places: list[_Place]
) -> VibeVoiceAcousticTokenizerConv1dPaddingCache:
    """transformers' cache, which keeps what it is to know in `state` [b, `state_size`]."""
    cache = VibeVoiceAcousticTokenizerConv1dPaddingCache()
    for place in places:
        layer = VibeVoiceAcousticTokenizerConv1dCacheLayer()
        part = state[:, place.start : place.start + place.channels * place.length]
        layer.cache = part.view(len(state), place.channels, place.length)
        layer.left_pad, layer.in_channels = place.length, place.channels
        layer.is_initialized = True
        cache.layers[place.key] = layer
    return cache
