# SPDX-License-Identifier: Apache-2.0
"""The batched code predictor equals transformers' `generate`, and draws as it does."""

import pytest
import torch
from transformers import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration as Reference,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models.utils import AutoWeightsLoader

from vllm_omni.models.code_predictor import CodePredictor
from vllm_omni.models.depth import draw
from vllm_omni.models.interfaces import FrameSampling
from vllm_omni.models.noise import Noise

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

GROUPS, VOCABULARY, WIDTH, BATCH = 8, 96, 32, 5


@pytest.fixture(scope="module")
def reference() -> Reference:
    config = Qwen3OmniMoeTalkerCodePredictorConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_code_groups=GROUPS,
    )
    model = Reference(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3, generator=generator)
    return model


@pytest.fixture(scope="module")
def predictor(reference: Reference) -> CodePredictor:
    with set_current_vllm_config(VllmConfig()):
        model = CodePredictor(reference.config).eval()
    loaded = AutoWeightsLoader(model).load_weights(reference.state_dict().items())
    assert loaded == {name for name, _ in model.named_parameters()}
    return model


@pytest.fixture(scope="module")
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, first = torch.randn(2, BATCH, WIDTH, generator=generator)
    return hidden, first


def sampling(temperature: list[float], seeds: list[int], **given: float) -> FrameSampling:
    batch = len(temperature)
    return FrameSampling(
        temperature=torch.tensor(temperature),
        top_k=torch.full((batch,), int(given.get("top_k", 0))),
        top_p=torch.full((batch,), given.get("top_p", 1.0)),
        noise=Noise(torch.tensor(seeds), torch.zeros(batch, dtype=torch.int64)),
        all_greedy=not any(temperature),
        memory=torch.zeros(batch, 0, dtype=torch.int64),
    )


@torch.no_grad()
def test_greedy_equals_transformers(
    reference: Reference,
    predictor: CodePredictor,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    hidden, first = inputs
    codes, embeds = predictor.predict(hidden, first, sampling([0.0] * BATCH, [0] * BATCH))
    assert codes.shape == (BATCH, GROUPS - 1)
    for i in range(BATCH):
        expected = reference.generate(
            inputs_embeds=torch.stack([hidden[i], first[i]])[None],
            max_new_tokens=GROUPS - 1,
            do_sample=False,
        )
        assert torch.equal(codes[i], expected[0])
    for group, table in enumerate(reference.get_input_embeddings()):
        assert torch.equal(embeds[:, group], table(codes[:, group]))


@torch.no_grad()
def test_a_seeded_frame_does_not_depend_on_its_batch(
    predictor: CodePredictor, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    hidden, first = inputs
    seeds = [3, 1, 4, 5, 2]
    mixed, _ = predictor.predict(hidden, first, sampling([1.0, 1.0, 0.0, 0.7, 1.0], seeds))
    for i in (0, 3):
        alone, _ = predictor.predict(
            hidden[i : i + 1], first[i : i + 1], sampling([[1.0, 0.7][i > 0]], [seeds[i]])
        )
        assert torch.equal(mixed[i], alone[0])
    greedy, _ = predictor.predict(hidden, first, sampling([0.0] * BATCH, [0] * BATCH))
    assert torch.equal(mixed[2], greedy[2])
    assert not torch.equal(mixed[0], greedy[0])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 8, 0.8), (1.0, 0, 0.5)]
)
def test_draws_are_distributed_as_in_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, 12, generator=generator)
    warped = logits / temperature
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    expected = warped.softmax(-1)[0]
    n = 40_000
    params = sampling([temperature] * n, [], top_k=top_k, top_p=top_p)
    noise = torch.empty(n, 12).exponential_(generator=generator)
    counts = torch.bincount(draw(logits.expand(n, -1), params, noise), minlength=12)
    assert torch.equal(counts > 0, expected > 0)
    torch.testing.assert_close(counts / n, expected, atol=0.01, rtol=0.0)
