# SPDX-License-Identifier: Apache-2.0
"""A server that is ended, or cannot go on, while it starts (issue 3, "Process life")."""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.dfx.reliability.harness import FLAGS, Live, Tree, short_folder, until
from tests.dfx.reliability.test_signals import rarely
from vllm_omni.testing.server import OmniServer

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

EXIT_S = 20.0
START_S = 120.0


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3_omni_moe")


def begin(model: Path, folder: Path, *flags: str) -> Live:
    """A server that is on its way up."""
    sockets = short_folder()
    env = {"VLLM_RPC_BASE_PATH": str(sockets), "TMPDIR": str(sockets)}
    command = [*FLAGS, *flags]
    server = OmniServer(model, command, log=folder / "server.log", env=env, fork=True)
    server.launch()
    return Live(server, str(model), sockets)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("OmniHost", signal.SIGINT),
        rarely("EngineCore", signal.SIGTERM),
        ("OmniForkServer", signal.SIGTERM),
        rarely("OmniForkServer", signal.SIGINT),
        rarely("OmniHost", signal.SIGTERM),
        rarely("EngineCore", signal.SIGINT),
    ],
)
def test_a_signal_while_starting(model: Path, tmp_path: Path, moment: str, number: int) -> None:
    """Whatever has been started ends, and the server's exit is clean."""
    live = begin(model, tmp_path)
    try:
        until(lambda: live.workers(moment), START_S)
        tree = Tree(live)
        live.server.process.send_signal(number)
        assert live.server.process.wait(EXIT_S) == 0, live.server.log_tail()
        tree.assert_gone()
    finally:
        live.server.kill()


def failed_start(model: Path, folder: Path, *flags: str) -> Sequence[str]:
    """What a server that cannot start says, from its own error on."""
    live = begin(model, folder, *flags)
    try:
        assert live.server.process.wait(START_S) == 1
    finally:
        live.server.kill()
    assert live.files() == []
    lines = live.server.log.read_text().splitlines()
    (error,) = (i for i, line in enumerate(lines) if line.startswith("vllm-omni: error:"))
    return lines[error:]


def test_too_little_memory(model: Path, tmp_path: Path) -> None:
    # Of one stage alone: of several that fail, the first to fail is told.
    override = json.dumps({"thinker": {"kv_cache_memory_bytes": 1}})
    error, *log = failed_start(model, tmp_path, f"--stage-overrides={override}")
    assert "stage 'thinker'" in error and "No available memory" in error
    assert any("lines of its log" in line for line in log)


@pytest.mark.full_model
def test_a_damaged_checkpoint(model: Path, tmp_path: Path) -> None:
    """The reason is the file's, not "engine core initialization failed"."""
    damaged = tmp_path / "model"
    shutil.copytree(model, damaged)
    for weights in damaged.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:100])
    error, *_ = failed_start(damaged, tmp_path)
    assert "stage 'thinker'" in error
    assert "safetensor" in error.lower() or "header" in error.lower()


@pytest.mark.full_model
def test_a_wrong_dtype(model: Path, tmp_path: Path) -> None:
    error, *_ = failed_start(model, tmp_path, "--quantization=fp8")
    assert "stage 'thinker'" in error
    assert "fp8" in error or "quantiz" in error.lower()
