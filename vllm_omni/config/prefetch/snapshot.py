# SPDX-License-Identifier: Apache-2.0
"""A repository's files, downloaded and found to be there."""

import fnmatch
import glob
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from huggingface_hub import get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP library that the hub's uses
    IncompleteSnapshotError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)
from tqdm.auto import tqdm
from vllm.logger import init_logger

from vllm_omni.config.diffusers import MODEL_INDEX
from vllm_omni.config.prefetch.files import CONFIG, DESCRIPTIONS, needed_files
from vllm_omni.config.prefetch.wanted import Checkpoint
from vllm_omni.errors import OmniConfigError

logger = init_logger(__name__)

ATTEMPTS = 3
BACKOFF_S = 1.0
"""Times the number of the attempt that failed."""
WORTH_SAYING_S = 0.5

WHOLE = frozenset({"*", "**", "./*", "**/*"})
"""Patterns of who wants all of a repository."""
MARKS = (
    CONFIG,
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    MODEL_INDEX,
)
"""A whole snapshot has one of these."""

_NO_ACCESS = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_FAILURES = (OSError, HTTPError, EntryNotFoundError, XetDownloadError, RuntimeError)
"""What a download may fail with; hf_xet raises bare RuntimeErrors."""


class IncompleteError(OSError):
    """A snapshot lacks files."""


def fetch(checkpoint: Checkpoint) -> Path:
    """Make sure that what a deployment reads of a repository is in the local cache.

    Returns:
        The snapshot's folder.

    Raises:
        OmniConfigError: It cannot be had; the message says why and what to do.
    """
    started = time.monotonic()
    folder = _snapshot(checkpoint, (), DESCRIPTIONS, progress=_NoProgress)
    if not any((folder / name).is_file() for name in (CONFIG, MODEL_INDEX)):
        raise OmniConfigError(
            f"model {checkpoint.model!r} has neither {CONFIG} nor {MODEL_INDEX}: "
            "it is no checkpoint that can be served"
        )
    needed = needed_files(
        checkpoint.model,
        _names(checkpoint, folder),
        folder,
        weights=checkpoint.weights,
        trusted=checkpoint.trusted,
    )
    if not all((folder / name).is_file() for name in (*needed.vital, *needed.others)):
        folder = _snapshot(
            checkpoint,
            [glob.escape(name) for name in needed.vital],
            [glob.escape(name) for name in needed.others],
            commit=folder.name,
        )
    if (took := time.monotonic() - started) > WORTH_SAYING_S:
        logger.info("Time spent fetching %s: %.1f s", checkpoint.model, took)
    return folder


def verify(folder: Path, patterns: Sequence[str]) -> None:
    """Check that a snapshot has a file for each pattern; links to nothing do not count.

    Raises:
        IncompleteError: It has not; the message names what is missing.
    """
    if not folder.is_dir():
        raise IncompleteError(f"there is no folder {folder}")
    names = _files(folder)
    missing = [pattern for pattern in patterns if not _matching(names, pattern)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise IncompleteError(f"{folder} has no {', '.join(missing[:3])}{more}")
    if WHOLE.intersection(patterns) and not any((folder / mark).is_file() for mark in MARKS):
        raise IncompleteError(f"{folder} has none of {', '.join(MARKS)}")


def _matching(names: list[str], pattern: str) -> list[str]:
    return names if pattern in WHOLE else fnmatch.filter(names, pattern)


def _files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _names(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """All files of the repository; of a cache from before the hub's library noted them, its own."""
    try:
        tree = get_cached_repo_tree(
            checkpoint.model, revision=folder.name, cache_dir=checkpoint.cache_dir
        )
    except CachedRepoTreeNotFoundError:
        return _files(folder)
    return [file.path for file in tree]


class _NoProgress(tqdm):
    """For what takes no time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _snapshot(
    checkpoint: Checkpoint,
    vital: Sequence[str],
    others: Sequence[str],
    *,
    commit: str | None = None,
    progress: type[tqdm] | None = None,
) -> Path:
    """Download files that match, trying again where that may help."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            folder = _download(checkpoint, [*vital, *others], commit, progress)
            if vital:
                verify(folder, vital)
            return folder
        except HFValidationError as error:
            raise OmniConfigError(
                f"model {checkpoint.model!r} is neither a folder nor a name on the hub: {error}"
            ) from error
        except _FAILURES as error:
            if (final := _final(checkpoint, error)) is not None:
                raise OmniConfigError(final) from error
            if attempt == ATTEMPTS:
                raise OmniConfigError(
                    f"model {checkpoint.model!r} could not be fetched in {ATTEMPTS} attempts: "
                    f"{_line(error)}; check the network (HF_ENDPOINT, proxies) and the space on "
                    f"the disk, or {_by_hand(checkpoint)}"
                ) from error
            logger.warning(
                "Fetching %s failed, attempt %d of %d: %s",
                checkpoint.model,
                attempt,
                ATTEMPTS,
                _line(error),
            )
            time.sleep(BACKOFF_S * attempt)
    raise AssertionError("unreachable")


def _download(
    checkpoint: Checkpoint,
    patterns: list[str],
    commit: str | None,
    progress: type[tqdm] | None,
) -> Path:
    try:
        return Path(
            snapshot_download(
                checkpoint.model,
                revision=commit or checkpoint.revision,
                cache_dir=checkpoint.cache_dir,
                token=checkpoint.token,
                allow_patterns=patterns,
                tqdm_class=progress,
                local_files_only=is_offline_mode(),
            )
        )
    except IncompleteSnapshotError as error:
        if not is_offline_mode():
            raise
        # Filled by something that left out what it did not read: `verify` decides.
        return Path(error.snapshot_path)


def _final(checkpoint: Checkpoint, error: BaseException) -> str | None:
    """What to tell the user if there is no use in trying again."""
    model, cause = checkpoint.model, _cause(error)
    if is_offline_mode() or isinstance(cause, OfflineModeIsEnabled):
        return (
            f"model {model!r} is not complete in the local cache, and HF_HUB_OFFLINE is set: "
            f"{_line(error)}; unset it, or {_by_hand(checkpoint)}"
        )
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    if isinstance(cause, GatedRepoError | DisabledRepoError) or (
        status in _NO_ACCESS and not isinstance(cause, RepositoryNotFoundError)
    ):
        return (
            f"model {model!r}: the hub gives no access to it ({_line(cause)}); accept its terms "
            "on its page and set HF_TOKEN to a token of that account"
        )
    if isinstance(cause, RepositoryNotFoundError):
        return (
            f"model {model!r} is neither a folder nor a model on the hub, or it is a private one; "
            "check the name, or set HF_TOKEN"
        )
    if isinstance(cause, RevisionNotFoundError):
        return f"model {model!r}: the hub has no revision {checkpoint.revision!r} of it"
    if isinstance(cause, RemoteEntryNotFoundError) or status == HTTPStatus.NOT_FOUND:
        return f"model {model!r}: the hub lacks a file of it ({_line(cause)})"
    return None


def _cause(error: BaseException) -> BaseException:
    """What the hub's library wraps: that it asked the cache is seldom the reason."""
    while isinstance(error, EntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _by_hand(checkpoint: Checkpoint) -> str:
    revision = f" --revision {checkpoint.revision}" if checkpoint.revision else ""
    cache = f" --cache-dir {checkpoint.cache_dir}" if checkpoint.cache_dir else ""
    return f"run `hf download {checkpoint.model}{revision}{cache}` where there is a network"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
