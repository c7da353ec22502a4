# SPDX-License-Identifier: Apache-2.0
"""One process of a node at a time fetches a model.

The lock is advisory: what the hub's library does without it is right, only done several times. So
where no lock can be had, a warning has to do. `filelock` falls back to a second kind of lock for
ENOSYS alone and takes EACCES for "held by another", hence not for what file systems of clusters
answer.
"""

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vllm.logger import init_logger

from vllm_omni.errors import OmniConfigError

logger = init_logger(__name__)

FOLDER = "vllm-omni-weight-prefetch"
LAST_RESORT = Path("/tmp/vllm-omni-weight-prefetch-locks")
NO_FLOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES, errno.EINVAL})
"""What a file system answers that has no `flock`, or not for this user."""
TIMEOUT_S = 300.0
POLL_S = 0.5

Check = Callable[[], None]


@contextmanager
def node_lock(
    model: str, check: Check, *, timeout: float = TIMEOUT_S, poll: float = POLL_S
) -> Iterator[None]:
    """Hold the node's lock of a model, or go on without it if it cannot be had.

    Args:
        model: Name on the hub.
        check: Called while waiting; what it raises ends the wait.
        timeout: Seconds to wait for a lock whose holder may be dead: a folder stays if its maker is
            killed. A `flock` ends with its holder and is waited for.
        poll: Seconds between two tries.

    Raises:
        OmniConfigError: The lock file cannot be made.
    """
    folder = lock_folder()
    if folder is None:
        logger.warning("Model %s is fetched without a lock: no folder for it is writable", model)
        yield
        return
    path = folder / (model.replace("/", "__") + ".lock")
    descriptor = _flock(path, model, check, poll)
    if descriptor is None:
        with _folder_lock(path.with_suffix(".lock.d"), model, check, timeout, poll):
            yield
        return
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def vllm_lock(
    model: str,
    cache_dir: str | None,
    check: Check,
    *,
    timeout: float = TIMEOUT_S,
    poll: float = POLL_S,
) -> Iterator[None]:
    """Hold the lock that vLLM itself downloads weights under, or go on without it.

    It cannot tell "held" from "not for this user", so the wait is bounded. See `node_lock`.
    """
    from vllm.model_executor.model_loader.weight_utils import get_lock

    def cancelled() -> bool:
        check()
        return False

    with ExitStack() as held:
        try:
            lock = get_lock(model, cache_dir)
            lock.acquire(timeout=timeout, poll_interval=poll, cancel_check=cancelled)
            held.callback(lock.release)
        except OSError as error:  # filelock's Timeout is one
            logger.warning("Model %s is fetched without vLLM's lock of it: %s", model, error)
        yield


def lock_folder() -> Path | None:
    """The first folder that can be written to; None if there is none."""
    for folder in _candidates():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("HF_HOME"):
        yield Path(home).expanduser() / "locks" / FOLDER
    if cache := os.environ.get("XDG_CACHE_HOME"):
        yield Path(cache).expanduser() / "huggingface" / "locks" / FOLDER
    yield Path(os.path.expanduser("~/.cache/huggingface/locks")) / FOLDER
    yield LAST_RESORT


def _flock(path: Path, model: str, check: Check, poll: float) -> int | None:
    """A descriptor that holds the lock until it is closed; None if there is no such lock here.

    Raises:
        OmniConfigError: The lock file cannot be made, for another reason.
    """
    with ExitStack() as undo:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            undo.callback(os.close, descriptor)
            said = False
            while not _try_flock(descriptor):
                if not said:
                    logger.info("Waiting for another process that fetches %s (%s)", model, path)
                    said = True
                check()
                time.sleep(poll)
        except OSError as error:
            if error.errno in NO_FLOCK:
                return None
            raise OmniConfigError(
                f"model {model!r}: the lock {path} cannot be made ({error.strerror}); "
                "set HF_HOME to a folder that works"
            ) from error
        undo.pop_all()
        return descriptor


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _folder_lock(
    path: Path, model: str, check: Check, timeout: float, poll: float
) -> Iterator[None]:
    """Hold a lock that is a folder: making one is atomic everywhere."""
    deadline = time.monotonic() + timeout
    while not _try_mkdir(path):
        if time.monotonic() >= deadline:
            logger.warning(
                "Model %s is fetched without a lock: another process has held %s for %g s. If "
                "there is none, remove that folder",
                model,
                path,
                timeout,
            )
            yield
            return
        check()
        time.sleep(poll)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):  # removed by someone who read the warning
            path.rmdir()


def _try_mkdir(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True
