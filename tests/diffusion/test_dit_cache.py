# SPDX-License-Identifier: Apache-2.0
"""cache-dit as a step cache: each request gets what cache-dit makes of it alone."""

import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import Ask, counted, served, stock, to_message
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.programs.diffusers import image as image_program
from vllm_omni.diffusion.programs.diffusers.results import tensors_of
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.testing.diffusers_tiny import build, recipe

cache_dit = pytest.importorskip("cache_dit", reason="needs the extra cache-dit")

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

ASKS = (
    Ask("a red square on a white ground", steps=8, guidance=4.0, seed=1),
    Ask("two blue rings", steps=6, guidance=2.0, seed=2),
    Ask("an open window", steps=8, guidance=1.0, seed=3),  # without guidance
)
BLOCKS = {"residual_diff_threshold": 0.95, "max_warmup_steps": 2, "max_continuous_cached_steps": 2}
"""Far above what trained models need: with random weights more changes from step to step."""
SETTINGS: Mapping[str, dict[str, Any]] = {
    "blocks": BLOCKS,
    "forecasts": BLOCKS | {"enable_taylorseer": True, "taylorseer_order": 1},
    "always": BLOCKS | {"residual_diff_threshold": 1.0},
    "masks": BLOCKS | {"scm_steps_mask_policy": "ultra", "scm_steps_policy": "static"},
}
heavy = pytest.mark.full_model
CASES = [
    pytest.param("flux", "forecasts"),
    pytest.param("qwen_image", "blocks"),
    pytest.param("qwen_image", "masks"),
    pytest.param("flux", "blocks", marks=heavy),
    pytest.param("qwen_image", "forecasts", marks=heavy),
    pytest.param("wan22_t2v", "always", marks=heavy),  # two transformers
    pytest.param("lumina2", "always", marks=heavy),  # its pipeline does not name its calls
    pytest.param("hunyuan_dit", "always", marks=heavy),  # cache-dit replaces methods of its blocks
    pytest.param("sd3", "always", marks=heavy),  # diffusers has no cache for it
]
NAMING = ("qwen_image", "wan22_t2v")
"""Families whose pipelines tell which half of guidance a call is of."""


def checkpoint(family: str) -> Path:
    return build(family, CHECKPOINTS / "diffusers" / family)


@cache
def load(family: str, settings: str | None) -> Loaded:
    """With cache-dit, or without a cache."""
    backend, config = ("none", {}) if settings is None else ("cache_dit", SETTINGS[settings])
    context = LoadContext(
        str(checkpoint(family)),
        torch.device("cpu"),
        torch.float32,
        cache_backend=backend,
        cache_config=config,
    )
    return image_program.load(context)


@cache
def itself(family: str) -> DiffusionPipeline:
    """The pipeline, as cache-dit's users have it."""
    pipeline = DiffusionPipeline.from_pretrained(checkpoint(family), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def alone(family: str, settings: Mapping[str, Any], ask: Ask) -> torch.Tensor:
    """What the pipeline itself makes with cache-dit enabled on it, as cache-dit's guide says."""
    example = recipe(family).examples[0]
    pipeline = itself(family)
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        max_warmup_steps=settings["max_warmup_steps"],
        max_continuous_cached_steps=settings["max_continuous_cached_steps"],
        residual_diff_threshold=settings["residual_diff_threshold"],
    )
    if family in NAMING and ask.guidance <= 1:
        config.enable_separate_cfg = False  # cache-dit does not see that there is one call a step
    if policy := settings.get("scm_steps_mask_policy"):
        config.steps_computation_mask = cache_dit.steps_mask(
            mask_policy=policy, total_steps=ask.steps
        )
        config.steps_computation_policy = settings["scm_steps_policy"]
    forecasts = None
    if settings.get("enable_taylorseer"):
        forecasts = cache_dit.TaylorSeerCalibratorConfig(
            taylorseer_order=settings["taylorseer_order"]
        )
    cache_dit.enable_cache(pipeline, cache_config=config, calibrator_config=forecasts)
    try:
        generator = torch.Generator().manual_seed(ask.seed)
        made = pipeline(**ask.arguments(example), generator=generator, output_type="pt")
    finally:
        cache_dit.disable_cache(pipeline)  # it is the class's `__call__` that it has replaced
    return next(iter(tensors_of(made, "pt").values()))


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_requests_at_a_time_get_what_each_gets_alone(family: str, settings: str) -> None:
    example = recipe(family).examples[0]
    loaded, plain = load(family, settings), load(family, None)
    with counted(loaded) as forwards:
        together = served(loaded, example, ASKS)
        (first,) = served(loaded, example, ASKS[:1])
    changes = []
    for made, ask in zip([first, *together], [ASKS[0], *ASKS], strict=True):
        (picture,) = made.values()
        wanted = alone(family, SETTINGS[settings], ask)
        torch.testing.assert_close(picture, wanted, atol=1e-4, rtol=0)
        (without,) = stock(plain, example, ask).values()
        changes.append((picture - without).abs().max())
    assert max(changes) > 1e-3  # something was left out, or the above means nothing
    assert len(forwards) >= ASKS[0].steps + sum(ask.steps for ask in ASKS)  # each of one request
    assert loaded.assets["step_cache"].remembered == set()
    # The models that they shared are as they were.
    untouched = stock(loaded, example, ASKS[0])
    torch.testing.assert_close(untouched, stock(plain, example, ASKS[0]), atol=0, rtol=0)


def test_nothing_is_kept_of_a_request_that_is_gone() -> None:
    loaded = load("qwen_image", "blocks")
    kept = loaded.assets["step_cache"]
    example = recipe("qwen_image").examples[0]
    engine = Engine(image_program, loaded)
    for name, ask in zip(("stays", "goes"), ASKS, strict=False):
        engine.add(name, to_message(example, ask))
    while not {"goes/cond", "goes/uncond", "stays/cond"} <= kept.remembered:
        engine.step()
    with kept.entered("transformer", "goes/cond") as view:
        gone = weakref.ref(view)
    del view
    engine.abort(["goes"])
    assert {name.partition("/")[0] for name in kept.remembered} == {"stays"}
    assert gone() is None
    while engine.has_work:
        emissions = engine.step()
    assert emissions[-1].finished and emissions[-1].error is None
    assert kept.remembered == set()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen_image", {"Fn_compute_block": 1}, "did you mean 'Fn_compute_blocks'"),
        ("qwen_image", {"Fn_compute_blocks": 0}, "Fn_compute_blocks = 0.*greater than"),
        ("qwen_image", {"Fn_compute_blocks": 3}, "Fn_compute_blocks = 3.*2 blocks"),
        ("qwen_image", {"Bn_compute_blocks": 1}, "nothing would be left out"),
        ("qwen_image", {"max_warmup_steps": True}, "not a boolean"),
        ("qwen_image", {"scm_steps_mask_policy": "mild"}, "'slow', 'medium', 'fast' or 'ultra'"),
        ("sd15", {}, "not for StableDiffusionPipeline"),
    ],
)
def test_what_cannot_be_is_told_at_the_start(
    family: str, settings: dict[str, object], message: str
) -> None:
    context = LoadContext(
        str(checkpoint(family)),
        torch.device("cpu"),
        cache_backend="cache_dit",
        cache_config=settings,
    )
    with pytest.raises(OmniConfigError, match=message):
        image_program.load(context)
