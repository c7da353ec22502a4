# SPDX-License-Identifier: Apache-2.0
"""Compiled denoisers and attention backends make what diffusers makes, or are left off."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import CPU, Ask, load, served, stock
from vllm_omni.config.values import ATTENTION_BACKENDS
from vllm_omni.diffusion.programs.diffusers import image as image_program
from vllm_omni.diffusion.programs.diffusers.acceleration import BACKENDS
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.start_check import StartCheck
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.testing.diffusers_tiny import build, recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

EXAMPLE = recipe("qwen_image").examples[0]
ASKS = (
    Ask("a red square on a white ground", seed=1),
    Ask("two blue rings", steps=4, guidance=5.0, seed=2),
    Ask("a long walk along the river, in the rain and in the evening", steps=3, seed=3),
    Ask("cat", guidance=1.0, seed=4),
    Ask("the same sky twice", height=64, seed=5),
    Ask("a small ball, at rest", height=64, width=48, steps=3, seed=6),
)
"""Rows alone and together, with a mask and without, of three sizes."""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return build("qwen_image", CHECKPOINTS / "diffusers" / "qwen_image")


@pytest.fixture
def compiler() -> Iterator[None]:
    """Compiled code does not outlive the test."""
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
def test_compiled_at_the_start_and_never_again(checkpoint: Path) -> None:
    eager = load(checkpoint, EXAMPLE.pipeline)
    wanted = [stock(eager, EXAMPLE, ask)["image"] for ask in ASKS]
    loaded = image_program.load(LoadContext(str(checkpoint), CPU, enforce_eager=False))
    with torch.compiler.set_stance("fail_on_recompile"):
        together = [made["image"] for made in served(loaded, EXAMPLE, ASKS)]
        alone = [served(loaded, EXAMPLE, [ask])[0]["image"] for ask in ASKS]
    for picture, single, reference in zip(together, alone, wanted, strict=True):
        torch.testing.assert_close(picture, reference, atol=1e-4, rtol=0)
        torch.testing.assert_close(single, reference, atol=1e-4, rtol=0)


def test_a_backend_that_is_not_installed_is_left_off(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = LoadContext(str(checkpoint), CPU, diffusion_attention_backend="FLASH_ATTN_3")
    with caplog.at_level(logging.WARNING, logger="vllm_omni"):
        loaded = image_program.load(context)
    assert "Attention backend FLASH_ATTN_3 is not used" in caplog.text
    plain = load(checkpoint, EXAMPLE.pipeline)
    (made,) = served(loaded, EXAMPLE, ASKS[:1])
    torch.testing.assert_close(made, stock(plain, EXAMPLE, ASKS[0]), atol=1e-4, rtol=0)


def test_a_difference_at_the_start_is_found(checkpoint: Path) -> None:
    loaded = load(checkpoint, EXAMPLE.pipeline)
    kit = _kit(loaded)
    check = StartCheck.of(kit)
    assert check.problem() is None
    with torch.inference_mode():
        kit.base.transformer.transformer_blocks[0].attn.to_v.weight.mul_(-1)
    assert "latents differ by" in (check.problem() or "")


def test_every_backend_that_the_schema_knows_has_a_name_in_diffusers() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert {"auto", *BACKENDS} == set(ATTENTION_BACKENDS)
    assert set(BACKENDS.values()) <= {name.value for name in AttentionBackendName}


def _kit(loaded: Loaded) -> Kit:
    return loaded.assets["kit"]
