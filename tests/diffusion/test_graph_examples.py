# SPDX-License-Identifier: Apache-2.0
"""Codec decoders from CUDA graphs (A-68), but for the graphs: arguments are padded to an
example's size, and results are cut, and are what they are without."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni.diffusion.programs import mimi, moss_tts, qwen3_omni, qwen3_tts, voxcpm2, voxtral_tts
from vllm_omni.diffusion.replay import Replay
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.platforms.graphs import Results, ShapeGraphs

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

LOADERS: dict[str, tuple[Callable[[LoadContext], Loaded], int]] = {
    "csm": (mimi.load_csm, 2),
    "qwen3_omni_moe": (qwen3_omni.load, 2),
    "qwen3_tts_custom_voice": (qwen3_tts.load, 2),
    "voxcpm2": (voxcpm2.load, 1),
    "voxtral_tts": (voxtral_tts.load, 1),
}
"""By family: its codec, and how many of its methods have graphs."""


class Padding(ShapeGraphs):
    """A stand-in for graphs, which need a GPU: one for each example, and inputs padded to them."""

    def __init__(self, function: Callable[..., Results], name: str) -> None:
        self._function = function
        self._sizes: list[list[torch.Tensor]] = []

    def capture(self, examples: Iterable[Sequence[torch.Tensor]]) -> None:
        self._sizes = [list(example) for example in examples]
        self._function(*self._sizes[0])

    def __call__(self, *inputs: torch.Tensor) -> Results:
        fitting = [
            each
            for each in self._sizes
            if all(
                x <= y
                for a, b in zip(inputs, each, strict=True)
                for x, y in zip(a.shape, b.shape, strict=True)
            )
        ]
        padded = [torch.zeros_like(each) for each in fitting[-1]]
        for own, given in zip(padded, inputs, strict=True):
            own[tuple(slice(size) for size in given.shape)] = given
        return tuple(None if r is None else r[: len(inputs[0])] for r in self._function(*padded))


def graphed(loaded: Loaded) -> list[tuple[Callable[..., Any], CallRules]]:
    """Methods that have graphs."""
    return [
        (component.module if name == "forward" else getattr(component.module, name), rules)
        for component in loaded.components.values()
        for name, rules in component.methods.items()
        if rules.graphs is not None
    ]


CPU = torch.device("cpu")


@pytest.mark.parametrize("family", LOADERS)
@torch.inference_mode()
def test_from_graphs_as_without(family: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    load, count = LOADERS[family]
    methods = graphed(load(LoadContext(str(tiny_checkpoint(family)), CPU)))
    assert len(methods) == count
    generator = torch.Generator().manual_seed(0)
    for method, rules in methods:
        replay = Replay(method, "method", rules, CPU, make=Padding)
        (value,) = rules.graphs.example(3, 5)
        if value.is_floating_point():
            value.normal_(generator=generator)
        else:
            value.random_(2, 30, generator=generator)
        # Kernels for other sizes round differently.
        torch.testing.assert_close(replay(value), method(value), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_decoder_with_a_memory(tiny_checkpoint: Callable[[str], Path]) -> None:
    """MOSS-TTS's; what it remembers is of the valid frames."""
    loaded = moss_tts.load(LoadContext(str(tiny_checkpoint("moss_tts")), CPU))
    ((method, rules),) = graphed(loaded)
    replay = Replay(method, "method", rules, CPU, make=Padding)
    plain, replayed = ([*rules.graphs.example(3, 5)] for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        codes = torch.randint(0, 30, plain[0].shape, generator=generator)
        plain[0] = replayed[0] = codes
        samples, memory = method(*plain)
        padded, kept = replay(*replayed)
        count = samples.shape[1]
        torch.testing.assert_close(padded[:, :count], samples, atol=1e-5, rtol=0)
        for a, b in zip(memory, kept, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        plain[1:] = plain[1] + 5, plain[2], memory
        replayed[1:] = replayed[1] + 5, replayed[2], kept
