# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/compare.py` on this CPU, with tiny checkpoints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full_model, pytest.mark.cpu, pytest.mark.slow]  # two servers each

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"
RATIO = r"requests per second at 2 \[x\] +([0-9.e+]+)"


@pytest.mark.parametrize("kind", ["images", "chat", "speech"])
def test_ratios_are_printed(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_OMNI_BENCH_DIR", str(tmp_path))
    command = [sys.executable, str(SCRIPT), kind, "--num-prompts", "2", "--concurrency", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert float(re.findall(RATIO, run.stdout)[0]) > 0
    if kind != "images":
        assert re.search(r"sound made at 2 \[x\] +1 ", run.stdout), "lengths are not the same"
