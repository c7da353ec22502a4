# SPDX-License-Identifier: Apache-2.0
"""The script of nightly measurements serves, measures, stops, and ends as the measurement did."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ci.pipelines import FOLDER
from vllm_omni.testing.server import free_port

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.cpu,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]

VLLM = """#!{python}
import http.server, os, sys, pathlib

command, *words = sys.argv[1:]
if command == "bench":
    pathlib.Path("bench").write_text(" ".join(words))
    sys.exit(int(os.environ["BENCH_ENDS"]))
if os.environ["SERVES"] == "no":
    sys.exit(5)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

pathlib.Path("server").write_text(str(os.getpid()))
port = int(words[words.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def run(folder: Path, *, serves: bool = True, bench_ends: int = 0) -> int:
    """The script's exit code, with a `vllm` that only pretends."""
    vllm = folder / "vllm"
    vllm.write_text(VLLM.format(python=sys.executable))
    vllm.chmod(0o755)
    env = {
        **os.environ,
        "VLLM": str(vllm),
        "PORT": str(free_port()),
        "BENCHMARK_DIR": "figures/here",
        "SERVES": "yes" if serves else "no",
        "BENCH_ENDS": str(bench_ends),
    }
    script = FOLDER / "scripts" / "bench_server.sh"
    command = [str(script), "some/model", "--num-prompts", "4"]
    return subprocess.run(command, cwd=folder, env=env, timeout=60, check=False).returncode


@pytest.mark.parametrize("code", [0, 3])
def test_the_measurements_exit_code_is_the_scripts(tmp_path: Path, code: int) -> None:
    assert run(tmp_path, bench_ends=code) == code
    words = (tmp_path / "bench").read_text()
    assert words.startswith("serve --omni --base-url http://127.0.0.1:")
    assert words.endswith(" --result-dir figures/here --num-prompts 4")
    assert "--model some/model" in words and (tmp_path / "figures" / "here").is_dir()
    server = int((tmp_path / "server").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_a_server_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path, serves=False) == 1
    assert not (tmp_path / "bench").exists()
