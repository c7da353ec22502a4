# SPDX-License-Identifier: Apache-2.0
"""Make the project's virtual environment: what `make install` runs.

    python3 tools/setup_env.py [--venv .venv] [--platform cpu|cuda] [--dev]

Standard library only, so that it runs on a machine with nothing but Python and pip.

On a CPU the exact versions of requirements/*.txt are installed without resolving them again, which
is fast and the same everywhere. Two packages need care there:

* torch comes as a `+cpu` build or not at all. Where pip's own configuration offers none, PyTorch's
  CPU index is named. A CUDA build can not slip in: its version does not match the lock.
* torchvision comes as a `+cpu` build where PyTorch's CPU index can be reached. Elsewhere PyPI's
  build is installed with `tools/torchvision_shim/`, which says why that is sound.

A second run finds the stamp of the first and does nothing. After a change of the lock only what
differs is installed.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
SHIM = ROOT / "tools" / "torchvision_shim"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = ".setup-stamp.json"
LANES = 2
HIDES_BYTECODE = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
# What every server process imports. Importing it once shows that the environment works, and leaves
# bytecode for a quarter of what is installed, in place of all of it.
CHECK = """
import torch
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
import torchvision.transforms.v2.functional
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker
import vllm.model_executor.models.qwen3_omni_moe_thinker
import diffusers.pipelines.flux.pipeline_flux
"""


class SetupError(Exception):
    """Set-up cannot go on. The message says what to do."""


@dataclass
class Environment:
    """A virtual environment on disk."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = sys.version_info
        return self.path / "lib" / f"python{version.major}.{version.minor}" / "site-packages"

    def create(self) -> None:
        """Make it, unless it is there already for this version of Python."""
        if "pip" not in self.installed():
            venv.create(self.path, with_pip=True, symlinks=True, clear=False)

    def installed(self) -> dict[str, str]:
        """Version by normalized name, of what was installed to the end: pip writes INSTALLER last,
        so that a set-up cut short is taken up where it stopped."""
        found = distributions(path=[str(self.site_packages)])
        return {
            normalize(each.metadata["Name"]): each.version
            for each in found
            if each.read_text("INSTALLER")
        }

    def run(self, *arguments: str) -> str:
        """Run its Python with `arguments`. A failure raises with all that it printed."""
        command = [str(self.python), *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in HIDES_BYTECODE},
            text=True,
            check=True,
        )
        return done.stdout

    def pip_install(self, *arguments: str) -> None:
        """Install without resolving and without compiling, for most of it is never imported."""
        options = (
            "--no-deps",
            "--no-compile",
            "--force-reinstall",
            "--no-input",
            "--progress-bar=off",
        )
        self.run("-m", "pip", "--disable-pip-version-check", "install", *options, *arguments)


def normalize(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """The `name==version` lines of a lock file, as version by normalized name."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    pins = (line.partition("==") for line in lines if line)
    return {normalize(name): version for name, _, version in pins}


def missing(pins: dict[str, str], installed: dict[str, str]) -> dict[str, str]:
    """The pins that `installed` does not have. Any build of torchvision's version will do."""

    def satisfied(name: str, version: str) -> bool:
        found = installed.get(name)
        if name == "torchvision" and found is not None:
            found = found.partition("+")[0]
        return found == version

    return {name: version for name, version in pins.items() if not satisfied(name, version)}


def install_torch(environment: Environment, version: str) -> None:
    """Install torch's CPU build, from where pip is told to look or from PyTorch's CPU index."""
    pin = f"torch=={version}"
    if not version.endswith("+cpu"):
        raise SetupError(f"requirements/cpu.txt must name torch's +cpu build, not {pin}.")
    try:
        environment.pip_install(pin)
    except subprocess.CalledProcessError:
        try:
            environment.pip_install(pin, "--extra-index-url", CPU_INDEX, "--retries=1")
        except subprocess.CalledProcessError as error:
            raise SetupError(
                f"{error.stdout}\nNo CPU build of {pin} was found, neither where pip is set to "
                f"look nor at {CPU_INDEX}.\nPut its wheel in a folder and set "
                "PIP_FIND_LINKS=/that/folder. (The CUDA build is refused on purpose; with a GPU, "
                "run `make install PLATFORM=cuda`.)"
            ) from None


def install_torchvision(environment: Environment, version: str) -> None:
    """Install torchvision's CPU build, or PyPI's with the shim that makes it importable."""
    options = ("--extra-index-url", CPU_INDEX, "--retries=0", "--timeout=5")
    for file in SHIM.iterdir():
        (environment.site_packages / file.name).unlink(missing_ok=True)
    try:
        environment.pip_install(f"torchvision=={version}+cpu", *options)
    except subprocess.CalledProcessError:
        environment.pip_install(f"torchvision=={version}")
        install_shim(environment)


def install_shim(environment: Environment) -> None:
    """Copy the torchvision shim into site-packages."""
    for file in SHIM.iterdir():
        if file.is_file():
            shutil.copy(file, environment.site_packages / file.name)


def install_pins(environment: Environment, pins: dict[str, str]) -> None:
    """Install `pins`: torch and torchvision by their own rules, the rest in parallel lanes.

    pip does one package at a time, so two lanes of disjoint packages use two cores.
    """
    special = {"torch": install_torch, "torchvision": install_torchvision}
    jobs = [partial(special[name], environment, pins[name]) for name in special if name in pins]
    plain = [f"{name}=={pins[name]}" for name in pins if name not in special]
    for lane in (plain[start::LANES] for start in range(LANES)):
        if lane:
            jobs.append(partial(environment.pip_install, "--only-binary=:all:", *lane))
    in_parallel(jobs)


def in_parallel(jobs: Sequence[Callable[[], object]]) -> None:
    """Run all of `jobs`, then raise the first failure, if any."""
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def require_locked_platform() -> None:
    """The lock holds for one platform; say so rather than install something else."""
    machine = (platform.system(), platform.machine(), sys.version_info[:2])
    if machine != ("Linux", "x86_64", (3, 11)):
        raise SetupError(
            "requirements/cpu.txt is locked for Python 3.11 on Linux x86_64, this is Python "
            f"{platform.python_version()} on {machine[0]} {machine[1]}.\n"
            "Set PYTHON=/path/to/python3.11, or install without the lock: "
            f"pip install --extra-index-url {CPU_INDEX} -e '.[cpu,dev]'"
        )


def install_cpu(environment: Environment, dev: bool) -> None:
    """Install the locked versions and the project, and see that what servers import loads."""
    installed = environment.installed()
    runtime = missing(read_lock(LOCKS / "cpu.txt"), installed)
    wanted = runtime | (missing(read_lock(LOCKS / "dev.txt"), installed) if dev else {})
    if wanted:
        say(f"installing {len(wanted)} packages into {environment.path}")
        install_pins(environment, wanted)
    last = [partial(environment.pip_install, "--no-build-isolation", "--editable", str(ROOT))]
    if runtime:
        say("checking that torch, torchvision, vLLM and diffusers load")
        last.append(partial(environment.run, "-c", CHECK))
    in_parallel(last)


def install_cuda(environment: Environment, dev: bool) -> None:
    """Let pip resolve vLLM's CUDA build and all it needs."""
    extras = "cuda,dev" if dev else "cuda"
    environment.run("-m", "pip", "install", "--editable", f"{ROOT}[{extras}]")


def fingerprint(platform_name: str) -> str:
    """What an environment is made from. The same fingerprint means nothing to do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built_from = [project["build-system"], project["project"], project["tool"].get("setuptools")]
    built_from += [platform_name, str(ROOT), sys.version]
    digest = hashlib.sha256(json.dumps(built_from).encode())
    for file in sorted([*LOCKS.glob("*.txt"), *SHIM.glob("*.p*"), Path(__file__)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_current(stamp: Path, wanted: str, dev: bool) -> bool:
    """Whether the environment at `stamp` was made from `wanted`, and with `dev` if asked for."""
    try:
        made = json.loads(stamp.read_text())
    except (FileNotFoundError, ValueError):
        return False
    return made["fingerprint"] == wanted and (made["dev"] or not dev)


@contextmanager
def only_one_set_up(path: Path) -> Iterator[None]:
    """Hold the environment against a second set-up, e.g. `make demo` in another terminal."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".setup-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(message: str) -> None:
    print(f"set-up: {message}", flush=True)


def set_up(path: Path, platform_name: str, dev: bool) -> None:
    """Bring the environment at `path` up to date."""
    stamp, wanted = path / STAMP, fingerprint(platform_name)
    if is_current(stamp, wanted, dev):
        return
    if platform_name == "cpu":
        require_locked_platform()
    with only_one_set_up(path):
        if is_current(stamp, wanted, dev):
            return
        started = time.monotonic()
        stamp.unlink(missing_ok=True)
        environment = Environment(path)
        environment.create()
        install = {"cpu": install_cpu, "cuda": install_cuda}[platform_name]
        install(environment, dev)
        stamp.write_text(json.dumps({"fingerprint": wanted, "dev": dev}))
        say(f"{path} is ready ({time.monotonic() - started:.0f} s)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dev", action="store_true", help="also what tests and lint need")
    options = parser.parse_args(arguments)
    try:
        set_up(Path(os.path.abspath(options.venv)), options.platform, options.dev)
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{error.stdout}\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; run it again and it goes on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
