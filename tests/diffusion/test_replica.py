# SPDX-License-Identifier: Apache-2.0
"""The life of a replica's process: start, stream, abort, limits, death, shutdown."""

import asyncio
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError

from tests.diffusion.codecs import CODEBOOK
from vllm_omni.config.plan import DiffusionStageConfig
from vllm_omni.connectors.base import OmniConnector, make_key
from vllm_omni.connectors.factory import create_connector
from vllm_omni.connectors.segments import new_deployment_id, sweep
from vllm_omni.diffusion.client import DiffusionReplica
from vllm_omni.diffusion.launch import DiffusionLaunch, StartingDiffusionReplica
from vllm_omni.diffusion.messages import ToWorker
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.diffusion.weights import checkpoint_config, load_module
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy, Windower
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import ProgramInput
from vllm_omni.outputs import ProgramOutput
from vllm_omni.start_report import no_check
from vllm_omni.testing import tiny

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

QWEN3 = "vllm_omni.diffusion.programs.code2wav:qwen3_omni"
PROBE = "tests.diffusion.probe_program:probe"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen3_omni_moe", tmp_path_factory.mktemp("tiny") / "qwen3"))


@pytest.fixture
def deployment() -> Iterator[str]:
    deployment_id = new_deployment_id()
    yield deployment_id
    assert sweep(deployment_id) == 0, "segments were left in /dev/shm"


@pytest.fixture
def connector(deployment: str) -> Iterator[OmniConnector]:
    connector = create_connector("SharedMemoryConnector", {}, deployment)
    yield connector
    connector.close()


class SlowToReturn(DiffusionReplica):
    """Its sends return late, so that the answers overtake them."""

    async def _send(self, message: ToWorker) -> None:
        await super()._send(message)
        await asyncio.sleep(0.3)


def begin(
    program: str, model: str, deployment: str, max_requests: int = 256
) -> StartingDiffusionReplica:
    launch = DiffusionLaunch(
        program=program,
        settings=DiffusionStageConfig(model=model, device="cpu"),
        stage="code2wav",
        source="talker",
        deployment_id=deployment,
        init_timeout=120,
        max_requests=max_requests,
    )
    return launch.begin()


def launch(program: str, model: str, deployment: str, max_requests: int = 256) -> DiffusionReplica:
    return begin(program, model, deployment, max_requests).ready()


@pytest.fixture
def probe(deployment: str) -> Iterator[DiffusionReplica]:
    replica = launch(PROBE, "", deployment, max_requests=3)
    yield replica
    replica.shutdown()


@pytest.fixture
def own_temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that only this test uses; short, as socket paths must be."""
    multiprocessing.util.get_temp_dir()  # the fork server's own, for the whole process
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def socket_folders(temp: Path) -> list[Path]:
    return list(temp.glob("vllm-omni-*"))


async def until_ended(
    replica: DiffusionReplica, *request_ids: str
) -> dict[str, list[ProgramOutput]]:
    made: dict[str, list[ProgramOutput]] = {request_id: [] for request_id in request_ids}
    missing = set(request_ids)
    while missing:
        for output in await asyncio.wait_for(replica.outputs(), 60):
            assert isinstance(output, ProgramOutput)
            made[output.request_id].append(output)
            if output.finished:
                missing.discard(output.request_id)
    return made


async def test_streams_equal_the_reference(
    checkpoint: str, deployment: str, connector: OmniConnector, own_temp: Path
) -> None:
    replica = launch(QWEN3, checkpoint, deployment)
    assert socket_folders(own_temp)
    try:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
            Qwen3OmniMoeCode2Wav,
        )

        context = LoadContext(checkpoint, torch.device("cpu"))
        config = checkpoint_config(context).code2wav_config
        reference = load_module(context, Qwen3OmniMoeCode2Wav, config, "code2wav.", None)
        generator = torch.Generator().manual_seed(0)
        codes = {
            f"r{i}": torch.randint(
                min(CODEBOOK, config.codebook_size),
                (frames, config.num_quantizers),
                generator=generator,
                dtype=torch.int32,
            )
            for i, frames in enumerate((7, 33, 60))
        }
        windowers = {name: Windower(ChunkPolicy(4, 25, 25)) for name in codes}
        reader = asyncio.create_task(until_ended(replica, *codes))
        for start in range(0, 60, 5):
            batch = []
            for name, rows in codes.items():
                if start >= len(rows):
                    continue
                piece = rows[start : start + 5]
                put = connector.put(
                    "talker", "code2wav", make_key(name, f"talker.{start}"), {"codes": piece}
                )
                assert put.handle is not None
                final = start + 5 >= len(rows)
                batch.append(
                    (
                        name,
                        ProgramInput(
                            spans=[RowSpan(start, len(piece), put.handle)],
                            windows=windowers[name].push(len(piece), final),
                            final=final,
                        ),
                    )
                )
            if start == 0:
                for name, first in batch:
                    await replica.submit(name, first, None)
                assert replica.load == 3
            else:
                await replica.update(batch)
        made = await reader
        assert replica.load == 0
        for name, outputs in made.items():
            assert all(output.error is None for output in outputs)
            assert len(outputs) > 1
            pieces = [
                connector.get("code2wav", "client", output.payload.key, output.payload)["audio"]
                for output in outputs
                if output.payload is not None
            ]
            expected = reference(codes[name].T[None].long())[0, 0]
            torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-5, rtol=0)
    finally:
        replica.shutdown()
    assert not socket_folders(own_temp)


async def test_errors_limits_and_aborts(
    probe: DiffusionReplica, deployment: str, connector: OmniConnector
) -> None:
    def start(**options: object) -> ProgramInput:
        return ProgramInput(options=options)

    await probe.submit("client-error", start(fail="client"), None)
    await probe.submit("server-error", start(fail="server"), None)
    made = await until_ended(probe, "client-error", "server-error")
    (refused,), (failed,) = made["client-error"], made["server-error"]
    assert refused.error is not None and failed.error is not None
    assert (refused.error.message, refused.error.status_code) == ("too loud", 422)
    assert refused.error.error_type == "LoudnessError"
    assert failed.error.message == "probe failed: ZeroDivisionError"
    assert failed.error.status_code is None

    for name in ("a", "b", "c"):
        await probe.submit(name, start(), None)
    await probe.submit("d", start(), None)
    (busy,) = (await until_ended(probe, "d"))["d"]
    assert busy.error is not None and "3 requests are running" in busy.error.message
    assert (busy.error.status_code, busy.error.error_type) == (429, "RateLimitError")
    with pytest.raises(ValueError, match="already running"):
        await probe.submit("a", start(), None)
    with pytest.raises(TypeError, match="takes a ProgramInput"):
        await probe.submit("e", "no input", None)
    with pytest.raises(TypeError, match="parameters of a program"):
        await probe.submit("e", start(), 3)
    assert probe.load == 3

    await probe.abort(["a", "b", "unknown"])
    await probe.update([("a", ProgramInput(final=True)), ("c", ProgramInput(final=True))])
    made = await until_ended(probe, "c")
    assert [output.finished for output in made["c"]] == [True]
    assert probe.load == 0
    # An input for a request that has ended is freed.
    put = connector.put("talker", "code2wav", make_key("a", "late.0"), {"x": torch.zeros(99999)})
    assert put.handle is not None
    late = ProgramInput(spans=[RowSpan(0, 99999, put.handle)])
    await probe.update([("a", late)])
    # A message that cannot be read fails its request only.
    await probe.submit("gone", ProgramInput(spans=[RowSpan(0, 99999, put.handle)]), None)
    (gone,) = (await until_ended(probe, "gone"))["gone"]
    assert gone.error is not None and "input is gone" in gone.error.message
    await probe.check_health()


async def test_a_killed_process_is_noticed(probe: DiffusionReplica) -> None:
    await probe.submit("a", ProgramInput(), None)
    waiting = asyncio.create_task(probe.outputs())
    await asyncio.sleep(0.05)
    os.kill(probe.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="exit code -9"):
        await asyncio.wait_for(waiting, 10)
    with pytest.raises(EngineDeadError):
        await probe.check_health()
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            await probe.submit("b", ProgramInput(), None)
    assert probe.load == 1
    await probe.abort(["a"])
    assert probe.load == 0


async def test_an_answer_may_overtake_its_request(deployment: str) -> None:
    starting = begin(PROBE, "", deployment)
    starting.process.wait_until_ready(120, no_check)
    replica = SlowToReturn(starting.process, starting.config, starting.capacity)
    try:
        ended = asyncio.create_task(until_ended(replica, "a"))
        await replica.submit("a", ProgramInput(options={"fail": "client"}), None)
        (refused,) = (await asyncio.wait_for(ended, 10))["a"]
        assert refused.error is not None and refused.error.message == "too loud"
        assert replica.load == 0
    finally:
        replica.shutdown()


async def test_shutdown_is_quick_and_idempotent_in_any_thread(probe: DiffusionReplica) -> None:
    await probe.submit("a", ProgramInput(), None)
    started = time.monotonic()
    await asyncio.to_thread(probe.shutdown)
    probe.shutdown()
    assert time.monotonic() - started < 5
    with pytest.raises(EngineDeadError):
        await probe.outputs()
    assert not is_running(probe.pid)


async def test_a_cancelled_wait_loses_nothing(probe: DiffusionReplica) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(probe.outputs(), 0.05)
    await probe.submit("a", ProgramInput(final=True, options={"parrot": 3}), None, priority=-2)
    made = await until_ended(probe, "a")
    assert [output.meta["count"] for output in made["a"]] == [0, 1, 2]
    assert [output.meta["priority"] for output in made["a"]] == [-2] * 3


def test_a_process_busy_for_too_long_is_killed(probe: DiffusionReplica) -> None:
    asyncio.run(probe.submit("a", ProgramInput(options={"sleep": 60}), None))
    time.sleep(0.3)
    started = time.monotonic()
    probe.shutdown(0.5)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("program", "model", "error", "message"),
    [
        ("no.such.module:x", "", OmniConfigError, "no.such.module"),
        ("tests.diffusion.probe_program:nothing", "", OmniConfigError, "no program 'nothing'"),
        ("tests.diffusion.probe_program:unloadable", "", RuntimeError, "KeyError: 'weights'"),
        ("tests.diffusion.probe_program:suicidal", "", RuntimeError, "exit code 3"),
        (QWEN3, "/nonexistent", RuntimeError, "nonexistent"),
    ],
)
def test_a_failed_start_says_why(
    deployment: str,
    own_temp: Path,
    program: str,
    model: str,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        launch(program, model, deployment)
    assert not socket_folders(own_temp)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_processes_end_with_a_killed_parent(tmp_path: Path, deployment: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import time
            from vllm_omni.config.plan import DiffusionStageConfig
            from vllm_omni.diffusion.launch import DiffusionLaunch
            if __name__ == "__main__":
                replica = DiffusionLaunch(
                    program="{PROBE}",
                    settings=DiffusionStageConfig(model="", device="cpu"),
                    stage="probe", source="", deployment_id="{deployment}", init_timeout=120,
                ).begin().ready()
                print(replica.pid, flush=True)
                time.sleep(600)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
    assert not socket_folders(tmp_path)
