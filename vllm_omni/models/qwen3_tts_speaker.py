# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's speaker encoder: a recording to a speaker embedding.

The network is transformers' ECAPA-TDNN, which Qwen2.5-Omni has too. The mel spectrogram before it
has what the authors' package fixes: 1024-point frames every 256 samples, Slaney's mel bands up to
12 kHz, the logarithm of magnitudes.
"""

import torch
from torch import nn
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from vllm_omni.config.hf.qwen3_tts import Qwen3TTSSpeakerEncoderConfig

_FRAME = 1024
"""Samples per frame of the spectrogram."""
_HOP = 256
_TOP = 12000
"""Upper end of the highest band, Hz."""
_POWER_FLOOR = 1e-9
_MAGNITUDE_FLOOR = 1e-5


class SpeakerEncoder(ECAPA_TimeDelayNet):
    """`speaker_encoder.*` of a base checkpoint; in float32, as the spectrogram needs it."""

    def __init__(self, config: Qwen3TTSSpeakerEncoderConfig) -> None:
        super().__init__(config)
        bands = mel_filter_bank(
            num_frequency_bins=_FRAME // 2 + 1,
            num_mel_filters=config.mel_dim,
            min_frequency=0.0,
            max_frequency=float(_TOP),
            sampling_rate=config.sample_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        self.bands = nn.Buffer(torch.from_numpy(bands).float(), persistent=False)
        self.window = nn.Buffer(torch.hann_window(_FRAME), persistent=False)

    def log_mel(self, samples: torch.Tensor) -> torch.Tensor:
        """float32 [batch, samples] -> float32 [batch, frames, mel_dim]."""
        pad = (_FRAME - _HOP) // 2
        padded = nn.functional.pad(samples[:, None], (pad, pad), mode="reflect")[:, 0]
        spectrum = torch.stft(
            padded, _FRAME, _HOP, window=self.window, center=False, return_complex=True
        )
        power = spectrum.real.square() + spectrum.imag.square()
        magnitude = (power + _POWER_FLOOR).sqrt().transpose(1, 2)
        return (magnitude @ self.bands).clamp(min=_MAGNITUDE_FLOOR).log()

    def embed(self, samples: torch.Tensor) -> torch.Tensor:
        """float32 [batch, samples] at `sample_rate` -> float32 [batch, enc_dim]."""
        return self(self.log_mel(samples))
