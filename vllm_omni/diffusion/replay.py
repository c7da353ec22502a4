# SPDX-License-Identifier: Apache-2.0
"""A component's method from CUDA graphs, for inputs small enough that launching kernels is what
they take."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_omni.diffusion.rules import GRAPH_LENGTHS, CallRules, Ragged
from vllm_omni.diffusion.tensor_trees import filled, iter_tensors, map_tensors
from vllm_omni.platforms.graphs import Results, ShapeGraphs

_NOTHING = torch.empty(0)


class Replay:
    """The method. Its results are cut where its first argument was padded.

    Args:
        function: The method.
        name: For the log.
        rules: Its rules; with graphs.
        device: Where it runs.
        lengths: That there are graphs for.
        make: Makes the graphs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        rules: CallRules,
        device: torch.device,
        lengths: Sequence[int] = GRAPH_LENGTHS,
        make: Callable[[Callable[..., Results], str], ShapeGraphs] = ShapeGraphs,
    ) -> None:
        assert rules.graphs is not None
        rule = next(iter(rules.arguments.values()))
        assert isinstance(rule, Ragged)
        self._dim = rule.dim
        self._output = rules.ragged_output
        self._function = function
        self._graphs = make(self._flat, name)
        examples = rules.graphs.examples(lengths)
        self._arguments = map_tensors(examples[0], lambda _: _NOTHING)
        self._result: Any = None
        self._graphs.capture([each.to(device) for each in iter_tensors(args)] for args in examples)

    def __call__(self, *args: Any) -> Any:
        """The method's result; tensors are on the device."""
        result = filled(self._result, self._graphs(*iter_tensors(args)))
        if self._output is None:
            return result
        valid, dim = self._output.length(args[0].shape[self._dim]), self._output.dim
        return map_tensors(result, lambda each: each.narrow(dim, 0, min(valid, each.shape[dim])))

    def _flat(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The method of the tensors in its arguments; gives those in its result."""
        result = self._function(*filled(self._arguments, tensors))
        self._result = map_tensors(result, lambda _: _NOTHING)
        return tuple(iter_tensors(result))
