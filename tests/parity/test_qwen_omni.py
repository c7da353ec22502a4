# SPDX-License-Identifier: Apache-2.0
"""Whole pipelines against transformers' own `generate`, through `AsyncOmni` (I-05, B-M01, B-M02).

Two deployments per family: one streams between stages and chunks its prefills, the other hands over
at the end and has two replicas of every stage. Every answer must be the reference's, alone and in
any company.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parity.cases import Case, cases
from tests.parity.harness import Answer, Deployment, assert_equal, deployment
from tests.reference.hf_omni import Reference

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

STAGE = {
    "devices": "cpu",
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "max_model_len": 2048,
    "max_num_seqs": 16,
}
SOUND = {"devices": "cpu", "max_num_seqs": 16}
CHUNKED = {**STAGE, "max_num_batched_tokens": 64, "enable_prefix_caching": True}


@pytest.fixture(scope="module", params=["qwen3_omni_moe", "qwen2_5_omni"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint(family)


@pytest.fixture(scope="module")
def streaming(family: str, model: Path) -> Iterator[Deployment]:
    """`async_chunk` on, one replica, chunked prefill, prefix caching."""
    stages = [{"stage_id": 0, **CHUNKED}, {"stage_id": 1, **CHUNKED}, {"stage_id": 2, **SOUND}]
    config = {"base_config": f"{family}.yaml", "platforms": {}, "stages": stages}
    with deployment(model, deploy_config=config, async_chunk=True) as running:
        yield running


@pytest.fixture(scope="module")
def replicated(family: str, model: Path) -> Iterator[Deployment]:
    """`async_chunk` off, two replicas of every stage."""
    stages = [
        {"stage_id": 0, **STAGE, "num_replicas": 2},
        {"stage_id": 1, **STAGE, "num_replicas": 2},
        {"stage_id": 2, **SOUND, "num_replicas": 2},
    ]
    config = {"base_config": f"{family}.yaml", "platforms": {}, "stages": stages}
    with deployment(model, deploy_config=config, async_chunk=False) as running:
        yield running


@pytest.fixture(scope="module")
def references(
    family: str, streaming: Deployment, reference_answers: Callable[[str], dict[str, Reference]]
) -> dict[str, Reference]:
    return reference_answers(family)


async def all_at_once(
    running: Deployment, references: dict[str, Reference], mixed: list[Case], **kwargs: bool
) -> list[Answer]:
    return await asyncio.gather(
        *[running.ask(references[case.name].prompt, case, **kwargs) for case in mixed]
    )


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_alone(case: Case, streaming: Deployment, references: dict[str, Reference]) -> None:
    answer = streaming.run(streaming.ask(references[case.name].prompt, case))
    assert_equal(answer, references[case.name])
    assert answer.outputs[-1].stage_metrics


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_sixteen_at_once(
    stream: bool, streaming: Deployment, references: dict[str, Reference]
) -> None:
    mixed = [cases()[i % len(cases())] for i in range(16)]
    answers = streaming.run(all_at_once(streaming, references, mixed, stream=stream))
    for case, answer in zip(mixed, answers, strict=True):
        assert_equal(answer, references[case.name])


def test_prefix_cache_hits_change_nothing(
    streaming: Deployment, references: dict[str, Reference]
) -> None:
    case = next(case for case in cases() if case.name == "text_long")
    reference = references[case.name]
    for audio in (False, True, False):
        answer = streaming.run(streaming.ask(reference.prompt, case, audio=audio))
        assert answer.token_ids == reference.token_ids
        if audio:
            assert_equal(answer, reference)
    # The last one read the cache: a text request may.
    assert answer.outputs[-1].num_cached_tokens > 0


def test_text_only_never_visits_the_talker(
    streaming: Deployment, references: dict[str, Reference]
) -> None:
    case = cases()[0]
    answer = streaming.run(streaming.ask(references[case.name].prompt, case, audio=False))
    assert [metrics.stage for metrics in answer.outputs[-1].stage_metrics] == ["thinker"]
    assert not answer.audio


def test_without_media_the_talker_hears_the_same(
    family: str, model: Path, reference_answers: Callable[[str], dict[str, Reference]]
) -> None:
    """With media switched off, vLLM gives the thinker token ids; the talker needs embeddings."""
    none = {"image": 0, "video": 0, "audio": 0}
    stages = [
        {"stage_id": 0, **CHUNKED, "limit_mm_per_prompt": none},
        {"stage_id": 1, **CHUNKED},
        {"stage_id": 2, **SOUND},
    ]
    config = {"base_config": f"{family}.yaml", "platforms": {}, "stages": stages}
    texts = [case for case in cases() if case.name.startswith("text")]
    answers = reference_answers(family)
    with deployment(model, deploy_config=config, async_chunk=True) as running:
        for case, answer in zip(
            texts, running.run(all_at_once(running, answers, texts)), strict=True
        ):
            assert_equal(answer, answers[case.name])


@pytest.mark.parametrize(
    "family",
    ["qwen3_omni_moe", pytest.param("qwen2_5_omni", marks=pytest.mark.full_model)],
    indirect=True,
    scope="module",
)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_two_replicas_at_the_end(
    stream: bool, replicated: Deployment, references: dict[str, Reference]
) -> None:
    mixed = [cases()[i % len(cases())] for i in range(16)]
    answers = replicated.run(all_at_once(replicated, references, mixed, stream=stream))
    for case, answer in zip(mixed, answers, strict=True):
        assert_equal(answer, references[case.name])
    replicas = {m.replica for answer in answers for m in answer.outputs[-1].stage_metrics}
    assert replicas == {0, 1}
