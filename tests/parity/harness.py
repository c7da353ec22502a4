# SPDX-License-Identifier: Apache-2.0
"""A deployment in this process's own event loop, and what a request to it gave."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

from tests.parity.cases import Case
from tests.reference.hf_omni import Reference
from vllm_omni import AsyncOmni
from vllm_omni.config.build import build_plan

T = TypeVar("T")

WAVEFORM_TOLERANCE = 1e-4
"""Samples are in [-1, 1]. Windows are decoded apart and batched, which rounds differently."""

BLOCK = 32
"""Tokens in a block of a KV cache: few, so that beginnings of short prompts are shared."""


def speech_config(base: str) -> dict[str, Any]:
    """A deployment of a text-to-speech family on this CPU: chunked prefill, sixteen at a time."""
    talker = {
        "stage_id": 0,
        "devices": "cpu",
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 32 << 20,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "block_size": BLOCK,
    }
    codec = {"stage_id": 1, "devices": "cpu", "max_num_seqs": 16}
    return {"base_config": base, "platforms": {}, "stages": [talker, codec]}


def counted(name: str) -> float:
    """One of vLLM's counters, of all stages that this process has had."""
    found = [each for each in get_metrics_snapshot() if each.name == f"vllm:{name}"]
    assert found, "the engines keep no statistics"
    return sum(each.value for each in found if isinstance(each, Counter))


@dataclass
class Answer:
    """What came back for one request."""

    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    audio: list[np.ndarray] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    @property
    def waveform(self) -> np.ndarray:
        return np.concatenate(self.audio) if self.audio else np.zeros(0, np.float32)


def assert_equal(answer: Answer, reference: Reference) -> None:
    """Tokens, text and sound are transformers' own."""
    assert answer.prompt_token_ids == reference.prompt_token_ids
    assert answer.token_ids == reference.token_ids
    assert answer.text == reference.text
    assert reference.waveform is not None
    expected = reference.waveform.numpy()
    assert answer.waveform.shape == expected.shape
    assert np.abs(answer.waveform - expected).max() < WAVEFORM_TOLERANCE


class Deployment:
    """A running pipeline and the loop that drives it."""

    def __init__(self, model: Path, **plan_options: Any) -> None:
        self.omni = AsyncOmni.from_plan(build_plan(str(model), **plan_options))
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout))

    def gather(self, *work: Coroutine[Any, Any, T]) -> list[T]:
        """The results of what runs at the same time."""

        async def together() -> list[T]:
            return await asyncio.gather(*work)

        return self.run(together())

    def close(self) -> None:
        self.omni.shutdown()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def ask(
        self,
        prompt: str,
        case: Case,
        *,
        audio: bool = True,
        stream: bool = True,
        request_id: str | None = None,
        repetition_penalty: float = 1.05,
        **kwargs: Any,
    ) -> Answer:
        """Greedy, as the reference runner asks."""
        data = case.multi_modal_data()
        params = SamplingParams(
            temperature=0,
            max_tokens=case.max_tokens,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )
        talker = {
            "temperature": 0,
            "max_tokens": case.talker_max_tokens,
            "repetition_penalty": repetition_penalty,
        }
        answer = Answer()
        async for output in self.omni.generate(
            {"prompt": prompt, **({"multi_modal_data": data} if data else {})},
            params,
            request_id,
            sampling_params_list=[None, talker, None] if audio else None,
            output_modalities=("text", "audio") if audio else ("text",),
            **kwargs,
        ):
            answer.outputs.append(output)
            if output.final_output_type == "text":
                answer.prompt_token_ids = list(output.prompt_token_ids or answer.prompt_token_ids)
                answer.token_ids += list(output.outputs[0].token_ids)
                answer.text += output.outputs[0].text
            elif output.audio is not None:
                answer.audio.append(output.audio.samples)
        return answer


@contextmanager
def deployment(model: Path, **plan_options: Any) -> Iterator[Deployment]:
    running = Deployment(model, **plan_options)
    try:
        yield running
    finally:
        running.close()
