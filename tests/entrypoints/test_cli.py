# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, what it returns, what it leaves behind."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import vllm_omni
from tests.entrypoints.command_lines import CommandLines
from tests.entrypoints.conftest import serve_command, serve_environment
from tests.processes import command_line, family
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.testing.server import free_port

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

MAIN = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main"]


def run(*args: str, command: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [*(command or MAIN), *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=serve_environment(),
    )


@pytest.fixture(scope="module")
def lines() -> Iterator[CommandLines]:
    """For command lines that import vLLM, which takes most of their time."""
    with CommandLines(serve_environment()) as it:
        yield it


def assert_one_line(result: subprocess.CompletedProcess[str], code: int, *says: str) -> None:
    """An error is one line on stderr after the log, without a traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("vllm-omni: error: "), result.stderr
    for text in says:
        assert text in line


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_the_commands(flag: str) -> None:
    result = run(flag)
    assert result.returncode == 0
    assert "serve" in result.stdout and "bench" in result.stdout


def test_version() -> None:
    assert run("--version").stdout.strip() == vllm_omni.__version__


def test_vllm_delegates_here() -> None:
    vllm = [sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()"]
    assert run("--version", "--omni", command=vllm).stdout.strip().endswith(vllm_omni.__version__)


def test_serve_help_has_vllms_flags_and_ours(lines: CommandLines) -> None:
    shown = lines.run("serve", "--omni", "--help=all").stderr
    for flag in ("--max-model-len", "--api-key", "--deploy-config", "--max-body-bytes"):
        assert flag in shown


def test_bench_is_vllms(lines: CommandLines) -> None:
    result = lines.run("bench", "serve", "--omni", "--help=all")
    assert result.returncode == 0
    assert "--num-prompts" in result.stderr


def test_other_commands_have_no_omni_form() -> None:
    assert_one_line(run("collect-env", "--omni"), 2, "serve, bench")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a command line sets for its process is set for this one."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")


def test_other_commands_are_vllms(in_process: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["collect-env", "--help"])
    assert ended.value.code == 0
    assert "collecting environment" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "says"), [("srve", "'serve'"), ("xyz", "--help")])
def test_unknown_command(command: str, says: str) -> None:
    assert_one_line(run(command, "model"), 2, command, says)


def test_unknown_option_of_a_command(in_process: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "model", "--omni", "--deploy-confg", "x.yaml"])
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "--deploy-confg; did you mean --deploy-config?" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_importing(number: int, tmp_path: Path) -> None:
    """Nothing has been started: it ends at once, without a word."""
    log = tmp_path / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*MAIN, "serve", "/nowhere", "--omni"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=serve_environment(),
        )
        try:
            caught = psutil.Process(process.pid)
            while process.poll() is None and not handles_signals(caught):
                time.sleep(0.005)
            process.send_signal(number)
            assert process.wait(60) == 128 + number, log.read_text()
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


def handles_signals(process: psutil.Process) -> bool:
    """Whether a process has taken SIGTERM, and SIGINT before it, into its own hands."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if "SigCgt" in line).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_unknown_option() -> None:
    assert_one_line(run("--frobnicate"), 2, "--frobnicate")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--deploy-config", "/nowhere.yaml"), "nowhere.yaml"),
        (("--stage-overrides", '{"talker": {"max_num_seq": 1}}'), "max_num_seqs"),
        (("--stage-overrides", "{"), "stage-overrides"),
        (("--api-server-count", "2"), "--api-server-count"),
        (("--headless",), "--headless"),
        (("--root-path", "omni"), "--root-path"),
        (("--root-path", "/omni/"), "--root-path"),
        (("--enable-auto-tool-choice",), "--tool-call-parser"),
    ],
)
def test_configuration_errors(
    lines: CommandLines, checkpoint: Path, flags: tuple[str, ...], says: str
) -> None:
    assert_one_line(lines.run("serve", str(checkpoint), "--omni", *flags), 2, says)


def test_model_without_a_pipeline(lines: CommandLines, tmp_path: Path) -> None:
    config = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    (tmp_path / "config.json").write_text(config)
    assert_one_line(lines.run("serve", str(tmp_path), "--omni"), 2, "Llama")


def test_taken_port(lines: CommandLines, checkpoint: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        flags = ("--omni", "--host", "127.0.0.1", "--port", port)
        result = lines.run("serve", str(checkpoint), *flags)
    assert_one_line(result, 1, port, "in use")


@pytest.mark.full_model  # as test_too_little_memory of tests/dfx/reliability
def test_stage_that_does_not_start(lines: CommandLines, checkpoint: Path) -> None:
    port = free_port()
    kv_cache = ("--kv-cache-memory-bytes", "1")
    command = serve_command(checkpoint, port, *kv_cache)
    _, _, _, *args = command
    result = lines.run(*args)  # the engine core prints its own log and traceback
    assert result.returncode == 1
    told = [line for line in result.stderr.splitlines() if line.startswith("vllm-omni: error:")]
    assert len(told) == 1 and "thinker" in told[0]


@pytest.mark.full_model  # tests/dfx/reliability/test_start.py does it with a fork
def test_interrupted_while_starting(checkpoint: Path, tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("w+") as log:
        process = subprocess.Popen(
            serve_command(checkpoint, free_port()),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=serve_environment(),
        )
        children: list[psutil.Process] = []
        while process.poll() is None and not any(
            "OmniForkServer" in command_line(child) for child in children
        ):
            time.sleep(0.05)  # before that it only imports
            children = family(process.pid)[1:]
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(60)
        finally:
            process.kill()
        log.seek(0)
        assert code == 0, log.read()[-4000:]
    # The fork server looks for its parent's end once it has imported what it preloads.
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
