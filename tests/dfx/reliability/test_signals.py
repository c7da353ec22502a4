# SPDX-License-Identifier: Apache-2.0
"""The signal scenarios (rows A-30a to A-30n), with real processes.

A worker is an engine core or a diffusion process; the serve root is the process of `vllm serve`.
What rows say of a worker's death holds until the worker has been started again, which issue 3 adds.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from _pytest.mark import ParameterSet

from tests.dfx.reliability.harness import (
    RESPAWNED_S,
    UNAVAILABLE_S,
    Live,
    Tree,
    load,
    measured,
    serving,
    until,
)
from tests.processes import command_line

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
SHUTDOWN_S = 15.0
ORDERLY_S = 3.0
"""What an engine core that gets SIGTERM takes to tear down."""
AT_ONCE_S = 3.0


def rarely(*values: object, id: str | None = None) -> ParameterSet:
    """A case that differs little from its neighbours: `--run-level full_model` has it."""
    return pytest.param(*values, marks=pytest.mark.full_model, id=id)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3_omni_moe")


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server for all faults that it has to survive."""
    with serving(model, tmp_path_factory.mktemp("shared")) as live:
        yield live


def worker(live: Live, stage: str) -> psutil.Process:
    title = {"thinker": "EngineCore", "talker": "EngineCore", "code2wav": "OmniDiffusion"}[stage]
    if title == "OmniDiffusion":
        return live.workers(title)[0]
    (host,) = live.workers(f"OmniHost_{stage}")
    return next(p for p in host.children() if "EngineCore" in command_line(p))


def assert_unavailable(live: Live, scenario: str, ending: float = 0.0) -> None:
    """The death was seen within the time; one that was asked to end may first take `ending`."""
    measured(scenario, "unavailable", live.becomes(503, ending + UNAVAILABLE_S))


def assert_recovers(live: Live, expected: str, scenario: str = "") -> None:
    """It came back within the time, and its answers are right."""
    measured(scenario, "serves again", live.becomes(200, RESPAWNED_S))
    assert live.text() == expected
    spoken = live.ask("text", "audio")
    assert spoken.status_code == 200 and spoken.json()["choices"][0]["message"]["audio"]["data"]
    until(lambda: [n for n in live.segments() if not n.endswith("-lock")] == [], 10)


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("thinker", KILL),
        ("talker", TERM),
        ("code2wav", KILL),
        rarely("thinker", TERM),
        rarely("talker", KILL),
        rarely("code2wav", TERM),
    ],
)
def test_worker_without_load(shared: Live, stage: str, number: int) -> None:
    """A-30a, A-30b: unavailable within 2 s, the API answers, and it comes back."""
    expected = shared.text()
    scenario = f"A-30a/b {stage} {signal.Signals(number).name}"
    worker(shared, stage).send_signal(number)
    assert_unavailable(shared, scenario, ORDERLY_S if number == TERM else 0)
    refused = shared.ask("text", "audio")
    assert refused.status_code in (200, 500, 503), refused.text
    if refused.status_code != 200:
        assert refused.json()["error"]["message"]
    assert_recovers(shared, expected, scenario)


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("thinker", TERM),
        ("code2wav", KILL),
        rarely("thinker", KILL),
        rarely("code2wav", TERM),
    ],
)
def test_worker_under_load(shared: Live, stage: str, number: int) -> None:
    """A-30h, A-30i: what runs fails fast, and the service comes back."""
    expected = shared.text()
    running = load(shared)
    scenario = f"A-30h/i {stage} {signal.Signals(number).name}"
    worker(shared, stage).send_signal(number)
    assert_unavailable(shared, scenario, ORDERLY_S if number == TERM else 0)
    outcomes = running.join(10)
    assert all(outcomes), outcomes
    assert_recovers(shared, expected, scenario)


def test_host_of_a_worker(shared: Live) -> None:
    """The process that an engine core lives under counts as the worker.

    Its successor has not been sent the picture that the front end keeps (B-12).
    """
    expected = shared.text()
    seen = shared.look()
    (host,) = shared.workers("OmniHost_thinker")
    core = worker(shared, "thinker")
    host.kill()
    assert_unavailable(shared, "host")
    _, alive = psutil.wait_procs([core], 10)
    assert not alive, "the engine core ends with its host"
    assert_recovers(shared, expected)
    hits = shared.media_hits()
    assert shared.look() == seen
    assert shared.look() == seen
    assert shared.media_hits() >= hits + 1


def test_hung_worker(model: Path, tmp_path: Path) -> None:
    """A stopped process has work and does nothing: it counts as dead, and is replaced."""
    with serving(model, tmp_path, ["--stage-hang-timeout=2"]) as live:
        expected = live.text()
        stopped = worker(live, "thinker")
        stopped.suspend()
        assert live.ask("text").status_code >= 500
        assert_unavailable(live, "hung")
        _, alive = psutil.wait_procs([stopped], 10)
        assert not alive
        assert_recovers(live, expected, "hung")


@pytest.mark.parametrize("loaded", [rarely(False, id="c-idle"), pytest.param(True, id="j-loaded")])
def test_root_killed(model: Path, tmp_path: Path, loaded: bool) -> None:
    """A-30c, A-30j: connections are cut at once, and nothing is left."""
    with serving(model, tmp_path) as live:
        live.look()
        running = load(live) if loaded else None
        tree = Tree(live)
        assert any("vllm_dist" in path for path in live.files()), "not in a folder that goes"
        live.server.process.kill()
        assert live.server.process.wait(AT_ONCE_S) == -KILL
        if running is not None:
            assert all(running.join(10)), running.outcomes
        with pytest.raises(httpx.TransportError):
            live.health()
        measured(f"A-30c/j loaded={loaded}", "all gone", tree.assert_gone())


@pytest.mark.parametrize(
    ("number", "loaded"),
    [
        rarely(TERM, False, id="d-SIGTERM"),
        rarely(INT, False, id="e-SIGINT"),
        pytest.param(TERM, True, id="k-SIGTERM-loaded"),
        rarely(INT, True, id="l-SIGINT-loaded"),
    ],
)
def test_root_asked_to_end(model: Path, tmp_path: Path, number: int, loaded: bool) -> None:
    """A-30d, e, k, l: no more connections, what runs fails, exit code 0, nothing is left."""
    with serving(model, tmp_path) as live:
        live.look()
        running = load(live) if loaded else None
        tree = Tree(live)
        began = time.monotonic()
        live.server.process.send_signal(number)
        until(lambda: refuses(live), 10)
        assert live.server.process.wait(SHUTDOWN_S) == 0
        scenario = f"A-30d/e/k/l {signal.Signals(number).name} loaded={loaded}"
        measured(scenario, "exit", time.monotonic() - began)
        if running is not None:
            outcomes = running.join(5)
            assert all(outcomes), outcomes
            assert any("shutting down" in str(outcome) for outcome in outcomes), outcomes
        tree.assert_gone()


def refuses(live: Live) -> bool:
    """Whether it takes no connections any more."""
    try:
        live.health()
    except httpx.TransportError:
        return True
    return False


@pytest.mark.parametrize("loaded", [rarely(False, id="f-idle"), rarely(True, id="m-loaded")])
def test_all_killed(model: Path, tmp_path: Path, loaded: bool) -> None:
    """A-30f, A-30m."""
    with serving(model, tmp_path) as live:
        live.look()
        running = load(live) if loaded else None
        tree = Tree(live)
        for process in tree.processes:
            process.kill()
        assert live.server.process.wait(AT_ONCE_S) == -KILL
        if running is not None:
            assert all(running.join(10)), running.outcomes
        _, alive = psutil.wait_procs(tree.processes, 5)
        assert not alive
    # Nobody is left to remove anything: the next server does.
    with serving(model, tmp_path / "next"):
        assert not [
            name
            for name in os.listdir("/dev/shm")
            if name.startswith(f"vllm-omni-{tree.processes[0].pid}-")
        ]


@pytest.mark.parametrize("loaded", [rarely(False, id="g-idle"), rarely(True, id="n-loaded")])
def test_all_asked_to_end(model: Path, tmp_path: Path, loaded: bool) -> None:
    """A-30g, A-30n."""
    with serving(model, tmp_path) as live:
        live.look()
        running = load(live) if loaded else None
        tree = Tree(live)
        for process in tree.processes:
            process.send_signal(TERM)
        assert live.server.process.wait(SHUTDOWN_S) == 0
        if running is not None:
            assert all(running.join(5)), running.outcomes
        tree.assert_gone()


def test_running_requests_are_waited_for(model: Path, tmp_path: Path) -> None:
    """`--shutdown-timeout`: they end well, new ones are refused, and then the server ends."""
    with serving(model, tmp_path, ["--shutdown-timeout=30"]) as live:
        tree = Tree(live)
        running = load(live, 2)
        live.server.process.send_signal(TERM)
        until(lambda: refuses(live), 10)
        assert live.server.process.wait(40) == 0
        assert running.join(5) == [None, None]
        tree.assert_gone()


def test_a_second_signal_ends_it_at_once(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, ["--shutdown-timeout=60"]) as live:
        tree = Tree(live)
        running = load(live)
        live.server.process.send_signal(TERM)
        until(lambda: refuses(live), 10)
        live.server.process.send_signal(TERM)
        assert live.server.process.wait(AT_ONCE_S) == 128 + TERM
        assert all(running.join(10)), running.outcomes
        tree.assert_gone()
