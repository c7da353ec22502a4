# SPDX-License-Identifier: Apache-2.0
"""The flow of Voxtral TTS: what is computed how often, and each request by itself (B-42, B-43)."""

import math
from collections import Counter

import pytest
import torch

from vllm_omni.config.hf.voxtral_tts import VoxtralAcousticConfig
from vllm_omni.models.voxtral_acoustic import GUIDANCE, AcousticTransformer
from vllm_omni.testing.tiny.weights import randomize

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

WIDTH, GROUPS, LEVELS, BATCH = 32, 12, 21, 5


def transformer(steps: int) -> AcousticTransformer:
    config = VoxtralAcousticConfig(
        input_dim=WIDTH,
        dim=WIDTH,
        n_layers=2,
        head_dim=8,
        hidden_dim=48,
        n_heads=4,
        n_kv_heads=2,
        n_decoding_steps=steps,
    )
    model = AcousticTransformer(config, 98, LEVELS, GROUPS).eval().requires_grad_(False)
    randomize(model, torch.Generator().manual_seed(0))
    return model


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, WIDTH, generator=generator)
    return hidden, torch.randn(BATCH, GROUPS, generator=generator)


@pytest.mark.parametrize("steps", [7, 15, 16])
def test_what_does_not_change_is_computed_once(
    steps: int, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Hidden states are projected once per frame, times once ever; both halves of guidance share
    a forward."""
    model = transformer(steps)
    calls: Counter[str] = Counter()
    rows: set[int] = set()

    def count(name: str) -> None:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor], _output: object) -> None:
            calls[name] += 1
            rows.add(len(args[0]))

        model.get_submodule(name).register_forward_hook(hook)

    for name in ("llm_projection", "time_projection", "input_projection"):
        count(name)
    for _ in range(3):
        model.codes(*inputs, None)
    assert calls == {"llm_projection": 3, "time_projection": 1, "input_projection": 3 * steps}
    assert rows == {BATCH, steps, 2 * BATCH}


def test_requests_are_by_themselves(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Each with its guidance; none said is the model's own."""
    model = transformer(7)
    hidden, noise = inputs
    guidance = torch.tensor([math.nan, 1.0, 2.5, math.nan, GUIDANCE])
    together = model.codes(hidden, noise, guidance)
    for i in range(BATCH):
        own = None if guidance[i].isnan() else guidance[i : i + 1]
        assert torch.equal(model.codes(hidden[i : i + 1], noise[i : i + 1], own), together[i][None])
    assert together.min() >= 0 and together.max() < LEVELS
    default = model.codes(hidden, noise, None)
    assert torch.equal(default[[0, 3, 4]], together[[0, 3, 4]])
    assert not torch.equal(default[2], together[2])


def test_a_precision_has_a_schedule_of_its_own(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = transformer(7)
    before = model.codes(*inputs, None)
    model.to(torch.bfloat16)
    half = model.codes(*(each.to(torch.bfloat16) for each in inputs), None)
    assert (half - before).abs().float().mean() < 1
    model.to(torch.float32)
    assert (model.codes(*inputs, None) - before).abs().float().mean() < 1
