# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a function by shape (A-68, A-70); they need a GPU, and are run on one by hand:
`python -m pytest tests/platforms` there."""

import pytest
import torch

from vllm_omni.platforms.graphs import ShapeGraphs

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda")
torch.backends.cudnn.allow_tf32 = False  # float32 is to mean float32


class Causal:
    """Depends on what is before each position only, as codecs do; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.weight = torch.randn(8, 8, 3, device=DEVICE)

    def __call__(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls += 1
        padded = torch.nn.functional.pad(value, (2, 0))
        return (torch.nn.functional.conv1d(padded, self.weight).tanh(),)


@pytest.fixture
def causal() -> Causal:
    return Causal()


@pytest.fixture
def graphs(causal: Causal) -> ShapeGraphs:
    made = ShapeGraphs(causal, "causal")
    sizes = [(4, 16), (2, 16), (1, 8)]
    made.capture((torch.zeros(rows, 8, length, device=DEVICE),) for rows, length in sizes)
    causal.calls = 0
    return made


def inputs(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, 8, length, device=DEVICE)


def test_a_captured_shape_is_bit_identical(causal: Causal, graphs: ShapeGraphs) -> None:
    value = inputs(2, 16)
    (result,) = graphs(value)
    assert causal.calls == 0
    assert torch.equal(result, causal(value)[0])


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 9), (3, 16), (2, 5)])
def test_padded_shapes_are_the_same_where_they_are_valid(
    causal: Causal, graphs: ShapeGraphs, rows: int, length: int
) -> None:
    graphs(inputs(4, 16))  # leaves what padding has to clear
    value = inputs(rows, length)
    (result,) = graphs(value)
    assert causal.calls == 0
    assert len(result) == rows
    torch.testing.assert_close(result[..., :length], causal(value)[0], atol=1e-5, rtol=0)


def test_what_fits_in_no_graph_runs_as_it_is(causal: Causal, graphs: ShapeGraphs) -> None:
    value = inputs(5, 16)
    (result,) = graphs(value)
    assert causal.calls == 1
    assert torch.equal(result, causal(value)[0])


def test_results_are_nobody_elses(graphs: ShapeGraphs) -> None:
    (first,) = graphs(inputs(2, 16))
    kept = first.clone()
    graphs(inputs(2, 16))
    assert torch.equal(first, kept)


def test_inputs_need_not_be_contiguous(causal: Causal, graphs: ShapeGraphs) -> None:
    value = inputs(2, 32)[..., ::2]
    assert torch.equal(graphs(value)[0], causal(value.contiguous())[0])


def test_inside_of_another_capture_the_function_runs_itself(
    causal: Causal, graphs: ShapeGraphs
) -> None:
    value = inputs(2, 16)
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        (result,) = graphs(value)
    assert causal.calls == 1
    outer.replay()
    assert torch.equal(result, causal(value)[0])


def test_a_shape_that_cannot_be_captured_is_left_out() -> None:
    """And the others are captured."""
    large = torch.ones(4, 3, device=DEVICE)
    small = torch.ones(2, 3, device=DEVICE)
    calls = 0

    def function(value: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal calls
        calls += 1
        factor = value.sum().item() if len(value) == 4 else 2
        return (value * factor,)

    graphs = ShapeGraphs(function, "some")
    graphs.capture([(large,), (small,)])
    before = calls
    assert torch.equal(graphs(large)[0], large * 12)
    assert torch.equal(graphs(small)[0], small * 2)
    assert calls == before + 1, "the small one comes from its graph"
