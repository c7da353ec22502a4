# SPDX-License-Identifier: Apache-2.0
"""CUDA's MPS daemon comes and goes with a deployment. The daemon here is a stand-in: the real one
needs a GPU."""

import os
from pathlib import Path

import psutil
import pytest

from vllm_omni.config.build import build_plan
from vllm_omni.config.devices import Host
from vllm_omni.errors import OmniConfigError
from vllm_omni.platforms.cuda.mps import DAEMON, CudaMps

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

STAND_IN = """#!/bin/sh
[ "$1" = -f ] || exit 2
echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 600
"""


def put_daemon(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / DAEMON
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_it_runs_until_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_daemon(tmp_path, STAND_IN, monkeypatch)
    mps = CudaMps()
    pipe = Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"])
    pid = int((pipe / "control").read_text())
    assert psutil.pid_exists(pid)
    mps.close()
    mps.close()
    assert not psutil.pid_exists(pid)
    assert not pipe.parent.exists()


def test_a_machine_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OmniConfigError, match=f"cuda_mps: {DAEMON} is not on PATH"):
        CudaMps()


def test_one_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_daemon(tmp_path, "#!/bin/sh\nexit 1\n", monkeypatch)
    before = set(Path("/tmp").glob("vllm-omni-mps-*"))
    with pytest.raises(OmniConfigError, match="did not start"):
        CudaMps()
    assert set(Path("/tmp").glob("vllm-omni-mps-*")) == before


def test_the_key_is_for_cuda(qwen3_tts_checkpoint: Path) -> None:
    config = {"base_config": "qwen3_tts.yaml", "cuda_mps": True}
    plan = build_plan(str(qwen3_tts_checkpoint), deploy_config=config, host=Host("cuda", 1))
    assert plan.cuda_mps
    with pytest.raises(OmniConfigError, match="cuda_mps = True: the stages run on cpu"):
        build_plan(str(qwen3_tts_checkpoint), deploy_config=config, host=Host("cpu", 0))


@pytest.fixture(scope="module")
def qwen3_tts_checkpoint(tiny_checkpoint) -> Path:
    return tiny_checkpoint("qwen3_tts_custom_voice")
