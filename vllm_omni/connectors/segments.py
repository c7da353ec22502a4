# SPDX-License-Identifier: Apache-2.0
"""Named files in /dev/shm: what they are called, and who may remove them.

A segment is ``vllm-omni-<deployment>-<hash of request>-<hash of key>``: a client chooses
its request id, so only hashes of it reach the file system, and equality of hashes (not of prefixes)
decides what belongs to a request.

Beside the segments lies ``vllm-omni-<deployment>-lock``. Every process of the deployment holds a
shared `flock` on it, which the kernel drops at any kind of exit. So "is this deployment alive?" is
"can I lock its file exclusively?", with no pid that may be reused or mean another process in
another container that shares /dev/shm.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from vllm_omni.errors import OmniConfigError

DEFAULT_DIRECTORY = Path("/dev/shm")
DEPLOYMENT_ID_VARIABLE = "VLLM_OMNI_DEPLOYMENT_ID"
_PREFIX = "vllm-omni-"
_DEPLOYMENT_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SEGMENT = re.compile(
    rf"{_PREFIX}(?P<deployment>{_DEPLOYMENT_ID.pattern})"
    r"-(?P<request>[0-9a-f]{32})-(?P<payload>[0-9a-f]{32})"
)
_LOCK = re.compile(rf"{_PREFIX}(?P<deployment>{_DEPLOYMENT_ID.pattern})-lock")


def new_deployment_id() -> str:
    """A fresh id. The process that starts a deployment makes one and hands it to its children."""
    return f"{os.getpid()}-{secrets.token_hex(6)}"


def resolve_deployment_id(deployment_id: str | None) -> str:
    """The given id, else that of the environment, checked.

    Raises:
        OmniConfigError: There is none, or it could not be part of a file name.
    """
    found = deployment_id or os.environ.get(DEPLOYMENT_ID_VARIABLE)
    if not found:
        raise OmniConfigError(
            f"a connector needs a deployment id: pass deployment_id or set {DEPLOYMENT_ID_VARIABLE}"
        )
    if not _DEPLOYMENT_ID.fullmatch(found):
        raise OmniConfigError(
            f"deployment id {found!r}: use 1 to 64 letters, digits, '_', '.' and '-'"
        )
    return found


def segment_name(deployment_id: str, request_id: str, key: str) -> str:
    """File name of one payload."""
    return f"{request_prefix(deployment_id, request_id)}{_hash(key)}"


def request_prefix(deployment_id: str, request_id: str) -> str:
    """What the names of all segments of a request, and of no other, start with."""
    return f"{_PREFIX}{deployment_id}-{_hash(request_id)}-"


def sweep(deployment_id: str, directory: Path = DEFAULT_DIRECTORY) -> int:
    """Remove all segments of a deployment whose processes have ended. Returns how many.

    For the parent, after its children are gone. It does not ask whether one is still alive.
    """
    names = [name for name, owner in _segments(directory) if owner == deployment_id]
    removed = remove(directory, names)
    _remove_lock_if_dead(directory, deployment_id)
    return removed


def raze(deployment_id: str, directory: Path = DEFAULT_DIRECTORY) -> int:
    """Remove all that a deployment has, its lock included, though orphans of it may still live.

    For an orphan about to be killed: what its server left is nobody's. Returns how many.
    """
    names = [name for name, owner in _segments(directory) if owner == deployment_id]
    return remove(directory, [*names, _lock_path(directory, deployment_id).name])


def sweep_stale(directory: Path = DEFAULT_DIRECTORY) -> int:
    """Remove the segments of every deployment that has no live process. Returns how many.

    Cheap, safe at any time and from any process; meant for start-up. What belongs to other users is
    left alone.
    """
    by_deployment: dict[str, list[str]] = {}
    for name, owner in _segments(directory):
        by_deployment.setdefault(owner, []).append(name)
    for name in _names(directory):
        if lock := _LOCK.fullmatch(name):
            by_deployment.setdefault(lock["deployment"], [])
    return sum(
        remove(directory, names)
        for deployment_id, names in by_deployment.items()
        if _remove_lock_if_dead(directory, deployment_id)
    )


def remove_request(directory: Path, deployment_id: str, request_id: str) -> list[str]:
    """Remove all segments of a request, whoever wrote them. Returns the names that were there."""
    prefix = request_prefix(deployment_id, request_id)
    names = [name for name in _names(directory) if name.startswith(prefix)]
    return [name for name in names if remove(directory, [name])]


def remove(directory: Path, names: list[str]) -> int:
    """Unlink files. Returns how many were still there and ours to remove."""
    removed = 0
    for name in names:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(directory / name)
            removed += 1
    return removed


def existing(directory: Path, names: set[str]) -> set[str]:
    """Those of `names` that are still there."""
    return names.intersection(_names(directory))


class DeploymentLock:
    """Says, for as long as it is held, that the deployment has a live process."""

    def __init__(self, deployment_id: str, directory: Path) -> None:
        self._deployment_id = deployment_id
        self._directory = directory
        self._path = _lock_path(directory, deployment_id)
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Hold the lock, shared. Nothing happens if this object holds it already."""
        while self._descriptor is None:
            descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(descriptor, self._path):
                self._descriptor = descriptor
            else:  # A sweeper removed the file between our open and our lock.
                os.close(descriptor)

    def drop(self) -> None:
        """Close the descriptor without unlocking: what a forked child does with its parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """Let go; the deployment's last process removes what the others left."""
        if self._descriptor is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            names = [n for n, owner in _segments(self._directory) if owner == self._deployment_id]
            remove(self._directory, [*names, self._path.name])
        self.drop()


def _remove_lock_if_dead(directory: Path, deployment_id: str) -> bool:
    """Whether no process of the deployment lives. If so, its lock file is removed."""
    path = _lock_path(directory, deployment_id)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True  # The lock comes before the first segment, so its owner was swept.
    except PermissionError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if _is_at(descriptor, path):
            remove(directory, [path.name])
        return True
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one that the path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _lock_path(directory: Path, deployment_id: str) -> Path:
    return directory / f"{_PREFIX}{deployment_id}-lock"


def _names(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(_PREFIX)]


def _segments(directory: Path) -> Iterator[tuple[str, str]]:
    """Name and deployment id of every segment in the directory."""
    for name in _names(directory):
        if match := _SEGMENT.fullmatch(name):
            yield name, match["deployment"]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
