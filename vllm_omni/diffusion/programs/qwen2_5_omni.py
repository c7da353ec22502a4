# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's codec decoder: codes to a mel spectrogram by flow matching, then to a waveform.

Reference: transformers' `Qwen2_5OmniToken2WavModel` on the whole sequence, under
`torch.manual_seed(seed)`.

The sampler (`Qwen2_5OmniToken2WavDiTModel.sample`: Runge-Kutta 4 over 9 steps with classifier-free
guidance) runs in the program as it is; each of its 36 calls of the model is a component call that
batches with those of other requests, at whatever step they are. It runs on the CPU, the model on
its device, so that the initial noise does not depend on the device.

One window gives one piece of the mel spectrogram, and the pieces are vocoded as one sequence: the
vocoder only ever sees accepted frames and is exact.
"""

import math

import torch
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
    Qwen2_5OmniToken2WavModel,
)

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.frames import RowBuffer, check_codes
from vllm_omni.diffusion.rules import Batching, CallRules
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, checkpoint_file, load_module
from vllm_omni.errors import OmniClientError
from vllm_omni.framing import Stitcher
from vllm_omni.inputs import Window
from vllm_omni.pipelines.speakers import SPEAKERS_FILE, Speaker, read_speakers

SAMPLE_RATE = 24000
"""Hz."""
NUM_STEPS = 10
"""Time points of the sampler, as transformers has it."""
_FILTER_SPAN = 6
"""Frames that an anti-aliased activation (kernel 12 at twice the rate, up and down) sees aside."""
_KERNEL_SPAN = 3
"""Likewise for a convolution of kernel size 7."""


def block_codes(config: Qwen2_5OmniDiTConfig) -> int:
    """Codes per attention block; windows should start and end at multiples of it."""
    return math.lcm(config.block_size, config.repeats) // config.repeats


def sampler_context(config: Qwen2_5OmniDiTConfig, num_steps: int = NUM_STEPS) -> tuple[int, int]:
    """Codes before and after a code that its mel frames depend on, through all model calls.

    A layer that looks into a neighbouring block adds a block per call, and the 4 calls of each
    Runge-Kutta step depend on each other. With fewer codes of context a window approximates.
    """
    calls = 4 * (num_steps - 1)
    codes = block_codes(config)
    before = len(config.look_backward_layers) * calls * codes
    return before, len(config.look_ahead_layers) * calls * codes


def vocoder_context(config: Qwen2_5OmniBigVGANConfig) -> int:
    """Mel frames on either side of a frame that its samples depend on."""
    span = _KERNEL_SPAN + _FILTER_SPAN
    block = max(
        sum(2 * _FILTER_SPAN + (kernel // 2) * (dilation + 1) for dilation in dilations)
        for kernel, dilations in zip(
            config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
        )
    )
    for rate, kernel in zip(
        reversed(config.upsample_rates), reversed(config.upsample_kernel_sizes), strict=True
    ):
        span = math.ceil((span + block + kernel - (kernel - rate) // 2) / rate)
    return span + _KERNEL_SPAN


class Vocoder(nn.Module):
    """BigVGAN with a fixed output shape."""

    def __init__(self, bigvgan: Qwen2_5OmniToken2WavBigVGANModel) -> None:
        super().__init__()
        self.bigvgan = bigvgan

    def forward(self, mel_spectrogram: torch.Tensor) -> torch.Tensor:
        """float32 [batch, mel_dim, frames] -> float32 [batch, samples] on the CPU."""
        return self.bigvgan(mel_spectrogram).reshape(len(mel_spectrogram), -1)


def components(token2wav: Qwen2_5OmniToken2WavModel, voices: dict[str, Speaker]) -> Loaded:
    """The model as the program uses it; `voices` by lower-case name."""
    # With guidance the model answers for twice the batch: conditioned, then unconditioned.
    sampler_rules = CallRules({"time_step": Batching.STACK}, stacked_outputs=True)
    return Loaded(
        {
            "dit": Component(token2wav.code2wav_dit_model, {"forward": sampler_rules}),
            "vocoder": Component(Vocoder(token2wav.code2wav_bigvgan_model)),
        },
        {"voices": voices, "vocoder_config": token2wav.config.bigvgan_config},
    )


def load(ctx: LoadContext) -> Loaded:
    """Load `token2wav.*` of a Qwen2.5-Omni checkpoint; in float32 always, as the reference does."""
    config = checkpoint_config(ctx).token2wav_config
    token2wav = load_module(ctx, Qwen2_5OmniToken2WavModel, config, "token2wav.", torch.float32)
    speakers = read_speakers(checkpoint_file(ctx, SPEAKERS_FILE))
    return components(token2wav, {name.lower(): each for name, each in speakers.items()})


class MelSampler:
    """Codes of one request to mel frames, window by window, with noise by absolute position."""

    def __init__(self, ctx: Program) -> None:
        self._dit = ctx.component("dit", Qwen2_5OmniToken2WavDiTModel)
        self._voice = _voice(ctx)
        self._steps = _steps(ctx)
        self._generator = ctx.generator
        self._drawn = 0
        self._block = block_codes(self._dit.config)
        self.codes = RowBuffer()

    def __call__(self, window: Window) -> torch.Tensor:
        """Mel frames float32 [repeats * emitted codes, mel_dim] of the codes the window emits."""
        config = self._dit.config
        start = window.start - window.start % self._block
        codes = check_codes(
            self.codes.rows(start, window.stop), 1, self._dit.text_embed.codec_embed.num_embeddings
        )
        self._seek(start)
        mel = self._dit.sample(
            self._voice.conditioning, self._voice.reference_mel, codes.T, num_steps=self._steps
        )
        self.codes.forget(start)
        first, last = window.emit_from - start, window.emit_to - start
        return mel[0, :, first * config.repeats : last * config.repeats].T

    def _seek(self, code: int) -> None:
        """Make the sampler's draw (from the global generator) start at that code's noise.

        On the CPU a draw is a prefix of any longer one, if its size is a multiple of 16; so every
        position has the noise that it has in one draw for the whole sequence.
        """
        per_code = self._dit.config.repeats * self._dit.config.mel_dim
        torch.randn((code - self._drawn) * per_code, generator=self._generator)
        self._drawn = code
        torch.set_rng_state(self._generator.get_state())


def run(ctx: Program) -> None:
    """Decode windows of `codes` (int [frames, 1]); emits `audio` (float32 [samples]).

    Options: `voice` (case-insensitive, default the checkpoint's first), `seed`, `num_steps`.
    """
    vocoder = ctx.component("vocoder", Vocoder)
    config: Qwen2_5OmniBigVGANConfig = ctx.assets["vocoder_config"]
    context = vocoder_context(config)
    sampler, mel, stitcher = (
        MelSampler(ctx),
        RowBuffer(),
        Stitcher(math.prod(config.upsample_rates)),
    )
    vocoded = 0  # mel frames
    final = False
    while not final:
        message = ctx.receive()
        if "codes" in message.tensors:
            sampler.codes.append(message.tensors["codes"])
        for window in message.windows:
            mel.append(sampler(window))
        final = message.final
        ready = mel.stop if final else mel.stop - context
        if ready > vocoded:
            start = max(0, vocoded - context)
            decoded = vocoder(mel.rows(start, mel.stop).T[None])
            piece = stitcher.take(Window(start, mel.stop, vocoded, ready, final), decoded[0])
            meta = {"sample_rate": SAMPLE_RATE, "frames": ready - vocoded}
            ctx.emit("audio", {"audio": piece}, meta)
            vocoded = ready
            mel.forget(vocoded - context)


def _voice(ctx: Program) -> Speaker:
    voices: dict[str, Speaker] = ctx.assets["voices"]
    name = ctx.options.get("voice")
    if name is None:
        return next(iter(voices.values()))
    if not isinstance(name, str) or name.lower() not in voices:
        known = ", ".join(voices)
        raise OmniClientError(f"unknown voice {name!r}; known: {known}", param="voice")
    return voices[name.lower()]


def _steps(ctx: Program) -> int:
    steps = ctx.options.get("num_steps", NUM_STEPS)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 2 <= steps <= 100:
        raise OmniClientError(f"num_steps must be from 2 to 100, got {steps!r}", param="num_steps")
    return steps
