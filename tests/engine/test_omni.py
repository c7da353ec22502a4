# SPDX-License-Identifier: Apache-2.0
"""`Omni` over an orchestrator thread and stages in memory: threads, and arguments of any kind."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.test_async_omni import ENDLESS, WAIT_S, launched, plan
from vllm_omni import Omni
from vllm_omni.entrypoints import front_door as module
from vllm_omni.entrypoints.front_door import EngineClosedError
from vllm_omni.errors import OmniClientError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]


class Offline:
    """An `Omni` and the replicas behind it. A prompt is the number of its answer's tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        running, self.replicas = launched(plan())
        monkeypatch.setattr(module, "build_plan", lambda *_, **__: plan())
        monkeypatch.setattr(module, "launch_pipeline", lambda *_: running)
        self.omni = Omni("fake")

    def texts(self, *counts: int) -> list[str]:
        outputs = self.omni.generate(list(counts), output_modalities=["text"], use_tqdm=False)
        return [output.outputs[0].text for output in outputs]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offline]:
    it = Offline(monkeypatch)
    yield it
    it.omni.close()


def spoken(count: int) -> str:
    """What stands for an answer: its last token, for an engine gives a whole text at its end."""
    return f"<{count}>"


def test_threads_get_their_own_answers(offline: Offline) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(offline.texts, n, n + 1) for n in range(1, 25)]
        answers = [call.result(4 * WAIT_S) for call in calls]
    assert answers == [[spoken(n), spoken(n + 1)] for n in range(1, 25)]


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"sampling_params": 3}, "sampling_params"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
        ({"sampling_params": "greedy"}, "sampling_params"),
        ({"sampling_params": [{}]}, "sampling_params_list"),
        ({"sampling_params": [{"tempo": 1}, {}, {}]}, "sampling_params_list.0.tempo"),
        *(
            ({"sampling_params": [each, {}, {}]}, "sampling_params_list.0.repetition_penalty")
            for each in ({"repetition_penalty": 1e-300}, SamplingParams(repetition_penalty=1e300))
        ),
        ({"output_modalities": "text"}, "modalities"),
        ({"output_modalities": [None]}, "modalities"),
        ({"voice": ["ethan"]}, "audio.voice"),
    ],
)
def test_wrong_arguments_are_named_and_start_nothing(
    offline: Offline, arguments: dict[str, Any], param: str
) -> None:
    with pytest.raises(OmniClientError) as caught:
        offline.omni.generate([ENDLESS, ENDLESS], use_tqdm=False, **arguments)
    assert caught.value.param == param
    assert offline.texts(2) == [spoken(2)]
    assert not offline.replicas[0][0].running


def test_a_closed_one_says_so(offline: Offline) -> None:
    """Whether it was closed before or meanwhile, and not that something died."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(offline.texts, ENDLESS)
        while not offline.replicas[0][0].running:
            time.sleep(0.01)
        offline.omni.close()
        with pytest.raises(EngineClosedError, match=r"^this Omni is closed"):
            running.result(4 * WAIT_S)
    for counts in ((1,), ()):
        with pytest.raises(EngineClosedError, match=r"^this Omni is closed"):
            offline.texts(*counts)
    with pytest.raises(EngineClosedError), offline.omni:
        pass
    offline.omni.close()
