# SPDX-License-Identifier: Apache-2.0
"""Codec decoders as programs: what a `code2wav` stage names.

A program takes rows of `codes` and decode windows over them and emits `audio`.
"""

from vllm_omni.diffusion.programs import dia as _dia
from vllm_omni.diffusion.programs import higgs_audio_v2 as _higgs_audio_v2
from vllm_omni.diffusion.programs import higgs_audio_v3 as _higgs_audio_v3
from vllm_omni.diffusion.programs import mimi as _mimi
from vllm_omni.diffusion.programs import moss_tts as _moss_tts
from vllm_omni.diffusion.programs import qwen2_5_omni as _qwen2_5_omni
from vllm_omni.diffusion.programs import qwen3_omni as _qwen3_omni
from vllm_omni.diffusion.programs import qwen3_tts as _qwen3_tts
from vllm_omni.diffusion.programs import vibevoice as _vibevoice
from vllm_omni.diffusion.programs import voxcpm2 as _voxcpm2
from vllm_omni.diffusion.programs import voxtral_tts as _voxtral_tts
from vllm_omni.diffusion.spec import ProgramSpec

qwen3_omni = ProgramSpec("code2wav", _qwen3_omni.run, _qwen3_omni.load, "audio")
"""`codes` int [frames, num_quantizers] -> float32 [samples] at 24 kHz."""

qwen2_5_omni = ProgramSpec("code2wav", _qwen2_5_omni.run, _qwen2_5_omni.load, "audio")
"""`codes` int [frames, 1] -> float32 [samples] at 24 kHz; options `voice`, `seed`, `num_steps`."""

qwen3_tts = ProgramSpec("code2wav", _qwen3_tts.run, _qwen3_tts.load, "audio")
"""`codes` int [frames, num_quantizers] -> float32 [samples] at 24 kHz; with the option `encode`,
recordings -> codes and speaker embeddings."""

csm = ProgramSpec("code2wav", _mimi.run, _mimi.load_csm, "audio")
"""`codes` int [frames, num_quantizers] -> float32 [samples] at 24 kHz; with the option `encode`,
recordings -> codes."""
higgs_audio_v2 = ProgramSpec("code2wav", _higgs_audio_v2.run, _higgs_audio_v2.load, "audio")
"""`codes` int [rows, num_codebooks], delayed -> float32 [samples] at 24 kHz; with the option
`encode`, recordings -> codes."""

higgs_audio_v3 = ProgramSpec("code2wav", _higgs_audio_v2.run, _higgs_audio_v3.load, "audio")
"""As `higgs_audio_v2`."""

moss_tts = ProgramSpec("code2wav", _moss_tts.run, _moss_tts.load, "audio")
"""`codes` int [rows, n_vq], delayed -> float32 [samples] at 24 kHz; with the option `encode`,
recordings -> codes."""

vibevoice = ProgramSpec("code2wav", _vibevoice.run, _vibevoice.load, "audio")
"""`sound` float32 [frames, 1 + hop] -> float32 [samples] at 24 kHz; with the option `encode`,
recordings -> latents."""
voxcpm2 = ProgramSpec("code2wav", _voxcpm2.run, _voxcpm2.load, "audio")
"""`latents` float32 [frames, patch * latent size] -> float32 [samples]; with the option `encode`,
recordings -> latents."""
voxtral_tts = ProgramSpec("code2wav", _voxtral_tts.run, _voxtral_tts.load, "audio")
"""`codes` int [frames, groups], special ones included -> float32 [samples] at 24 kHz; with the
option `encode`, recordings -> codes, if the checkpoint can."""

dia = ProgramSpec("code2wav", _dia.run, _dia.load, "audio")
"""`codes` int [rows, groups], delayed -> float32 [samples] at 44.1 kHz; with the option `encode`,
recordings -> codes."""
