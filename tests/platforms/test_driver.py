# SPDX-License-Identifier: Apache-2.0
"""Whether a process has initialized CUDA's driver. The driver here is a stand-in: the real one
needs a GPU."""

import subprocess
from pathlib import Path

import pytest

from vllm_omni.platforms import driver_in_use as platform_in_use
from vllm_omni.platforms.cuda.driver import driver_in_use

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


@pytest.mark.parametrize(("answer", "used"), [(0, True), (3, False), (100, True)])
def test_it_is_asked_without_being_initialized(tmp_path: Path, answer: int, used: bool) -> None:
    source = tmp_path / "driver.c"
    source.write_text(f"int cuDeviceGetCount(int *count) {{ *count = 1; return {answer}; }}")
    library = tmp_path / "driver.so"
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    assert driver_in_use(str(library)) is used


def test_without_a_driver() -> None:
    assert not driver_in_use("libthere_is_none.so.1")
    assert not platform_in_use("cpu")
