# SPDX-License-Identifier: Apache-2.0
"""Programs without a model, for testing the process around them."""

import os
import time

import torch

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.spec import LoadContext, Loaded, ProgramSpec
from vllm_omni.errors import OmniClientError


def run(ctx: Program) -> None:
    """Does what the options say, and ends with the final message."""
    if ctx.options.get("fail") == "client":
        raise OmniClientError("too loud", 422, "LoudnessError")
    if ctx.options.get("fail") == "server":
        ctx.options["secret"] = 1 / 0
    time.sleep(ctx.options.get("sleep", 0))
    for count in range(ctx.options.get("parrot", 0)):
        ctx.emit(
            "audio",
            {"audio": torch.full((10,), float(count))},
            {"count": count, "priority": ctx.job.priority},
        )
    while not ctx.receive().final:
        pass


def load(ctx: LoadContext) -> Loaded:
    return Loaded({})


def load_nothing(ctx: LoadContext) -> Loaded:
    raise KeyError("weights")


def load_and_die(ctx: LoadContext) -> Loaded:
    os._exit(3)


probe = ProgramSpec("probe", run, load)
unloadable = ProgramSpec("unloadable", run, load_nothing)
suicidal = ProgramSpec("suicidal", run, load_and_die)
