# SPDX-License-Identifier: Apache-2.0
"""A component's method from CUDA graphs, for inputs small enough that launching kernels is what
they take."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_omni.diffusion.rules import CallRules, Ragged
from vllm_omni.platforms.graphs import ShapeGraphs


class Replay:
    """The method. Its results are cut where its argument was padded.

    Args:
        function: The method.
        name: For the log.
        rules: Its rules; with graphs.
        device: Where it runs.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, rules: CallRules, device: torch.device
    ) -> None:
        assert rules.graphs is not None
        ((_, rule),) = rules.arguments.items()
        assert isinstance(rule, Ragged)
        self._dim = rule.dim
        self._output = rules.ragged_output
        self._graphs = ShapeGraphs(lambda value: (function(value),), name)
        self._graphs.capture((each.to(device),) for each in rules.graphs.examples())

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """The method's result for one argument, which is on the device."""
        (result,) = self._graphs(value)
        assert result is not None
        if self._output is None:
            return result
        valid = self._output.length(value.shape[self._dim])
        return result.narrow(self._output.dim, 0, min(valid, result.shape[self._output.dim]))
