# SPDX-License-Identifier: Apache-2.0
"""Makes videos in the background: one task per job, its state in the store."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_omni.entrypoints.openai.videos.job import JobError, VideoJob
from vllm_omni.entrypoints.openai.videos.store import JobNotFoundError, VideoStore
from vllm_omni.errors import OmniError, OverloadedError
from vllm_omni.outputs import StageMetrics

logger = init_logger(__name__)

SWEEP_EVERY_S = 30.0
MAX_UNFINISHED = 256
"""Jobs that wait or run, with the media that they brought."""


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """What came out of a job.

    Attributes:
        width: The video's.
        height: The video's.
        metrics: Timing, in seconds.
        stages: Timing of each stage, if it was asked for.
    """

    width: int
    height: int
    metrics: dict[str, float]
    stages: tuple[StageMetrics, ...] = ()


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A running job, as the code that makes its video sees it.

    Attributes:
        path: Where the video has to be written.
        progress: Called with percent, once or often.
    """

    path: Path
    progress: Callable[[int], None]


Work = Callable[[JobHandle], Awaitable[VideoFacts]]
"""Makes a job's video. It is cancelled if the job is deleted or the server stops."""


class VideoJobs:
    """Starts, follows and ends jobs. For one event loop.

    Args:
        store: Where they are kept; closed with this.
    """

    def __init__(self, store: VideoStore) -> None:
        self._store = store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self.get = store.get
        self.page = store.page
        self.content_path = store.content_path
        self.content = store.content

    @property
    def running(self) -> int:
        """Jobs that are not over."""
        return len(self._tasks)

    def start(self, work: Work, *, owner: str, model: str, prompt: str, **facts: Any) -> VideoJob:
        """Begin a job.

        Args:
            work: Makes the video.
            owner: See `VideoJob`.
            model: See `VideoJob`.
            prompt: See `VideoJob`.
            facts: Its `seconds` and `size`.

        Raises:
            OverloadedError: There are too many.
        """
        if len(self._tasks) >= MAX_UNFINISHED:
            raise OverloadedError("too many videos are being made; try again later")
        job = self._store.add(owner, model, prompt, **facts)
        task = asyncio.create_task(self._run(job.id, work), name=job.id)
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.id, None))
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep(), name="video-sweeper")
        return job

    async def delete(self, job_id: str, owner: str) -> None:
        """End a job, if it runs, and forget it; when this returns all of it is gone.

        Raises:
            JobNotFoundError: There is no such job of this owner.
        """
        self._store.get(job_id, owner)
        await self._cancel([task for id, task in self._tasks.items() if id == job_id])
        try:
            self._store.get(job_id, owner)
        except JobNotFoundError:
            return  # it was deleted twice at a time
        self._store.delete(job_id)

    async def close(self) -> None:
        """End every job; those that are not over have failed."""
        tasks = list(self._tasks.values())
        await self._cancel([*tasks, *([self._sweeper] if self._sweeper else [])])
        self._store.close()

    async def _run(self, job_id: str, work: Work) -> None:
        def progress(percent: int) -> None:
            self._store.began(job_id, min(99, max(0, percent)))

        try:
            made = await work(JobHandle(self._store.partial_path(job_id), progress))
            self._store.finish(job_id, f"{made.width}x{made.height}", made.metrics, made.stages)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever it was, it is this job's alone, and told there
            expected = isinstance(error, OmniError)
            logger.info("%s failed: %s", job_id, error, exc_info=not expected)
            self._store.fail(job_id, JobError.of(error))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self._store.sweep()

    @staticmethod
    async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
