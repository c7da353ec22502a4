# SPDX-License-Identifier: Apache-2.0
"""Checkpoints fetched by a process of the server, before stages start (row A-81)."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.helpers.fake_hub import FakeHub, folder_files, use
from vllm_omni.config.prefetch import Checkpoint, vllm_lock
from vllm_omni.engine import prefetch as prefetch_module
from vllm_omni.engine.launcher import launch_pipeline
from vllm_omni.engine.prefetch import prefetch
from vllm_omni.errors import OmniConfigError
from vllm_omni.fork_server import ForkServer
from vllm_omni.start_report import no_check

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub, and a fork server whose processes know it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with FakeHub({"toy/one": FILES, "toy/two": FILES}).running() as fake:
        use(fake, tmp_path / "hub", monkeypatch)
        server = ForkServer()
        monkeypatch.setattr(prefetch_module, "fork_server", lambda: server)
        yield fake
        server.close()


def plan_of(monkeypatch: pytest.MonkeyPatch, *models: str) -> Any:
    wanted = tuple(Checkpoint(model=model) for model in models)
    monkeypatch.setattr(prefetch_module, "checkpoints", lambda plan: wanted)
    return SimpleNamespace()


def test_each_checkpoint_is_fetched_once(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefetch(plan_of(monkeypatch, "toy/one", "toy/two"), no_check)
    assert hub.downloads == sorted([*FILES, *FILES])
    assert len([*(tmp_path / "hub").rglob("snapshots/*/model.safetensors")]) == 2


def test_why_a_checkpoint_cannot_be_had_reaches_the_server(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OmniConfigError, match="'toy/none' is neither a folder nor a model"):
        prefetch(plan_of(monkeypatch, "toy/none"), no_check)


def test_a_signal_ends_a_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Stop(BaseException):
        pass

    def check() -> None:
        if "model.safetensors" in hub.downloads:
            raise Stop

    plan = plan_of(monkeypatch, "toy/one")
    hub.slow = "model.safetensors"
    with pytest.raises(Stop):
        prefetch(plan, check)
    server = prefetch_module.fork_server().pid
    deadline = time.monotonic() + 60
    while children := psutil.Process(server).children():
        assert time.monotonic() < deadline, children
        time.sleep(0.01)
    hub.go.set()
    prefetch(plan, no_check)
    assert [*(tmp_path / "hub").rglob("snapshots/*/model.safetensors")]


def hold(cache: str, started: Any) -> None:
    with vllm_lock("toy/one", cache, no_check):
        started.set()
        signal.pause()


def test_vllms_own_lock_is_held_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    holder = context.Process(target=hold, args=(str(tmp_path), started), daemon=True)
    holder.start()
    assert started.wait(60)
    with caplog.at_level(logging.WARNING):
        with vllm_lock("toy/one", str(tmp_path), no_check, timeout=0.03, poll=0.01):
            pass
        assert "without vLLM's lock" in caplog.text
        os.kill(holder.pid or 0, signal.SIGKILL)
        holder.join()
        caplog.clear()
        with vllm_lock("toy/one", str(tmp_path), no_check, timeout=60, poll=0.01):
            pass
        assert caplog.text == ""


def test_it_comes_before_any_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it raises ends the start."""
    from vllm_omni.engine import launcher

    def refuse(plan: Any, check: Any) -> None:
        raise OmniConfigError("not to be had")

    monkeypatch.setattr(launcher, "prepare", lambda plan: None)
    monkeypatch.setattr(launcher, "prefetch", refuse)
    plan: Any = SimpleNamespace(
        platform="cpu",
        pipeline=SimpleNamespace(name="toy"),
        deploy_source="",
        async_chunk=False,
    )
    with pytest.raises(OmniConfigError, match="not to be had"):
        launch_pipeline(plan)


SCRIPT = """
from vllm_omni.entrypoints.omni import Omni

stage = {
    "stage_id": 0,
    "devices": "cpu",
    "num_replicas": 2,
    "kv_cache_memory_bytes": 32 << 20,
    "max_model_len": 512,
}
deploy = {"pipeline": "qwen2_5_omni_thinker_only", "stages": [stage]}
with Omni(model="toy/omni", deploy_config=deploy) as omni:
    for output in omni.generate("hello", [{"max_tokens": 3}]):
        print("MADE", output.final_output_type, flush=True)
"""


@pytest.mark.full_model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_the_hub_is_served_then_offline(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    files = folder_files(tiny_checkpoint("qwen2_5_omni"))
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    for offline in ("0", "1"):
        with FakeHub({"toy/omni": files}).running() as fake:
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT],
                env={**environment, "HF_ENDPOINT": fake.url, "HF_HUB_OFFLINE": offline},
                capture_output=True,
                text=True,
                timeout=400,
            )
            assert done.returncode == 0, done.stderr
            assert "MADE" in done.stdout
            weights = fake.downloads.count("model.safetensors")
            assert weights == (1 if offline == "0" else 0)
