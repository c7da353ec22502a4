# SPDX-License-Identifier: Apache-2.0
"""Step caches: what is left out of a request depends on that request alone."""

import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import Ask, counted, served, stock, to_message
from vllm_omni.config.build import build_plan
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.programs.diffusers import image as image_program
from vllm_omni.diffusion.programs.diffusers.hook_cache import cache_settings
from vllm_omni.diffusion.programs.diffusers.results import tensors_of
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.testing.diffusers_tiny import build, recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

EXAMPLE = recipe("qwen_image").examples[0]
"""Its pipeline makes two calls a step, `cond` and `uncond`."""
ASKS = (
    Ask("a red square on a white ground", steps=8, guidance=4.0, seed=1),
    Ask("two blue rings", steps=6, guidance=2.0, seed=2),
)
SETTINGS = {
    "first_block": {"threshold": 1.0},
    "mag_cache": {"mag_ratios": [1.0] * 8, "num_inference_steps": 8, "threshold": 0.5},
    "taylorseer": {
        "cache_interval": 3,
        "disable_cache_before_step": 2,
        "taylor_factors_dtype": "float32",
    },
}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return build("qwen_image", CHECKPOINTS / "diffusers" / "qwen_image")


def load(checkpoint: Path, backend: str, settings: dict[str, object]) -> Loaded:
    cpu = torch.device("cpu")
    return image_program.load(
        LoadContext(str(checkpoint), cpu, cache_backend=backend, cache_config=settings)
    )


@pytest.mark.parametrize("backend", SETTINGS)
def test_requests_at_a_time_get_what_each_gets_alone(checkpoint: Path, backend: str) -> None:
    pipeline = DiffusionPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.enable_cache(cache_settings(backend, SETTINGS[backend]))
    wanted = []
    for ask in ASKS:  # its end empties the cache
        generator = torch.Generator().manual_seed(ask.seed)
        made = pipeline(**ask.arguments(EXAMPLE), generator=generator, output_type="pt")
        wanted.append(tensors_of(made, "pt")["image"])
    loaded = load(checkpoint, backend, SETTINGS[backend])
    with counted(loaded) as forwards:
        together = [made["image"] for made in served(loaded, EXAMPLE, ASKS)]
    for picture, reference in zip(together, wanted, strict=True):
        torch.testing.assert_close(picture, reference, atol=1e-5, rtol=0)
    assert len(forwards) == 2 * sum(ask.steps for ask in ASKS)  # each forward is of one request
    assert loaded.assets["step_cache"].remembered == set()
    # Something was left out, or nothing of the above means anything.
    plain = load(checkpoint, "none", {})
    difference = (together[0] - stock(plain, EXAMPLE, ASKS[0])["image"]).abs().max()
    assert difference > 1e-4


def test_nothing_is_kept_of_a_request_that_is_gone(checkpoint: Path) -> None:
    loaded = load(checkpoint, "first_block", {})
    cache = loaded.assets["step_cache"]
    engine = Engine(image_program, loaded)
    for name, ask in zip(("stays", "goes"), ASKS, strict=True):
        engine.add(name, to_message(EXAMPLE, ask))
    while not {"goes/cond", "goes/uncond", "stays/cond"} <= cache.remembered:
        engine.step()
    engine.abort(["goes"])
    assert {name.partition("/")[0] for name in cache.remembered} == {"stays"}
    while engine.has_work:
        emissions = engine.step()
    assert emissions[-1].finished and emissions[-1].error is None
    assert cache.remembered == set()


def test_without_the_option_there_is_no_cache(checkpoint: Path) -> None:
    loaded = load(checkpoint, "none", {})
    transformer = loaded.components["transformer"].module
    assert not transformer.is_cache_enabled
    with counted(loaded) as forwards:
        served(loaded, EXAMPLE, ASKS)
    assert len(forwards) < 2 * sum(ask.steps for ask in ASKS)  # they are batched


@pytest.mark.parametrize(
    ("backend", "settings", "message"),
    [
        ("first_block", {"treshold": 1}, "cache_config.treshold.*did you mean 'threshold'"),
        ("first_block", {"threshold": "much"}, "cache_config.threshold = 'much'"),
        ("first_block", {"threshold": True}, "not be a boolean"),
        ("mag_cache", {}, "mag_ratios"),
    ],
)
def test_wrong_settings_are_told_at_the_start(
    checkpoint: Path, backend: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(OmniConfigError, match=message):
        load(checkpoint, backend, settings)


def test_a_model_without_step_caches_says_so() -> None:
    folder = build("sd3", CHECKPOINTS / "diffusers" / "sd3")
    with pytest.raises(OmniConfigError, match="no model of StableDiffusion3Pipeline can have it"):
        load(folder, "first_block", {})


def test_a_missing_package_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cache_dit", None)
    with pytest.raises(OmniConfigError, match=r"pip install 'vllm-omni\[cache-dit\]'"):
        load(checkpoint, "cache_dit", {})


def test_the_option_is_a_stage_key_and_a_flag(checkpoint: Path) -> None:
    for backend, config in (
        ("taylorseer", {"cache_interval": 4}),
        ("cache_dit", {"Fn_compute_blocks": 8}),
    ):
        flags = {"cache_backend": backend, "cache_config": config}
        diffusion = build_plan(str(checkpoint), cli=flags).entry.diffusion
        assert (diffusion.cache_backend, diffusion.cache_config) == (backend, config)
    for unknown, near in (("tea_cache", "first_block"), ("first_blok", "first_block")):
        with pytest.raises(OmniConfigError, match=near):
            build_plan(str(checkpoint), cli={"cache_backend": unknown})
