# SPDX-License-Identifier: Apache-2.0
"""Requests that are cancelled at random points leave nothing behind, and disturb nobody.

The three ways out: the caller closes its stream, the caller's task is cancelled, `abort`. When: at
a random time or after a random output, before the first one too.
"""

import asyncio
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoProcessor
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.dfx.deployments import config
from tests.dfx.probe import Resources, held
from tests.parity.cases import Case, cases
from tests.parity.harness import Answer, Deployment, deployment
from vllm_omni.errors import OmniGenerateError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

# Samples are in [-1, 1]; windows are batched with whatever is there, which rounds differently.
WAVEFORM_TOLERANCE = 1e-4
SETTLE_S = 20.0
CANCELLED = 200
IN_BETWEEN = 0.15
"""Share of the requests that are let run to their end meanwhile."""
AFTERWARDS = 50
IN_FLIGHT = 24
# Thread pools start their threads when they are first needed: ZMQ's and the event loop's executor.
SPARE_THREADS = 4
SPARE_DESCRIPTORS = 4


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    name: str
    case: Case
    audio: bool = True
    stream: bool = True
    n: int = 1


def kinds() -> list[Kind]:
    by_name = {case.name: case for case in cases()}
    return [
        Kind("text", by_name["text"], audio=False),
        Kind("long_prompt", by_name["text_long"], audio=False, stream=False),
        Kind("several", by_name["text_short"], audio=False, n=3),
        Kind("speech", by_name["text_short"]),
        Kind("long_speech", by_name["text_long"]),
        Kind("speech_at_the_end", by_name["text"], stream=False),
        Kind("picture", by_name["image"]),
        Kind("sound", by_name["audio"]),
        Kind("film", by_name["video"], audio=False),
        Kind("mix", by_name["mix"]),
        Kind("turns", by_name["turns"]),
    ]


class Client:
    """Asks a deployment for requests of all kinds, and cancels some."""

    def __init__(self, running: Deployment, model: Path) -> None:
        self.omni = running.omni
        self.processor = AutoProcessor.from_pretrained(model)
        self.cancelled = {"close": 0, "task": 0, "abort": 0}

    def stream(self, kind: Kind, request_id: str | None = None) -> Any:
        case = kind.case
        prompt = self.processor.apply_chat_template(
            case.messages, add_generation_prompt=True, tokenize=False
        )
        data = case.multi_modal_data()
        output_kind = RequestOutputKind.DELTA if kind.stream else RequestOutputKind.FINAL_ONLY
        talker = {"temperature": 0, "max_tokens": case.talker_max_tokens, "seed": None}
        return self.omni.generate(
            {"prompt": prompt, **({"multi_modal_data": data} if data else {})},
            SamplingParams(
                temperature=1.0 if kind.n > 1 else 0.0,
                seed=7,
                n=kind.n,
                max_tokens=case.max_tokens,
                output_kind=output_kind,
            ),
            request_id,
            sampling_params_list=[None, talker, None],
            output_modalities=("text", "audio") if kind.audio else ("text",),
        )

    async def answer(self, kind: Kind) -> Answer:
        """Run a request to its end; `token_ids` are those of all completions in turn."""
        answer = Answer()
        by_index: dict[int, list[int]] = {}
        async for output in self.stream(kind):
            for completion in output.outputs:
                by_index.setdefault(completion.index, []).extend(completion.token_ids)
            if output.audio is not None:
                answer.audio.append(output.audio.samples)
        answer.token_ids = [token for index in sorted(by_index) for token in by_index[index]]
        return answer

    async def cancel(self, kind: Kind, rng: random.Random) -> None:
        """Start a request and stop it somehow, somewhere; it may end before."""
        way = rng.choice(sorted(self.cancelled))
        outputs = rng.choice((0, 0, 1, 1, 2, 3, 5, 8, 13))
        delay = rng.choice((0.0, 0.0, 0.001, 0.01, 0.05, 0.2, 0.5)) * rng.random()
        request_id = f"cancel-{rng.random()}"
        read = asyncio.Event()
        finished = False

        async def caller() -> None:
            nonlocal finished
            count = 0
            async with aclosing(self.stream(kind, request_id)) as stream:
                if outputs == 0:
                    read.set()
                async for _ in stream:
                    count += 1
                    if count < outputs:
                        continue
                    read.set()
                    if way == "close":
                        await asyncio.sleep(delay)
                        return
                finished = True
                read.set()

        task = asyncio.create_task(caller())
        if way == "close" and outputs == 0:
            way = "task"
        await read.wait()
        if way != "close":
            await asyncio.sleep(delay)
        if way == "task":
            task.cancel()
        elif way == "abort":
            await self.omni.abort(request_id)
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if finished:
            return
        assert result is None or isinstance(
            result, asyncio.CancelledError if way == "task" else OmniGenerateError
        ), result
        self.cancelled[way] += 1

    async def settled(self) -> dict[str, Any]:
        """What is held once nothing changes any more; the last steps are given time to end."""
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while True:
            holds = await held(self.omni)
            if not holds or asyncio.get_running_loop().time() > deadline:
                return holds
            await asyncio.sleep(0.05)


def assert_same(answer: Answer, expected: Answer, name: str) -> None:
    assert answer.token_ids == expected.token_ids, name
    assert answer.waveform.shape == expected.waveform.shape, name
    if answer.audio:
        assert np.abs(answer.waveform - expected.waveform).max() < WAVEFORM_TOLERANCE, name


@pytest.fixture(scope="module", params=[(1, 1, 1), (2, 2, 2)], ids=["single", "replicated"])
def client(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]
) -> Iterator[tuple[Deployment, Client]]:
    model = tiny_checkpoint("qwen3_omni_moe")
    with deployment(model, deploy_config=config(request.param), async_chunk=True) as running:
        yield running, Client(running, model)


@pytest.mark.parametrize("seed", [1])
def test_cancelled_requests_leave_nothing(
    client: tuple[Deployment, Client], seed: int, request: pytest.FixtureRequest
) -> None:
    running, caller = client
    replicated = "replicated" in request.node.name
    wanted = CANCELLED // (4 if replicated else 1)
    rng = random.Random(seed)
    every = kinds()

    async def before() -> dict[str, Answer]:
        # All at once the first time: thread pools and caches grow to their size.
        await asyncio.gather(*[caller.answer(kind) for kind in every * 2])
        answers = {kind.name: await caller.answer(kind) for kind in every}
        assert await caller.settled() == {}
        return answers

    async def cancelling(expected: dict[str, Answer]) -> None:
        room = asyncio.Semaphore(IN_FLIGHT)

        async def one() -> None:
            kind = rng.choice(every)
            async with room:
                if rng.random() < IN_BETWEEN:
                    assert_same(await caller.answer(kind), expected[kind.name], kind.name)
                else:
                    await caller.cancel(kind, rng)

        # Some end before they can be stopped.
        while (missing := wanted - sum(caller.cancelled.values())) > 0:
            await asyncio.gather(*[one() for _ in range(missing)])

    async def afterwards(expected: dict[str, Answer]) -> None:
        chosen = [every[i % len(every)] for i in range(AFTERWARDS // (2 if replicated else 1))]
        room = asyncio.Semaphore(IN_FLIGHT)

        async def one(kind: Kind) -> None:
            async with room:
                assert_same(await caller.answer(kind), expected[kind.name], kind.name)

        await asyncio.gather(*map(one, chosen))

    expected = running.run(before(), 200)
    gc.collect()
    resources = Resources.now()
    running.run(cancelling(expected), 200)
    assert running.run(caller.settled()) == {}
    assert min(caller.cancelled.values()) > wanted // 8, "each way was taken"
    running.run(afterwards(expected), 200)
    assert running.run(caller.settled()) == {}
    gc.collect()
    now = Resources.now()
    assert now.processes == resources.processes
    assert now.threads <= resources.threads + SPARE_THREADS
    assert now.descriptors <= resources.descriptors + SPARE_DESCRIPTORS
