# SPDX-License-Identifier: Apache-2.0
"""Write the lock files in requirements/ from a resolved environment.

    .venv/bin/python tools/lock.py           # or: make lock
    .venv/bin/python tools/lock.py --check   # exit 1 when the files differ

Run it with the interpreter of an environment where the wanted versions work together. It walks the
requirements of the project's extras through the installed metadata, so a lock is complete by
construction: a requirement that is missing, or that the installed version does not satisfy, is an
error and nothing is written. `tools/setup_env.py` installs the result without resolving.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = {
    "torchaudio": "no build loads beside a CPU torch; vLLM imports it lazily and we never need it",
    "torchcodec": "no build loads beside a CPU torch; vLLM imports it lazily and we never need it",
    "triton": "1 GB; its kernels need a GPU, and vLLM warns in every process where it lies unused",
}
# `torchvision` is pinned without a local version: setup_env.py picks which of its builds to take.
ANY_BUILD = {"torchvision"}
BUILD_REQUIREMENTS = ("setuptools",)


class LockError(Exception):
    """The environment does not satisfy the project's requirements."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One installed distribution, under the name it calls itself."""

    name: str
    version: str

    def __str__(self) -> str:
        version = self.version
        if canonicalize_name(self.name) in ANY_BUILD:
            version = version.partition("+")[0]
        return f"{self.name}=={version}"


class Closure:
    """Every distribution that a set of requirements needs, at its installed version."""

    def __init__(self, excluded: Iterable[str]) -> None:
        self._excluded = frozenset(excluded)
        self._seen: set[tuple[str, str]] = set()
        self.pins: dict[str, Pin] = {}

    def add(self, requirement: Requirement, needed_by: str) -> None:
        """Pin what `requirement` names and, through it, all it needs."""
        key = canonicalize_name(requirement.name)
        if key in self._excluded:
            return
        pin = self._installed(requirement, needed_by)
        self.pins[key] = pin
        for extra in ("", *sorted(requirement.extras)):
            if (key, extra) not in self._seen:
                self._seen.add((key, extra))
                for child in _children(requirement.name, extra):
                    self.add(child, needed_by=pin.name)

    def _installed(self, requirement: Requirement, needed_by: str) -> Pin:
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            raise LockError(f"{requirement} (needed by {needed_by}) is not installed") from None
        if not requirement.specifier.contains(found.version, prereleases=True):
            raise LockError(f"{needed_by} needs {requirement}, but {found.version} is installed")
        return Pin(found.metadata["Name"], found.version)


def _children(name: str, extra: str) -> Iterator[Requirement]:
    """What `name` needs for `extra` ("" for the distribution itself) on this interpreter."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None:
            applies = not extra
        else:
            applies = marker.evaluate({"extra": extra})
            if extra:
                applies = applies and not marker.evaluate({"extra": ""})
        if applies:
            yield requirement


def _pins(requirements: Iterable[str]) -> dict[str, Pin]:
    closure = Closure(EXCLUDED)
    for requirement in requirements:
        closure.add(Requirement(requirement), needed_by="pyproject.toml")
    return closure.pins


def _render(pins: dict[str, Pin], what: str) -> str:
    lines = [
        f"# {what}: made by tools/lock.py, not by hand.",
        f"# Resolved on CPython {sys.version_info.major}.{sys.version_info.minor}, {sys.platform}.",
    ]
    if what == "Runtime, CPU":
        lines += [f"# Left out: {name} ({reason})." for name, reason in EXCLUDED.items()]
    return "\n".join([*lines, *(str(pins[key]) for key in sorted(pins))]) + "\n"


def build_locks() -> dict[Path, str]:
    """The lock files and their text, from the running interpreter's environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtime = _pins([*project["dependencies"], *extras["cpu"], *BUILD_REQUIREMENTS])
    everything = _pins([*project["dependencies"], *extras["cpu"], *extras["dev"]])
    dev = {key: pin for key, pin in everything.items() if key not in runtime}
    folder = ROOT / "requirements"
    return {
        folder / "cpu.txt": _render(runtime, "Runtime, CPU"),
        folder / "dev.txt": _render(dev, "Development, on top of cpu.txt"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    check = parser.parse_args().check
    try:
        locks = build_locks()
    except LockError as error:
        print(f"tools/lock.py: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in locks.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not check:
            path.write_text(locks[path])
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
