# SPDX-License-Identifier: Apache-2.0
"""A program whose model runs on several ranks and fails where a request says."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded, ProgramSpec, SpreadProgram
from vllm_omni.errors import OmniConfigError

MEETING = 2
"""In `failing`, of a model whose ranks exchange something."""


class Fragile(nn.Module):
    """Adds its rank's number."""

    def forward(self, numbers: torch.Tensor, failing: list[int]) -> torch.Tensor:
        """[rows] -> [rows]

        Args:
            failing: Ranks on which it raises; with `MEETING` the others wait for them.
        """
        rank = dist.get_rank()
        if rank in failing:
            raise ArithmeticError(f"rank {rank} was told to")
        if MEETING in failing:
            dist.all_reduce(numbers)
        return numbers + rank


def run(ctx: Program) -> None:
    """Emits what the model makes of two rows."""
    ctx.receive()
    model = ctx.component("model", Fragile)
    ctx.emit("audio", {"numbers": model(torch.zeros(2), ctx.options.get("failing", []))}, {})


def load(ctx: LoadContext) -> Loaded:
    return Loaded({"model": Component(Fragile(), spread=True)})


def load_part(ctx: LoadContext) -> Mapping[str, nn.Module]:
    if ctx.model == "broken":
        raise OmniConfigError("nothing there for this rank")
    return {"model": Fragile()}


fragile = ProgramSpec("fragile", run, load, spread=SpreadProgram(lambda ctx: None, load_part))
