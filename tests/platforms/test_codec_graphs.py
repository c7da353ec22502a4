# SPDX-License-Identifier: Apache-2.0
"""Codec decoders from CUDA graphs on a GPU (A-68), tiny ones. As `test_graphs`, run by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.diffusion.codec_graphs import DECODERS, arguments, assert_alike, graphed, watched
from vllm_omni.diffusion.replay import Replay
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.diffusion.tensor_trees import iter_tensors, map_tensors
from vllm_omni.testing.tiny import build

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda")
LENGTHS = (5, 8)


@pytest.fixture(autouse=True)
def float32_means_float32() -> Iterator[None]:
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        yield


@pytest.mark.parametrize("family", DECODERS)
@torch.inference_mode()
def test_graphs_give_what_the_decoder_gives(family: str, tmp_path: Path) -> None:
    """Bit for bit where there is a graph of that size, else within 1e-5."""
    spec, count = DECODERS[family]
    checkpoint = build(family, tmp_path / family)
    methods = graphed(spec.load(LoadContext(str(checkpoint), DEVICE, torch.float32)))
    assert len(methods) == count
    for method, rules in methods:
        told, calls = watched(method)
        replay = Replay(told, family, rules, DEVICE, LENGTHS)
        captures = len(calls)
        for rows, length in ((32, 8), (1, 5), (2, 8), (3, 5), (1, 3), (5, 7)):
            given = tuple(
                map_tensors(each, lambda tensor: tensor.to(DEVICE))
                for each in arguments(rules, rows, length)
            )
            made, expected = replay(*given), method(*given)
            assert_alike(made, expected)
            if length in LENGTHS and rows in rules.graphs.rows:
                pairs = zip(iter_tensors(made), iter_tensors(expected), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
        assert len(calls) == captures, "a size was not captured"
