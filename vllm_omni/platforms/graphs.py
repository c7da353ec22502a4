# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a function for inputs of several shapes.

A function of many small kernels is limited by the host that launches them one by one; a graph
launches them all at once. A graph has fixed shapes and addresses, so one is captured for each of
some shapes; inputs of other shapes are padded to the next larger one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

logger = init_logger(__name__)

Tensors = tuple[torch.Tensor, ...]
Results = tuple[torch.Tensor | None, ...]
Shapes = tuple[torch.Size, ...]

WARM_UPS = 2
"""Calls before a capture, in which libraries choose their kernels and take their workspaces."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    results: Results


class ShapeGraphs:
    """A function on the device, replayed from a graph where there is one for its inputs' shapes.

    Args:
        function: Of tensors, without anything that depends on their values on the host. Rows of its
            inputs and results (dimension 0) belong together.
        name: For the log.
    """

    def __init__(self, function: Callable[..., Results], name: str) -> None:
        self._function = function
        self._name = name
        self._captured: dict[Shapes, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, examples: Iterable[Sequence[torch.Tensor]]) -> None:
        """Capture a graph for the shapes of each of some examples; larger ones first need less
        memory. A shape that cannot be captured is left to the function itself, with a warning."""
        for example in examples:
            inputs = tuple(tensor.clone() for tensor in example)
            try:
                captured = self._capture(inputs)
            except (RuntimeError, torch.AcceleratorError) as error:
                shapes = [list(tensor.shape) for tensor in inputs]
                logger.warning("%s: no CUDA graph for %s: %s", self._name, shapes, error)
                # torch goes on to count the pool of a broken capture as in use.
                self._pool = torch.cuda.graph_pool_handle()
                continue
            self._captured[_shapes(inputs)] = captured

    @torch.inference_mode()
    def __call__(self, *inputs: torch.Tensor) -> Results:
        """The function's results, as tensors of their own: a graph's are written by its next run.

        Results of padded inputs have the rows of `inputs`; other dimensions stay as in the graph.
        """
        shapes = self.padded(_shapes(inputs))
        if shapes is None or torch.cuda.is_current_stream_capturing():
            return self._function(*inputs)
        captured = self._captured[shapes]
        for own, given in zip(captured.inputs, inputs, strict=True):
            if own.shape != given.shape:
                own.zero_()
            own[tuple(slice(size) for size in given.shape)].copy_(given, non_blocking=True)
        captured.graph.replay()
        rows = inputs[0].shape[0]
        return tuple(None if each is None else each[:rows].clone() for each in captured.results)

    def padded(self, shapes: Shapes) -> Shapes | None:
        """The smallest captured shapes that inputs of `shapes` fit in; None if there are none."""
        if shapes in self._captured:
            return shapes
        fitting = [each for each in self._captured if _fits(shapes, each)]
        return min(fitting, key=_volume, default=None)

    def _capture(self, inputs: Tensors) -> _Captured:
        main = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._function(*inputs)
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = self._function(*inputs)
        return _Captured(graph, inputs, results)


def _shapes(tensors: Iterable[torch.Tensor]) -> Shapes:
    return tuple(tensor.shape for tensor in tensors)


def _fits(inner: Shapes, outer: Shapes) -> bool:
    return all(
        len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True))
        for a, b in zip(inner, outer, strict=True)
    )


def _volume(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes)
