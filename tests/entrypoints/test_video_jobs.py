# SPDX-License-Identifier: Apache-2.0
"""Videos in the background: what is kept, for how long, whose it is, and what a restart leaves."""

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.entrypoints.openai.videos.content import path_of
from vllm_omni.entrypoints.openai.videos.job import STOPPED, JobError, VideoJob, new_job_id
from vllm_omni.entrypoints.openai.videos.jobs import JobHandle, VideoFacts, VideoJobs
from vllm_omni.entrypoints.openai.videos.store import (
    ContentTooLargeError,
    JobNotFoundError,
    StorageLimits,
    VideoStore,
)
from vllm_omni.errors import (
    DeadlineExceededError,
    OmniClientError,
    OmniConfigError,
    OmniGenerateError,
    OverloadedError,
    StorageFullError,
    http_status,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]
CONTENT = b"\0\0\0\x08ftyp" * 4


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[VideoStore]:
    store = VideoStore(tmp_path / "videos", StorageLimits(ttl_s=100, max_bytes=100), clock)
    yield store
    store.close()


def add(store: VideoStore, owner: str = "me") -> VideoJob:
    return store.add(owner, "tiny", "a cat", seconds="1", size="16x16")


def finish(store: VideoStore, job: VideoJob, content: bytes = CONTENT) -> VideoJob:
    store.partial_path(job.id).write_bytes(content)
    return store.finish(job.id, "16x16", {"inference_time_s": 0.5})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name != ".lock")


def test_life_of_a_job(store: VideoStore, clock: Clock) -> None:
    job = add(store)
    assert (job.status, job.progress, job.expires_at) == ("queued", 0, None)
    store.began(job.id, 40)
    assert (store.get(job.id, "me").status, store.get(job.id, "me").progress) == ("in_progress", 40)
    clock.now += 7
    done = finish(store, job)
    assert (done.status, done.progress, done.content_bytes) == ("completed", 100, len(CONTENT))
    assert (done.completed_at, done.expires_at) == (job.created_at + 7, job.created_at + 107)
    assert store.content_path(job.id).read_bytes() == CONTENT
    clock.now += 101
    with pytest.raises(JobNotFoundError):
        store.get(job.id, "me")
    assert not store.content_path(job.id).parent.exists()


def test_a_job_is_its_owners(store: VideoStore) -> None:
    mine, theirs = add(store, "me"), add(store, "them")
    with pytest.raises(JobNotFoundError) as refused:
        store.get(theirs.id, "me")
    assert (refused.value.status_code, refused.value.param) == (404, "video_id")
    assert [job.id for job in store.page("me")[0]] == [mine.id]
    with pytest.raises(JobNotFoundError) as refused:
        store.page("me", after=theirs.id)
    assert refused.value.param == "after"


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../..", "video_" + "a" * 31, "video_" + "A" * 32),
        *("video_" + "a" * 32 + "\n", "video_../../../../etc/passwd", "/etc/passwd"),
        *("video_" + "a" * 10_000, "\ud800", "\0"),
    ],
)
def test_no_name_leads_out_of_the_folder(store: VideoStore, name: str) -> None:
    with pytest.raises(JobNotFoundError) as refused:
        store.get(name, "me")
    assert len(refused.value.message) < 200
    with pytest.raises(AssertionError):
        store.content_path(name)


def test_a_folder_that_takes_no_more(store: VideoStore) -> None:
    """Nothing is left of what cannot be kept, and the next video is."""
    job = add(store)
    store.partial_path(job.id).write_bytes(CONTENT)
    record = store.content_path(job.id).with_name("job.json")
    record.unlink()
    record.mkdir()  # so that it cannot be replaced
    with pytest.raises(OmniGenerateError, match="cannot be kept"):
        store.finish(job.id, "16x32", {})
    store.fail(job.id, STOPPED)
    assert store.get(job.id, "me").status == "failed"
    assert not store.content_path(job.id).exists()

    folder = store.content_path(job.id).parent.parent
    aside = folder.rename(folder.with_name("aside"))
    with pytest.raises(OmniGenerateError, match="cannot be kept"):
        add(store)
    aside.rename(folder)
    assert len(store) == 1
    finish(store, add(store))


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(store: VideoStore) -> None:
    """It is told as such, HTTP 507, and nothing half-written is left."""
    folder = store.content_path(add(store).id).parent.parent
    before = sorted(folder.rglob("*"))
    with full_disk(), pytest.raises(StorageFullError, match="disk is full") as refused:
        add(store)
    assert http_status(refused.value) == 507
    assert JobError.of(refused.value).status_code == 507
    assert (sorted(folder.rglob("*")), len(store)) == (before, 1)
    finish(store, add(store))


def test_what_is_read_may_be_deleted(store: VideoStore) -> None:
    job = add(store)
    finish(store, job)
    with store.content(job.id) as file:
        store.delete(job.id)
        assert Path(path_of(file)).read_bytes() == CONTENT
    with pytest.raises(JobNotFoundError):
        store.content(job.id)


@given(st.integers(0, 7), st.integers(1, 9), st.sampled_from(["asc", "desc"]))
@settings(max_examples=40, deadline=None)
def test_pages_are_the_list_cut_up(tmp_path_factory, count: int, limit: int, order: str) -> None:
    store = VideoStore(tmp_path_factory.mktemp("pages") / "videos")
    made = [add(store).id for _ in range(count)]
    add(store, "them")
    seen: list[str] = []
    more = True
    while more:
        jobs, more = store.page("me", after=seen[-1] if seen else None, limit=limit, order=order)
        seen += [job.id for job in jobs]
        assert len(jobs) <= limit
    assert seen == (made if order == "asc" else made[::-1])
    store.close()


def test_a_restart_keeps_what_was_finished(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "videos"
    store = VideoStore(folder, now=clock)
    done, queued, running = finish(store, add(store)), add(store), add(store)
    failed = add(store)
    store.fail(failed.id, JobError(message="no", status_code=400, type="BadRequestError"))
    store.began(running.id, 50)
    store.partial_path(running.id).write_bytes(b"half")
    os.close(store._lock)  # as when the process is killed

    again = VideoStore(folder, now=clock)
    assert again.get(done.id, "me") == done
    assert again.content_path(done.id).read_bytes() == CONTENT
    for job in (queued, running):
        found = again.get(job.id, "me")
        assert (found.status, found.error) == ("failed", STOPPED)
        assert not again.partial_path(job.id).exists()
    error = again.get(failed.id, "me").error
    assert error is not None and error.message == "no"
    in_order = [job.id for job in (done, queued, running, failed)]
    assert [job.id for job in again.page("me", order="asc")[0]] == in_order
    again.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "job.json").write_text("{"),
        lambda path: (path / "job.json").unlink(),
        lambda path: (path / "job.json").write_text('{"id": "../../x"}'),
        lambda path: (path / "video.mp4").write_bytes(b"short"),
        lambda path: (path / "video.mp4").unlink(),
        lambda path: path.rename(path.with_name(new_job_id())),
    ],
)
def test_a_damaged_job_is_cleared_away(tmp_path: Path, damage) -> None:
    store = VideoStore(tmp_path)
    job, other = finish(store, add(store)), finish(store, add(store))
    os.close(store._lock)
    damage(store.content_path(job.id).parent)
    again = VideoStore(tmp_path)
    assert [job.id for job in again.page("me")[0]] == [other.id]
    assert files(tmp_path) == sorted([other.id, "job.json", "video.mp4"])
    again.close()


def test_other_files_of_the_folder_are_let_be(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    VideoStore(tmp_path).close()
    assert files(tmp_path) == ["notes.txt"]


def test_an_empty_folder_goes_with_its_server(tmp_path: Path) -> None:
    store = VideoStore(tmp_path / "videos")
    store.delete(add(store).id)
    store.close()
    assert not list(tmp_path.iterdir())


def test_one_server_a_folder_and_nobody_else_may_look(tmp_path: Path) -> None:
    store = VideoStore(tmp_path / "videos")
    assert (tmp_path / "videos").stat().st_mode & 0o777 == 0o700
    with pytest.raises(OmniConfigError, match="another server uses it"):
        VideoStore(tmp_path / "videos")
    store.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(OmniConfigError, match="--video-storage-path"):
        VideoStore(tmp_path / "file")


def test_the_oldest_make_room(store: VideoStore, clock: Clock) -> None:
    made = []
    for _ in range(4):
        made.append(finish(store, add(store), b"x" * 40))
        clock.now += 1
    assert [job.id for job in store.page("me", order="asc")[0]] == [job.id for job in made[2:]]
    running = add(store)
    store.partial_path(running.id).write_bytes(b"x" * 101)
    with pytest.raises(ContentTooLargeError) as refused:
        store.finish(running.id, "16x16", {})
    assert (refused.value.status_code, refused.value.param) == (413, "size")
    assert len(store) == 3


def test_so_many_jobs_and_no_more(tmp_path: Path) -> None:
    store = VideoStore(tmp_path / "videos", StorageLimits(max_jobs=2))
    done, running = finish(store, add(store)), add(store)
    newest = add(store)
    assert {job.id for job in store.page("me")[0]} == {running.id, newest.id}
    with pytest.raises(JobNotFoundError):
        store.get(done.id, "me")
    with pytest.raises(OverloadedError):
        add(store)
    store.close()


async def make(handle: JobHandle) -> VideoFacts:
    handle.progress(50)
    await asyncio.sleep(0)
    handle.path.write_bytes(CONTENT)
    return VideoFacts(16, 32, {"inference_time_s": 0.25})


async def over(jobs: VideoJobs, job: VideoJob) -> VideoJob:
    async with asyncio.timeout(10):
        while not jobs.get(job.id, "me").is_over:
            await asyncio.sleep(0.001)
    return jobs.get(job.id, "me")


async def test_a_job_runs_by_itself(tmp_path: Path) -> None:
    jobs = VideoJobs(VideoStore(tmp_path))
    job = jobs.start(make, owner="me", model="tiny", prompt="a cat")
    assert job.status == "queued"
    done = await over(jobs, job)
    assert (done.status, done.size, done.metrics) == (
        "completed",
        "16x32",
        {"inference_time_s": 0.25},
    )
    assert jobs.content_path(job.id).read_bytes() == CONTENT
    assert jobs.running == 0
    await jobs.close()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            OmniClientError("size: too odd", 422, "UnprocessableEntityError", param="size"),
            422,
            "odd",
        ),
        (DeadlineExceededError("it took too long"), 504, "too long"),
        (KeyError("/secret/path"), 500, "Internal server error"),
    ],
)
async def test_a_job_fails_alone(tmp_path: Path, error, status: int, message: str) -> None:
    async def broken(handle: JobHandle) -> VideoFacts:
        handle.path.write_bytes(b"half")
        raise error

    jobs = VideoJobs(VideoStore(tmp_path))
    bad = jobs.start(broken, owner="me", model="tiny", prompt="a cat")
    good = jobs.start(make, owner="me", model="tiny", prompt="a cat")
    assert (await over(jobs, good)).status == "completed"
    failed = await over(jobs, bad)
    assert failed.status == "failed" and failed.error is not None
    assert failed.error.status_code == status
    assert message in failed.error.message and "secret" not in failed.error.message
    assert files(tmp_path / bad.id) == ["job.json"]
    await jobs.close()


async def test_deleting_ends_a_running_job(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def endless(handle: JobHandle) -> VideoFacts:
        handle.path.write_bytes(b"half")
        handle.progress(10)
        try:
            return await asyncio.Future()
        finally:
            ended.set()

    jobs = VideoJobs(VideoStore(tmp_path))
    job = jobs.start(endless, owner="me", model="tiny", prompt="a cat")
    await asyncio.sleep(0)
    with pytest.raises(JobNotFoundError):
        await jobs.delete(job.id, "them")
    await asyncio.gather(jobs.delete(job.id, "me"), jobs.delete(job.id, "me"))
    assert ended.is_set() and jobs.running == 0
    with pytest.raises(JobNotFoundError):
        await jobs.delete(job.id, "me")
    assert files(tmp_path) == []
    await jobs.close()


async def test_a_stopped_server_says_so(tmp_path: Path) -> None:
    async def endless(handle: JobHandle) -> VideoFacts:
        return await asyncio.Future()

    jobs = VideoJobs(VideoStore(tmp_path))
    job = jobs.start(endless, owner="me", model="tiny", prompt="a cat")
    await asyncio.sleep(0)
    await jobs.close()
    again = VideoStore(tmp_path)
    assert again.get(job.id, "me").error == STOPPED
    again.close()
