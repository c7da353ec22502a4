# SPDX-License-Identifier: Apache-2.0
"""Codec decoders that have CUDA graphs, arguments for them, and what stands in for graphs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vllm_omni.diffusion.programs import code2wav
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.spec import Loaded, ProgramSpec
from vllm_omni.diffusion.tensor_trees import iter_tensors
from vllm_omni.platforms.graphs import Results, ShapeGraphs

DECODERS: dict[str, tuple[ProgramSpec, int]] = {
    "csm": (code2wav.csm, 2),
    "dia": (code2wav.dia, 1),
    "higgs_audio_v2": (code2wav.higgs_audio_v2, 1),
    "higgs_multimodal_qwen3": (code2wav.higgs_audio_v3, 1),
    "moss_tts": (code2wav.moss_tts, 1),
    "qwen3_omni_moe": (code2wav.qwen3_omni, 2),
    "qwen3_tts_custom_voice": (code2wav.qwen3_tts, 2),
    "voxcpm2": (code2wav.voxcpm2, 1),
    "voxtral_tts": (code2wav.voxtral_tts, 1),
}
"""By family: its codec, and how many of its methods have graphs."""
WITHOUT = {"qwen2_5_omni": code2wav.qwen2_5_omni, "vibevoice": code2wav.vibevoice}
"""Codecs that decode by a diffusion transformer, or in the stage before."""


def graphed(loaded: Loaded) -> list[tuple[Callable[..., Any], CallRules]]:
    """Methods that have graphs."""
    return [
        (component.module if name == "forward" else getattr(component.module, name), rules)
        for component in loaded.components.values()
        for name, rules in component.methods.items()
        if rules.graphs is not None
    ]


def arguments(rules: CallRules, rows: int, length: int, seed: int = 0) -> tuple[Any, ...]:
    """Random codes or vectors, and the rest as in an example."""
    assert rules.graphs is not None
    generator = torch.Generator().manual_seed(seed)
    value, *others = rules.graphs.example(rows, length)
    if value.is_floating_point():
        value.normal_(generator=generator)
    else:
        value.random_(2, 30, generator=generator)
    return value, *others


def watched(method: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.Size]]:
    """The method, and the shapes of the first arguments that it is called with from now on."""
    shapes: list[torch.Size] = []

    def told(*args: Any) -> Any:
        shapes.append(args[0].shape)
        return method(*args)

    return told, shapes


def assert_alike(padded: Any, exact: Any, atol: float = 1e-5) -> None:
    """What a method gave of padded arguments begins with what it gives; `atol` is row A-68's.

    Kernels for other sizes round differently.
    """
    for long, short in zip(iter_tensors(padded), iter_tensors(exact), strict=True):
        begin = long[tuple(slice(size) for size in short.shape)]
        torch.testing.assert_close(begin, short, atol=atol, rtol=0)


class Padding(ShapeGraphs):
    """A stand-in for graphs, which need a GPU: one for each example, and inputs padded to them."""

    def __init__(self, function: Callable[..., Results], name: str) -> None:
        self._function = function
        self._sizes: list[list[torch.Tensor]] = []

    def capture(self, examples: Iterable[Sequence[torch.Tensor]]) -> None:
        self._sizes = [list(example) for example in examples]
        self._function(*self._sizes[0])

    def __call__(self, *inputs: torch.Tensor) -> Results:
        fitting = [each for each in self._sizes if all(map(_fits, inputs, each))]
        if not fitting:
            return self._function(*inputs)
        padded = [torch.zeros_like(each) for each in fitting[-1]]
        for own, given in zip(padded, inputs, strict=True):
            own[tuple(slice(size) for size in given.shape)] = given
        return tuple(None if r is None else r[: len(inputs[0])] for r in self._function(*padded))


def _fits(inner: torch.Tensor, outer: torch.Tensor) -> bool:
    return all(x <= y for x, y in zip(inner.shape, outer.shape, strict=True))
