# SPDX-License-Identifier: Apache-2.0
"""Codec decoders from CUDA graphs (A-68), but for the graphs: arguments are padded to an
example's size, and results are cut, and are what they are without."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.diffusion.codec_graphs import (
    DECODERS,
    WITHOUT,
    Padding,
    arguments,
    assert_alike,
    graphed,
    watched,
)
from vllm_omni.diffusion.programs import code2wav, moss_tts
from vllm_omni.diffusion.replay import Replay
from vllm_omni.diffusion.rules import GRAPH_LENGTHS
from vllm_omni.diffusion.spec import LoadContext, ProgramSpec

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

CPU = torch.device("cpu")


def test_all_codecs_are_here() -> None:
    programs = [each for each in vars(code2wav).values() if isinstance(each, ProgramSpec)]
    known = [spec for spec, _ in DECODERS.values()] + list(WITHOUT.values())
    assert len(programs) == len(known) and all(each in known for each in programs)


@pytest.mark.parametrize("lengths", [GRAPH_LENGTHS, (7,)], ids=["default", "7"])
@pytest.mark.parametrize("family", DECODERS)
@torch.inference_mode()
def test_from_graphs_as_without(
    family: str, lengths: tuple[int, ...], tiny_checkpoint: Callable[[str], Path]
) -> None:
    spec, count = DECODERS[family]
    methods = graphed(spec.load(LoadContext(str(tiny_checkpoint(family)), CPU)))
    assert len(methods) == count
    for method, rules in methods:
        told, seen = watched(method)
        replay = Replay(told, "method", rules, CPU, lengths, Padding)
        given = arguments(rules, 3, 5)
        assert_alike(replay(*given), method(*given))
        bucket = rules.graphs.example(4, next(n for n in lengths if n >= 5))[0]
        assert seen[-1] == bucket.shape


@torch.inference_mode()
def test_a_decoder_with_a_memory(tiny_checkpoint: Callable[[str], Path]) -> None:
    """MOSS-TTS's; what it remembers is of the valid frames."""
    loaded = moss_tts.load(LoadContext(str(tiny_checkpoint("moss_tts")), CPU))
    ((method, rules),) = graphed(loaded)
    replay = Replay(method, "method", rules, CPU, make=Padding)
    plain, replayed = ([*rules.graphs.example(3, 5)] for _ in range(2))
    for seed in range(2):
        plain[0] = replayed[0] = arguments(rules, 3, 5, seed=seed)[0]
        samples, memory = method(*plain)
        padded, kept = replay(*replayed)
        assert_alike((padded, kept), (samples, memory))
        plain[1:] = plain[1] + 5, plain[2], memory
        replayed[1:] = replayed[1] + 5, replayed[2], kept
