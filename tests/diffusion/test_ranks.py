# SPDX-License-Identifier: Apache-2.0
"""Several ranks make what one makes (Ulysses, tensor parallel, halves of guidance apart), and end
together."""

import asyncio
import os
import signal
from functools import cache
from typing import Any

import psutil
import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError

from tests.diffusion.parity import MIXED, Made, load, served
from tests.diffusion.ranks import DIFFUSERS, HEADS, spread, wide
from tests.diffusion.spread_program import MEETING
from vllm_omni.diffusion.programs.diffusers import image as image_program
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniConfigError
from vllm_omni.fork_server import fork_server
from vllm_omni.inputs import ProgramInput
from vllm_omni.testing.diffusers_tiny import recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

FRAGILE = "tests.diffusion.spread_program:fragile"
BOUND = 2e-5
"""Pixels, in float32: sums over heads and columns are added up in parts. Measured: 6e-6 at most."""
ASKS = MIXED[:4]
"""Of different lengths, steps and guidance; the first two run alone as well."""
LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("flux", {"ulysses_degree": 2}),
    ("flux", {"cfg_parallel_size": 2, "tensor_parallel_size": 2}),
    ("flux2", {"tensor_parallel_size": 2}),
    ("flux2_klein", {"cfg_parallel_size": 2, "ulysses_degree": 2}),
    ("qwen_image", {"tensor_parallel_size": 4}),
    ("qwen_image", {"ulysses_degree": 4}),
    ("qwen_image", {"cfg_parallel_size": 2, "ulysses_degree": 2}),
    ("wan21_t2v", {"tensor_parallel_size": 2, "ulysses_degree": 2}),
    ("wan21_t2v", {"ulysses_degree": 4}),
    ("wan21_i2v", {"tensor_parallel_size": 2}),
    ("wan22_t2v", {"cfg_parallel_size": 2}),
    ("wan22_ti2v", {"ulysses_degree": 2}),
]


@pytest.fixture(scope="module", autouse=True)
def forker() -> None:
    """Before this process computes anything, and after it has imported what ranks need."""
    for family, _ in LAYOUTS:
        recipe(family)
    fork_server()


@cache
def on_one(family: str) -> list[Made]:
    """What one rank makes of each request alone."""
    example = recipe(family).examples[0]
    loaded = load(wide(family), example.pipeline)
    return [served(loaded, example, [ask])[0] for ask in ASKS]


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(f, s, id="-".join((f, *(f"{n}{v}" for n, v in s.items())))) for f, s in LAYOUTS],
)
def test_several_ranks_make_what_one_makes(family: str, layout: dict[str, int]) -> None:
    example = recipe(family).examples[0]
    with spread(DIFFUSERS, str(wide(family)), **layout) as running:
        assert len(running.ranks) + 1 == torch.tensor(list(layout.values())).prod()
        alone = [running.made(example, [ask])[0] for ask in ASKS[:2]]
        together = running.made(example, ASKS)
    wanted = on_one(family)
    for made, reference in zip((*alone, *together), (*wanted[:2], *wanted), strict=True):
        torch.testing.assert_close(made, reference, atol=BOUND, rtol=0)


def test_random_weights_are_the_same_on_all_ranks() -> None:
    example = recipe("flux").examples[0]
    made = []
    for size in (1, 2):
        settings = {"load_format": "dummy", "enforce_eager": True, "tensor_parallel_size": size}
        with spread(DIFFUSERS, str(wide("flux")), **settings) as running:
            made += running.made(example, ASKS[:1])
    torch.testing.assert_close(made[0], made[1], atol=BOUND, rtol=0)


async def test_failures_of_ranks_are_the_requests() -> None:
    with spread(FRAGILE, "", cfg_parallel_size=2) as running:
        ((everywhere,),) = await running.outputs(ProgramInput(options={"failing": [0, 1]}))
        assert everywhere.error is not None
        assert everywhere.error.message == "fragile failed: ArithmeticError"
        ((there,),) = await running.outputs(ProgramInput(options={"failing": [1]}))
        assert there.error is not None
        assert there.error.message == "fragile failed: rank 1: ArithmeticError"
        ((here,),) = await running.outputs(ProgramInput(options={"failing": [0]}))
        assert here.error is not None
        # Each row of a call went to a rank of its own.
        ((good,),) = await running.outputs(ProgramInput(options={}))
        assert running.tensors(good)["numbers"].tolist() == [0.0, 1.0]


async def test_a_rank_that_others_wait_for_in_vain_ends_all() -> None:
    with (
        spread(FRAGILE, "", cfg_parallel_size=2) as running,
        pytest.raises(EngineDeadError, match="exit code 1"),
    ):
        await running.outputs(ProgramInput(options={"failing": [1, MEETING]}))


@pytest.mark.parametrize("victim", ["first", "other"])
async def test_the_end_of_one_rank_is_the_end_of_all(victim: str) -> None:
    with spread(FRAGILE, "", tensor_parallel_size=3) as running:
        waiting = asyncio.create_task(running.replica.outputs())
        await asyncio.sleep(0.05)
        pid = running.replica.pid if victim == "first" else running.ranks[1].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="exit code"):
            await asyncio.wait_for(waiting, 10)
        assert not psutil.wait_procs(running.ranks, timeout=10)[1]


def test_what_a_rank_says_about_its_start_is_told() -> None:
    with (
        pytest.raises(OmniConfigError, match="nothing there for this rank"),
        spread(FRAGILE, "broken", cfg_parallel_size=2),
    ):
        pass


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("flux", {"tensor_parallel_size": 3}, f"tensor_parallel_size = 3: .* {HEADS} attention"),
        ("wan21_t2v", {"ulysses_degree": 8}, f"ulysses_degree = 8: .* {HEADS} attention heads"),
        ("flux2", {"cfg_parallel_size": 2}, "cfg_parallel_size = 2: Flux2Pipeline has no guidance"),
        ("sd3", {"ulysses_degree": 2}, "ulysses_degree = 2: transformer is a SD3Transformer2D"),
        (
            "flux",
            {"ulysses_degree": 2, "cache_backend": "first_block"},
            "cache_backend = 'first_block': not together with ulysses_degree = 2",
        ),
        (
            "flux",
            {"tensor_parallel_size": 2, "lora_modules": {"a": "b"}},
            "lora_modules: not together with tensor_parallel_size = 2",
        ),
        (
            "flux",
            {"ulysses_degree": 2, "diffusion_attention_backend": "FLASH_ATTN_3"},
            "diffusion_attention_backend = 'FLASH_ATTN_3': not together with ulysses_degree = 2",
        ),
    ],
)
def test_impossible_deployments_are_refused(
    family: str, settings: dict[str, Any], message: str
) -> None:
    assert image_program.spread is not None
    context = LoadContext(str(wide(family)), torch.device("cpu"), **settings)
    with pytest.raises(OmniConfigError, match=message):
        image_program.spread.check(context)


def test_a_program_that_knows_one_device_only_is_refused() -> None:
    with (
        pytest.raises(OmniConfigError, match="runs on one device only"),
        spread("tests.diffusion.probe_program:probe", "", tensor_parallel_size=2),
    ):
        pass
