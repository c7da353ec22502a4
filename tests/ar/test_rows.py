# SPDX-License-Identifier: Apache-2.0
"""Rows out, rows in and the gate on real engines, against transformers (rows I-05, DESIGN 6)."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

from tests.ar.stages import Stages
from tests.parity.cases import Case, cases
from tests.reference.hf_omni import Reference

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

# Relative to the largest value of a row tensor: the two implementations sum in another order.
ROWS_TOLERANCE = 1e-5
BLOCK = 32
"""Tokens in a block of a KV cache."""
BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 4
"""Layers, keys and values, heads, head size, float32: of both tiny talkers."""


@pytest.fixture(scope="module", params=["qwen3_omni_moe", "qwen2_5_omni"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stages(family: str, tiny_checkpoint: Callable[[str], Path]) -> Iterator[Stages]:
    """Both prefills are chunked, prefix caching is on, and the talker's KV cache is so small that
    concurrent requests preempt each other."""
    running = Stages(
        family,
        tiny_checkpoint(family),
        {"max_num_batched_tokens": 48, "enable_prefix_caching": True},
        {
            "max_num_batched_tokens": 32,
            "enable_prefix_caching": True,
            "block_size": BLOCK,
            "max_model_len": 13 * BLOCK,  # the longest case just fits
            "kv_cache_memory_bytes": 15 * BLOCK * BYTES_PER_TOKEN,
        },
    )
    yield running
    running.close()


@pytest.fixture(scope="module")
def references(
    family: str, stages: Stages, reference_answers: Callable[[str], dict[str, Reference]]
) -> dict[str, Reference]:
    return reference_answers(family)


def assert_frames(spoken_frames: list[torch.Tensor], reference: Reference) -> None:
    frames = torch.cat(spoken_frames)
    assert reference.frames is not None
    count = len(reference.frames)
    assert torch.equal(frames[:count].long(), reference.frames)
    # What may follow: the end code, or the frame that transformers loses at the limit.
    assert len(frames) <= count + 1


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_hidden_rows_equal_transformers(
    case: Case, stages: Stages, references: dict[str, Reference]
) -> None:
    reference = references[case.name]
    spoken = stages.run(stages.think(f"rows-{case.name}", reference.prompt, case))
    assert spoken.prompt_token_ids == reference.prompt_token_ids
    assert spoken.token_ids == reference.token_ids
    for name, expected in (("embeds", reference.embeds), ("hidden", reference.hidden)):
        assert expected is not None
        rows = spoken.joined(name)
        assert rows.shape == expected.shape
        error = (rows - expected).abs().max() / expected.abs().max()
        assert error < ROWS_TOLERANCE, f"{name}: {error}"


def test_rows_of_cached_tokens_are_complete(
    stages: Stages, references: dict[str, Reference]
) -> None:
    case = next(case for case in cases() if case.name == "text_long")
    reference = references[case.name]
    first = stages.run(stages.think("cache-1", reference.prompt, case))
    again = stages.run(stages.think("cache-2", reference.prompt, case))
    assert torch.allclose(first.joined("hidden"), again.joined("hidden"), atol=1e-6)
    assert len(again.joined("embeds")) == len(reference.prompt_token_ids) + case.max_tokens - 1


@pytest.mark.parametrize("streaming", [True, False], ids=["async_chunk", "at_the_end"])
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_codec_frames_equal_transformers(
    case: Case, streaming: bool, stages: Stages, references: dict[str, Reference]
) -> None:
    reference = references[case.name]
    spoken = stages.run(
        stages.speak(f"{streaming}-{case.name}", reference.prompt, case, streaming=streaming)
    )
    assert spoken.token_ids == reference.token_ids
    assert_frames(spoken.frames, reference)


def test_talker_waits_for_a_slow_thinker(stages: Stages, references: dict[str, Reference]) -> None:
    case = cases()[0]
    reference = references[case.name]
    spoken = stages.run(stages.speak("slow", reference.prompt, case, slow_s=0.03))
    assert_frames(spoken.frames, reference)


PREEMPTION_ATTEMPTS = 6


def preemptions() -> int:
    """How often the talker's engine took a running request's KV cache, by vLLM's metric."""
    found = [
        metric
        for metric in get_metrics_snapshot()
        if metric.name == "vllm:num_preemptions" and metric.labels["stage"] == "talker"
    ]
    assert found, "the engine keeps no statistics"
    return sum(metric.value for metric in found if isinstance(metric, Counter))


def test_concurrent_requests_preempt_and_stay_exact(
    stages: Stages, references: dict[str, Reference]
) -> None:
    """Whether the small KV cache runs out is a matter of timing, so it is tried until it does."""
    mixed = [cases()[i % len(cases())] for i in range(16)]

    async def all_at_once(attempt: int) -> list:
        # The slower the thinker, the longer each request holds its blocks in the talker.
        slow = 0.002 * (1 + 2 * attempt)
        return await asyncio.gather(
            *[
                stages.speak(
                    f"mixed-{attempt}-{i}", references[case.name].prompt, case, slow_s=slow * i
                )
                for i, case in enumerate(mixed)
            ]
        )

    before = preemptions()
    for attempt in range(PREEMPTION_ATTEMPTS):
        answers = stages.run(all_at_once(attempt))
        for case, spoken in zip(mixed, answers, strict=True):
            assert spoken.token_ids == references[case.name].token_ids, case.name
            assert_frames(spoken.frames, references[case.name])
        if preemptions() > before:
            return
    pytest.fail("the talker's KV cache was large enough for all")
