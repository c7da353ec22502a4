# SPDX-License-Identifier: Apache-2.0
"""Videos over HTTP, by OpenAI's own client, from a live server (rows A-40 to A-47, A-52)."""

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from PIL import Image

from tests.benchmarks.bench import bench
from tests.entrypoints.browser import Page
from tests.entrypoints.generation import (
    KEY,
    MODEL,
    OTHER_KEY,
    SIZE,
    GenerationServer,
    generation_server,
    png,
)
from tests.entrypoints.generation_fuzz import fuzz
from tests.processes import family, has_ended
from vllm_omni.media.audio_encode import encode
from vllm_omni.media.decode import check_video
from vllm_omni.testing.media import sound

pytestmark = [
    pytest.mark.advanced_model,
    pytest.mark.cpu,
    pytest.mark.diffusion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # OpenAI has given up on videos
]
EXAMPLES = Path(__file__).parents[2] / "examples" / "online_serving"
SYNC_TIMEOUT_S = 4
LONG = {"num_inference_steps": "1000", "num_frames": "5", "size": SIZE, "prompt": "a cat"}
SHORT = {**LONG, "num_inference_steps": "2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("filmer")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[GenerationServer]:
    with generation_server("wan21_t2v", folder, *storage(folder), **timeout()) as it:
        yield it


def storage(folder: Path) -> tuple[str, ...]:
    return ("--video-storage-path", str(folder / "videos"))


def timeout() -> dict[str, str]:
    return {"VLLM_OMNI_VIDEO_SYNC_TIMEOUT": str(SYNC_TIMEOUT_S)}


@pytest.fixture
def client(server: GenerationServer) -> Iterator[openai.OpenAI]:
    with server.openai() as it:
        yield it


def create(client: openai.OpenAI, **kw: Any) -> Any:
    extra = {"num_inference_steps": 2, "seed": 1, **kw.pop("extra_body", {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return client.videos.create(model=MODEL, prompt="a cat", size=SIZE, extra_body=extra, **kw)


def over(server: GenerationServer, video_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        reply = server.request("GET", f"/v1/videos/{video_id}")
        video = reply.json()
        if video["status"] in ("completed", "failed"):
            return {**video, "http": reply.status_code}
        assert reply.headers["openai-poll-after-ms"]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_make_follow_fetch_and_delete(server: GenerationServer, client: openai.OpenAI) -> None:
    video = create(client, seconds="1", extra_body={"fps": 8})
    assert (video.object, video.status, video.size) == ("video", "queued", SIZE)
    done = client.videos.poll(video.id, poll_interval_ms=50)
    assert (done.status, done.progress, done.seconds) == ("completed", 100, "1")
    assert done.expires_at > done.completed_at >= done.created_at

    content = client.videos.download_content(video.id)
    assert content.response.headers["content-type"] == "video/mp4"
    data = content.read()
    info = check_video(data)
    assert (info.width, info.height, info.codec) == (32, 32, "h264")
    assert (info.frames, info.fps) == (9, 8)  # of Wan's kind: 4 n + 1
    assert data.index(b"moov") < data.index(b"mdat")
    again = client.videos.poll(
        create(client, seconds="1", extra_body={"fps": 8}).id, poll_interval_ms=50
    )
    assert client.videos.download_content(again.id).read() == data

    for variant in ("thumbnail", "spritesheet"):
        still = client.videos.download_content(video.id, variant=variant)
        assert Image.open(io.BytesIO(still.read())).format == "WEBP"
    part = server.request("GET", f"/v1/videos/{video.id}/content", headers={"Range": "bytes=0-7"})
    assert (part.status_code, part.content) == (206, data[:8])
    for beyond, status in (("bytes=9999999-", 416), ("bytes=2-1", 400), ("x", 400)):
        headers = {"Range": beyond}
        reply = server.request("GET", f"/v1/videos/{video.id}/content", headers=headers)
        server.assert_blames(reply, "Range", status)

    for each in (video, again):
        deleted = client.videos.delete(each.id)
        assert (deleted.id, deleted.deleted) == (each.id, True)
        with pytest.raises(openai.NotFoundError) as gone:
            client.videos.retrieve(each.id)
        assert gone.value.param == "video_id"


def test_pages_and_owners(server: GenerationServer, client: openai.OpenAI) -> None:
    made = [create(client).id for _ in range(3)]
    with server.openai(OTHER_KEY) as other:
        assert list(other.videos.list()) == []
        with pytest.raises(openai.NotFoundError):
            other.videos.retrieve(made[0])
        with pytest.raises(openai.NotFoundError):
            other.videos.delete(made[0])
    assert [video.id for video in client.videos.list(limit=2)] == made[::-1]
    page = client.videos.list(limit=2, order="asc")
    assert ([video.id for video in page.data], page.has_more) == (made[:2], True)
    assert server.request("GET", "/v1/videos", key=None).status_code == 401
    for video_id in made:
        client.videos.delete(video_id)


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order")]
)
def test_pages_that_are_none(server: GenerationServer, query: str, param: str) -> None:
    server.assert_blames(server.request("GET", f"/v1/videos?{query}"), param)


def test_deleting_stops_the_work(server: GenerationServer, client: openai.OpenAI) -> None:
    reply = server.request("POST", "/v1/videos", data=LONG)
    video_id = reply.json()["id"]
    not_ready = server.request("GET", f"/v1/videos/{video_id}/content")
    server.assert_blames(not_ready, "video_id")
    client.videos.delete(video_id)
    server.wait_idle()
    assert list(client.videos.list()) == []


def test_in_one_go(server: GenerationServer) -> None:
    headers = {"X-Request-Id": "film-1"}
    reply = server.request("POST", "/v1/videos/sync", data=SHORT, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "video/mp4"
    assert (reply.headers["x-request-id"], reply.headers["x-model"]) == ("film-1", MODEL)
    assert float(reply.headers["x-inference-time-s"]) > 0
    assert check_video(reply.content).frames == 5


def test_the_stages_timing(server: GenerationServer) -> None:
    form = {**SHORT, "return_stage_metrics": "true"}
    reply = server.request("POST", "/v1/videos/sync", data=form)
    (stage,) = json.loads(reply.headers["x-vllm-omni-stages"])
    assert 0 <= stage["submitted_s"] < stage["finished_s"]
    made = server.request("POST", "/v1/videos", data=form).json()
    (kept,) = over(server, made["id"])["metrics"]["stages"]
    assert kept["stage"] == stage["stage"]
    plain = server.request("POST", "/v1/videos", data=SHORT).json()
    assert "stages" not in over(server, plain["id"])["metrics"]


def test_the_playground_films(server: GenerationServer, page: Page) -> None:
    page.open(server.url)
    page.use_key(KEY)
    form = "#panel-videos form"
    page.fill(form, prompt="a cat", size=SIZE, num_inference_steps=100, seconds=1, fps=8)
    page.watch(f"{form} .state", None)
    page.send(form)
    assert any(text.endswith(" %") for text in page.watched())
    page.wait(lambda: page.size_of("#panel-videos video") == (32, 32), "the video")
    info = check_video(page.save("#panel-videos a[download]"))
    assert (info.width, info.frames) == (32, 9)
    assert page.all("#last .stages tbody th")
    page.shot("videos")


def test_stopping_in_the_playground_deletes_the_video(server: GenerationServer, page: Page) -> None:
    page.open(server.url)
    page.use_key(KEY)
    form = "#panel-videos form"
    page.fill(form, prompt="stop me", size=SIZE, num_inference_steps=1000)
    page.press(f"{form} button[type=submit]")
    page.wait(lambda: "%" in page.text(f"{form} .state"), "the start")
    page.press(f"{form} .stop")
    page.wait(lambda: page.text(f"{form} .state") == "Stopped.", "the end")
    videos = server.request("GET", "/v1/videos").json()["data"]
    assert "stop me" not in [video["prompt"] for video in videos]


def test_not_longer_than_that(server: GenerationServer) -> None:
    """Row A-43. Another one is made meanwhile."""
    large = {**LONG, "num_frames": "161", "size": "64x64"}
    reply = server.request("POST", "/v1/videos/sync", data=large)
    assert reply.status_code == 504, reply.text
    server.wait_idle()


def png_url() -> str:
    return f"data:image/png;base64,{base64.b64encode(png()).decode()}"


def wav_url() -> str:
    data = base64.b64encode(encode(sound(0.2, 16_000), 16_000, "wav")).decode()
    return f"data:audio/wav;base64,{data}"


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync"])
@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"prompt": ""}, {}, "prompt"),
        ({"size": "640x640"}, {}, "size"),
        ({"seconds": "long"}, {}, "seconds"),
        ({"fps": "0"}, {}, "fps"),
        ({"num_frames": "100000"}, {}, "num_frames"),
        ({"audio_reference": "{}"}, {}, "audio_reference.audio_url"),
        ({"audio_reference": '{"audio_url": "/etc/passwd"}'}, {}, "audio_reference"),
        ({"audio_reference": '{"audio_url": "x", "y": 1}'}, {}, "audio_reference.y"),
        ({"enable_frame_interpolation": "true"}, {}, "enable_frame_interpolation"),
        ({"foo": "1"}, {}, "foo"),
        ({"extra_params": '{"timesteps": [1, 2]}'}, {}, "extra_params.timesteps"),
        ({}, {"input_reference": ("a.png", b"no", "image/png")}, "input_reference"),
        ({"seconds": "2", "num_frames": "5"}, {}, "num_frames"),
        ({"guidance_scale_2": "3"}, {}, "guidance_scale_2"),
        ({}, {"input_reference": ("a.png", png(), "image/png")}, "input_reference"),
        ({"image_reference": json.dumps({"image_url": png_url()})}, {}, "image_reference"),
        ({"audio_reference": json.dumps({"audio_url": wav_url()})}, {}, "audio_reference"),
        (
            {"image_reference": '{"image_url": "https://example.com/a.png"}'},
            {"input_reference": ("a.png", png(), "image/png")},
            "image_reference",
        ),
    ],
)
def test_the_field_at_fault_is_named(server, path: str, fields, files, param: str) -> None:
    reply = server.request("POST", path, data={**SHORT, **fields}, files=files or None)
    server.assert_blames(reply, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_params": '{"nonsense": 1}'}, "extra_params.nonsense"),
        ({"num_frames": "9999"}, "num_frames"),
        ({"boundary_ratio": "0.5"}, "boundary_ratio"),
    ],
)
def test_what_the_model_refuses(server: GenerationServer, fields, param: str) -> None:
    """Row A-47: at once where the client waits, else in the video's state, with HTTP 400."""
    reply = server.request("POST", "/v1/videos/sync", data={**SHORT, **fields})
    message = server.assert_blames(reply, param)
    reply = server.request("POST", "/v1/videos", data={**SHORT, **fields})
    video = over(server, reply.json()["id"])
    assert (video["http"], video["status"]) == (400, "failed")
    assert (video["error"]["code"], video["error"]["param"]) == ("400", param)
    assert video["error"]["message"] == message
    assert server.request("DELETE", f"/v1/videos/{video['id']}").status_code == 200


def test_whatever_comes_is_no_fault_of_the_server(server: GenerationServer, client) -> None:
    assert fuzz(server, ("/v1/videos",)) == []
    for video in list(client.videos.list(limit=100)):
        client.videos.delete(video.id)
    assert server.request("POST", "/v1/videos/sync", data=SHORT).is_success


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs curl and jq")
def test_the_example(server: GenerationServer, tmp_path: Path) -> None:
    env = {**os.environ, "OPENAI_API_KEY": KEY, "SIZE": SIZE, "STEPS": "2", "FRAMES": "5"}
    script = str(EXAMPLES / "text_to_video.sh")
    subprocess.run([script, server.url], cwd=tmp_path, env=env, check=True, timeout=120)
    for name in ("sync.mp4", "background.mp4"):
        assert check_video((tmp_path / name).read_bytes()).frames == 5


@pytest.mark.parametrize("endpoint", ["/v1/videos", "/v1/videos/sync"])
def test_bench_serve(
    server: GenerationServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """REFERENCE.md 2.7."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    fields = {name: value for name, value in SHORT.items() if name != "prompt"} | {"fps": 10}
    options = ("--dataset-name", "sentences", "--num-prompts", "2", "--endpoint", endpoint)
    body = ("--extra-body", json.dumps(fields))
    result = bench(server.url, "openai-videos-omni", tmp_path, *options, *body)
    assert (result["completed"], result["failed"]) == (2, 0), result["errors"]
    assert (result["total_videos"], result["total_video_frames"]) == (2, 10)
    assert result["mean_video_rtf"] == pytest.approx(result["mean_video_generation_ms"] / 500)


@pytest.fixture(scope="module")
def killed(server: GenerationServer) -> dict[str, Any]:
    """The server is dead: what it had finished, what it had not, and its processes."""
    with server.openai() as client:
        done = client.videos.poll(create(client).id, poll_interval_ms=50)
        data = client.videos.download_content(done.id).read()
    lost = server.request("POST", "/v1/videos", data=LONG).json()["id"]
    while server.request("GET", f"/v1/videos/{lost}").json()["progress"] < 1:
        time.sleep(0.05)
    processes = family(server.process.pid)
    server.stop(signal.SIGKILL)
    return {"done": done, "data": data, "lost": lost, "processes": processes}


def test_a_kill_ends_every_process(server: GenerationServer, killed: dict[str, Any]) -> None:
    """One that is busy, too: its outputs have nowhere to go."""
    _, alive = psutil.wait_procs(killed["processes"], timeout=30)
    assert not [process for process in alive if not has_ended(process)]
    assert not [path for path in server.temporary.rglob("*") if path.is_file()]


@pytest.mark.full_model  # a second start; `test_video_jobs.py` has the same of the store alone
def test_a_kill_loses_only_what_was_not_finished(server, client, folder: Path, killed) -> None:
    done, lost = killed["done"], killed["lost"]
    server.start()
    assert client.videos.retrieve(done.id) == done
    assert client.videos.download_content(done.id).read() == killed["data"]
    state = over(server, lost)
    assert (state["http"], state["status"], state["error"]["code"]) == (200, "failed", "503")
    assert [path.name for path in (folder / "videos" / lost).iterdir()] == ["job.json"]
    for video in list(client.videos.list()):
        client.videos.delete(video.id)
