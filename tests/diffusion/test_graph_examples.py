# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs of codec decoders rest on (A-68): their examples are arguments of the methods, and
padding at the end changes nothing of what is kept."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_omni.diffusion.programs import mimi, qwen3_omni, qwen3_tts, voxcpm2, voxtral_tts
from vllm_omni.diffusion.rules import Ragged
from vllm_omni.diffusion.spec import LoadContext, Loaded

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

LOADERS: dict[str, tuple[Callable[[LoadContext], Loaded], int]] = {
    "csm": (mimi.load_csm, 2),
    "qwen3_omni_moe": (qwen3_omni.load, 2),
    "qwen3_tts_custom_voice": (qwen3_tts.load, 2),
    "voxcpm2": (voxcpm2.load, 1),
    "voxtral_tts": (voxtral_tts.load, 1),
}
"""By family: its codec, and how many of its methods have graphs."""


@pytest.mark.parametrize("family", LOADERS)
@torch.inference_mode()
def test_padding_changes_nothing(family: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    load, count = LOADERS[family]
    loaded = load(LoadContext(str(tiny_checkpoint(family)), torch.device("cpu")))
    methods = [
        (component.module if name == "forward" else getattr(component.module, name), rules)
        for component in loaded.components.values()
        for name, rules in component.methods.items()
        if rules.graphs is not None
    ]
    assert len(methods) == count
    generator = torch.Generator().manual_seed(0)
    for method, rules in methods:
        (rule,) = rules.arguments.values()
        assert isinstance(rule, Ragged) and rules.ragged_output is not None
        long = rules.graphs.example(2, 9)
        if long.is_floating_point():
            long.normal_(generator=generator)
        else:
            long.random_(2, 30, generator=generator)
        short = long.narrow(rule.dim, 0, 5).clone()
        long.narrow(rule.dim, 5, 4).zero_()
        kept = rules.ragged_output.length(5)
        alone, padded = method(short), method(long).narrow(rules.ragged_output.dim, 0, kept)
        assert alone.shape == padded.shape
        # Kernels for other sizes round differently.
        torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)
