# SPDX-License-Identifier: Apache-2.0
"""The jobs of one server and their files, in a private folder that outlives it.

Each job is a folder with its record (`job.json`) and its video (`video.mp4`). Records are written
when a job is made and when it is over, whole or not at all, so that after any kind of end the next
server finds what was finished, and says of the rest that it failed.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
from vllm.logger import init_logger

from vllm_omni.entrypoints.openai.videos.job import (
    STOPPED,
    JobError,
    VideoJob,
    is_job_id,
    new_job_id,
)
from vllm_omni.errors import (
    FULL,
    OmniClientError,
    OmniConfigError,
    OmniError,
    OmniGenerateError,
    OverloadedError,
    StorageFullError,
)
from vllm_omni.outputs import StageMetrics

logger = init_logger(__name__)

MAX_PAGE = 100
_RECORD, _CONTENT, _PARTIAL, _LOCK = "job.json", "video.mp4", "partial.mp4", ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLimits:
    """How much is kept, and for how long.

    Attributes:
        ttl_s: Seconds that a finished or failed job is kept.
        max_bytes: Bytes of all videos together; the oldest make room for new ones.
        max_jobs: Most jobs, however small.
    """

    ttl_s: float = 86_400.0
    max_bytes: int = 16 << 30
    max_jobs: int = 10_000


class JobNotFoundError(OmniClientError):
    """There is no such job, or none of this client's."""

    def __init__(self, job_id: str, param: str = "video_id") -> None:
        shown = job_id[:60].encode("utf-8", "backslashreplace").decode()
        super().__init__(
            f"{param}: there is no video {shown!r} (any more)",
            404,
            "NotFoundError",
            param=param,
            code="video_not_found",
        )


class ContentTooLargeError(OmniClientError):
    """A video is larger than everything that may be kept."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"size: the video takes {size} bytes, more than the {limit} that this server keeps "
            "(--video-storage-max-bytes); ask for a smaller or shorter one",
            413,
            "PayloadTooLargeError",
            param="size",
        )


class VideoStore:
    """Jobs by id, newest last.

    Its small files are read and written at once, without a thread. Not for use by two threads.

    Args:
        folder: Made if need be, for this user alone. One server at a time may use it.
        limits: What is kept.
        now: Unix time, in seconds.

    Raises:
        OmniConfigError: The folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        limits: StorageLimits | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._limits = limits or StorageLimits()
        self._now = now
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise OmniConfigError(f"--video-storage-path {folder}: belongs to another user")
            folder.chmod(0o700)
            self._lock = _locked(folder / _LOCK)
        except OSError as error:
            raise OmniConfigError(f"--video-storage-path {folder}: {error.strerror}") from error
        self._jobs = self._found()
        self.sweep()

    def close(self) -> None:
        """Let go of the folder, which goes too if there is nothing in it."""
        if self._lock < 0:
            return
        for job in list(self._jobs.values()):
            if not job.is_over:
                self.fail(job.id, STOPPED)
        if not self._jobs:
            (self._folder / _LOCK).unlink(missing_ok=True)
            try:
                self._folder.rmdir()
            except OSError:
                logger.debug("%s is not empty", self._folder)
        os.close(self._lock)
        self._lock = -1

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, owner: str, model: str, prompt: str, **facts: Any) -> VideoJob:
        """A new job.

        Args:
            owner: See `VideoJob`.
            model: See `VideoJob`.
            prompt: See `VideoJob`.
            facts: Its `seconds` and `size`.

        Raises:
            OverloadedError: There are too many that are not over.
            StorageFullError: The disk is full.
            OmniGenerateError: The folder takes no more, for another reason.
        """
        self.sweep()
        while len(self._jobs) >= self._limits.max_jobs:
            if not self._evict():
                raise OverloadedError("too many videos are being made; try again later")
        job = VideoJob(
            id=new_job_id(),
            owner=owner,
            created_at=int(self._now()),
            serial=max((job.serial for job in self._jobs.values()), default=0) + 1,
            model=model,
            prompt=prompt,
            **facts,
        )
        try:
            self._path(job.id).mkdir(mode=0o700)
            self._write(job)
        except OSError as error:
            shutil.rmtree(self._path(job.id), ignore_errors=True)
            raise cannot_keep(error) from error
        self._jobs[job.id] = job
        return job

    def get(self, job_id: str, owner: str) -> VideoJob:
        """A job of this owner.

        Raises:
            JobNotFoundError: There is none.
        """
        self.sweep()
        job = self._jobs.get(job_id)
        if job is None or job.owner != owner:
            raise JobNotFoundError(job_id)
        return job

    def page(
        self,
        owner: str,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> tuple[list[VideoJob], bool]:
        """An owner's jobs, by time of creation, and whether there are more.

        Args:
            owner: Whose.
            after: Begin behind this job.
            limit: Most jobs, 1 to `MAX_PAGE`.
            order: Oldest first (`asc`) or newest first.

        Raises:
            JobNotFoundError: There is no job `after`.
        """
        self.sweep()
        jobs = [job for job in self._jobs.values() if job.owner == owner]
        if order == "desc":
            jobs.reverse()
        if after is not None:
            places = [i for i, job in enumerate(jobs) if job.id == after]
            if not places:
                raise JobNotFoundError(after, "after")
            jobs = jobs[places[0] + 1 :]
        return jobs[:limit], len(jobs) > limit

    def began(self, job_id: str, progress: int = 0) -> None:
        """A job runs, and so far of it is done. Not kept on disk."""
        self._change(job_id, status="in_progress", progress=progress)

    def finish(
        self,
        job_id: str,
        size: str,
        metrics: dict[str, float],
        stages: tuple[StageMetrics, ...] = (),
    ) -> VideoJob:
        """A job's video lies in `partial_path`: keep it, and make room for it.

        Args:
            job_id: Which.
            size: The video's, WIDTHxHEIGHT.
            metrics: See `VideoJob`.
            stages: See `VideoJob`.

        Raises:
            ContentTooLargeError: It does not fit, whatever would be removed for it.
            StorageFullError: The disk is full.
            OmniGenerateError: Its record cannot be written, for another reason.
        """
        partial = self.partial_path(job_id)
        content_bytes = partial.stat().st_size
        if content_bytes > self._limits.max_bytes:
            raise ContentTooLargeError(content_bytes, self._limits.max_bytes)
        while self._content_bytes() + content_bytes > self._limits.max_bytes and self._evict():
            pass
        os.replace(partial, self._path(job_id) / _CONTENT)
        try:
            return self._end(
                job_id,
                status="completed",
                progress=100,
                content_bytes=content_bytes,
                size=size,
                metrics=metrics,
                stages=stages,
            )
        except OSError as error:
            raise cannot_keep(error) from error

    def fail(self, job_id: str, error: JobError) -> VideoJob:
        """A job has failed; what there is of its video goes."""
        for path in (self.partial_path(job_id), self.content_path(job_id)):
            path.unlink(missing_ok=True)
        try:
            return self._end(job_id, status="failed", content_bytes=0, error=error)
        except OSError as unwritten:  # its record says that it is not over, so it fails again then
            logger.error("The end of %s cannot be kept: %s", job_id, unwritten.strerror)
            return self._jobs[job_id]

    def delete(self, job_id: str) -> None:
        """Forget a job and its files."""
        del self._jobs[job_id]
        shutil.rmtree(self._path(job_id))

    def partial_path(self, job_id: str) -> Path:
        """Where a job's video is written to."""
        return self._path(job_id) / _PARTIAL

    def content_path(self, job_id: str) -> Path:
        """Where a completed job's video lies."""
        return self._path(job_id) / _CONTENT

    def content(self, job_id: str) -> BinaryIO:
        """A completed job's video, open.

        Raises:
            JobNotFoundError: Somebody else has removed it.
        """
        try:
            return self.content_path(job_id).open("rb")
        except FileNotFoundError:
            raise JobNotFoundError(job_id) from None

    def sweep(self) -> None:
        """Remove what has expired."""
        now = self._now()
        for job in list(self._jobs.values()):
            if job.expires_at is not None and job.expires_at <= now:
                self.delete(job.id)

    def _path(self, job_id: str) -> Path:
        assert is_job_id(job_id)
        return self._folder / job_id

    def _content_bytes(self) -> int:
        return sum(job.content_bytes for job in self._jobs.values())

    def _evict(self) -> bool:
        """Remove the oldest job that is over; False if there is none."""
        over = [job for job in self._jobs.values() if job.is_over]
        if not over:
            return False
        oldest = min(over, key=lambda job: job.completed_at or 0)
        logger.info("%s is removed to make room", oldest.id)
        self.delete(oldest.id)
        return True

    def _end(self, job_id: str, **changes: Any) -> VideoJob:
        now = int(self._now())
        ends = {"completed_at": now, "expires_at": now + int(self._limits.ttl_s)}
        job = self._change(job_id, **ends, **changes)
        self._write(job)
        return job

    def _change(self, job_id: str, **changes: Any) -> VideoJob:
        job = self._jobs[job_id] = msgspec.structs.replace(self._jobs[job_id], **changes)
        return job

    def _write(self, job: VideoJob) -> None:
        record = self._path(job.id) / _RECORD
        fresh = record.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(job))
        os.replace(fresh, record)

    def _found(self) -> dict[str, VideoJob]:
        """The jobs that an earlier server left; what is none of them is cleared away."""
        found = []
        for path in self._folder.iterdir():
            if not is_job_id(path.name):
                continue
            job = _read(path)
            if job is None:
                shutil.rmtree(path)
            else:
                found.append(job)
        jobs = {job.id: job for job in sorted(found, key=lambda job: job.serial)}
        self._jobs = jobs
        for job in found:
            if not job.is_over:
                self.fail(job.id, STOPPED)
        return jobs


def cannot_keep(error: OSError) -> OmniError:
    """What a client is told of a folder that takes no more."""
    if error.errno in FULL:
        return StorageFullError("the video cannot be kept: the server's disk is full")
    return OmniGenerateError(f"the video cannot be kept: {error.strerror}")


def _read(path: Path) -> VideoJob | None:
    """The job of a folder; None if its record or its video is not whole."""
    try:
        job = msgspec.json.decode((path / _RECORD).read_bytes(), type=VideoJob)
        whole = job.id == path.name and (
            job.status != "completed" or (path / _CONTENT).stat().st_size == job.content_bytes
        )
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s: not a whole video job, removed: %s", path, error)
        return None
    return job if whole else None


def _locked(path: Path) -> int:
    """A descriptor that holds a lock until it is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OmniConfigError(
            f"--video-storage-path {path.parent}: another server uses it; give each its own"
        ) from None
    return descriptor
