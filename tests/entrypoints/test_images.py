# SPDX-License-Identifier: Apache-2.0
"""Pictures over HTTP, by OpenAI's own client, from a live server (rows A-44 to A-47)."""

import asyncio
import base64
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.benchmarks.bench import bench
from tests.entrypoints.browser import Page
from tests.entrypoints.generation import (
    KEY,
    MODEL,
    OTHER_KEY,
    SIZE,
    STEPS,
    GenerationServer,
    generation_server,
    png,
)
from tests.entrypoints.generation_fuzz import fuzz

pytestmark = [pytest.mark.advanced_model, pytest.mark.cpu, pytest.mark.diffusion]
EXAMPLES = Path(__file__).parents[2] / "examples" / "online_serving"
CANCELS = 300
AT_ONCE = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationServer]:
    with generation_server("flux", tmp_path_factory.mktemp("painter")) as it:
        yield it


@pytest.fixture
def client(server: GenerationServer) -> Iterator[openai.OpenAI]:
    with server.openai() as it:
        yield it


def decoded(data: str | None) -> Image.Image:
    assert data is not None
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    image.load()
    return image


def generate(client: openai.OpenAI, seed: int = 1, **kw: Any) -> Any:
    extra = {**STEPS, "seed": seed, **kw.pop("extra_body", {})}
    return client.images.generate(
        model=MODEL, prompt="a cat", size=kw.pop("size", SIZE), extra_body=extra, **kw
    )


def test_a_seed_is_a_picture(client: openai.OpenAI) -> None:
    one = generate(client, n=2)
    assert (one.size, one.output_format, one.background) == (SIZE, "png", "opaque")
    assert [decoded(each.b64_json).size for each in one.data] == [(32, 32)] * 2
    first, second = (each.b64_json for each in one.data)
    assert first != second
    assert [each.b64_json for each in generate(client, n=2).data] == [first, second]
    assert generate(client, seed=2).data[0].b64_json != first
    assert one.usage.total_tokens == 0


@pytest.mark.parametrize(("format", "media"), [("jpeg", "JPEG"), ("webp", "WEBP")])
def test_formats(client: openai.OpenAI, format: Any, media: str) -> None:
    exact = decoded(generate(client).data[0].b64_json)
    for compression in (95, 5):
        reply = generate(client, output_format=format, output_compression=compression)
        picture = decoded(reply.data[0].b64_json)
        assert (picture.format, reply.output_format) == (media, format)
        if compression == 95:
            difference = np.asarray(picture, int) - np.asarray(exact, int)
            assert np.abs(difference).mean() < 30  # it is the same picture


def test_a_url_is_a_data_url(client: openai.OpenAI) -> None:
    url = generate(client, response_format="url").data[0].url
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    assert data == generate(client).data[0].b64_json


def test_the_playground_paints_with_previews(
    server: GenerationServer, page: Page, client: openai.OpenAI
) -> None:
    page.open(server.url)
    page.use_key(KEY)
    form = "#panel-images form"
    page.fill(form, prompt="a cat", size=SIZE, num_inference_steps=8, seed=1)
    page.watch(".pictures figure", "preview")
    page.send(form)
    assert page.watched() == ["1", "2", "3", None]
    page.wait(lambda: page.size_of(".pictures img") == (32, 32), "the picture")
    assert page.find(".pictures img").get_attribute("alt") == "a cat"
    assert [row.text for row in page.all("#last .stages tbody th")] == ["diffusion"]
    assert "First preview after" in page.text("#last .seen")
    saved = page.save(".pictures a[download]")
    same = generate(client, extra_body={"num_inference_steps": 8})
    assert saved == base64.b64decode(same.data[0].b64_json)
    page.shot("images")


def test_the_playground_changes_a_picture(
    server: GenerationServer, page: Page, tmp_path: Path
) -> None:
    page.open(server.url)
    page.use_key(KEY)
    (tmp_path / "cat.png").write_bytes(png())
    form = "#panel-images form"
    page.find(f"{form} input[type=file]").send_keys(str(tmp_path / "cat.png"))
    page.fill(form, prompt="a dog", num_inference_steps=2, n=2)
    page.send(form)
    assert len(page.all(".pictures figure")) == 2
    run = [sys.executable, "-c", page.text("#python")]
    env = {**os.environ, "API_KEY": KEY}
    subprocess.run(run, cwd=tmp_path, env=env, timeout=60, check=True)
    assert Image.open(tmp_path / "picture-1.png").size == (32, 32)
    assert KEY not in page.text("#last")


def test_stage_metrics_and_the_request_id(server: GenerationServer) -> None:
    body = {"prompt": "a cat", "size": SIZE, **STEPS, "return_stage_metrics": True}
    headers = {"X-Request-Id": "my-request"}
    reply = server.request("POST", "/v1/images/generations", json=body, headers=headers)
    assert reply.headers["x-request-id"] == "my-request"
    (stage,) = reply.json()["metrics"]["stages"]
    assert stage["finished_s"] > 0
    assert "vllm_omni:requests_success" in server.request("GET", "/metrics").text


def test_a_stream_has_previews_and_the_picture(client: openai.OpenAI) -> None:
    extra = {"num_inference_steps": 4}
    events = list(generate(client, stream=True, partial_images=2, extra_body=extra))
    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert all(decoded(event.b64_json).size == (32, 32) for event in events)
    whole = generate(client, extra_body=extra)
    assert events[-1].b64_json == whole.data[0].b64_json
    assert (events[-1].size, events[-1].output_format) == (SIZE, "png")
    assert events[-1].usage.total_tokens == 0


def test_editing_streamed_and_whole(client: openai.OpenAI) -> None:
    def edit(**kw: Any) -> Any:
        return client.images.edit(
            model=MODEL,
            image=("a.png", png()),
            prompt="a hat",
            size=SIZE,
            extra_body={"num_inference_steps": 4, "strength": 0.5, "seed": 3},
            **kw,
        )

    events = list(edit(stream=True))
    assert events[-1].type == "image_edit.completed"
    whole = edit().data[0].b64_json
    assert events[-1].b64_json == whole
    masked = edit(mask=("m.png", png(mode="L"))).data[0].b64_json
    assert decoded(masked).size == (32, 32)
    assert masked != whole


def test_a_conversation_is_answered_with_a_picture(client: openai.OpenAI) -> None:
    picture = "data:image/png;base64," + base64.b64encode(png()).decode()
    words = {"type": "text", "text": "a cat"}
    extra = {"size": SIZE, "seed": 1, **STEPS}
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a cat"}], extra_body=extra
    )
    (part,) = reply.choices[0].message.content
    drawn = part["image_url"]["url"].partition(",")[2]
    assert drawn == generate(client).data[0].b64_json
    assert reply.choices[0].finish_reason == "stop"

    content = [words, {"type": "image_url", "image_url": {"url": picture}}]
    messages: Any = [
        {"role": "system", "content": "You paint."},
        {"role": "user", "content": content},
    ]
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, extra_body={**extra, "strength": 1.0}
        )
    )
    (part,) = chunks[0].choices[0].delta.content
    assert decoded(part["image_url"]["url"].partition(",")[2]).size == (32, 32)
    assert chunks[-1].choices[0].finish_reason == "stop"


def generation_body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a cat", "size": SIZE, **STEPS, **fields}


FAULTS: list[tuple[str, Any, int]] = [
    ("prompt", "", 400),
    ("n", 11, 400),
    ("size", "128x128", 400),
    ("size", "100000x100000", 400),
    ("num_inference_steps", 0, 400),
    ("output_format", "gif", 400),
    ("generator_device", "cuda:7", 400),
    ("extra_params.nonsense", {"nonsense": 1}, 400),
    ("extra_params.generator", {"generator": 1}, 400),
    ("extra_params.num_images_per_prompt", {"num_images_per_prompt": 10**6}, 400),
    ("extra_params.sigmas", {"sigmas": "many"}, 400),
    ("extra_params.max_sequence_length", {"max_sequence_length": 10**9}, 400),
    ("extra_params.prompt_2", {"prompt_2": 2**70}, 400),
    ("layers", 2, 400),
    ("system_prompt", "You paint.", 400),
    ("flow_shift", 3.0, 400),
    ("strength", 0.5, 400),
    ("lora.name", {"name": "../../etc/passwd"}, 400),
    ("model", "other", 404),
    ("stream", "perhaps", 400),
    ("foo", 1, 400),
    ("num_inference_step", 3, 400),
    ("latents", [1.0], 400),
    ("style", "vivid", 400),
    ("background", "transparent", 400),
    ("vae_use_tiling", True, 400),
    ("sigmas", [0.5, 1.0], 400),
    ("num_outputs_per_prompt", 11, 400),
    ("negative_prompt", "\ud800", 400),
]


@pytest.mark.parametrize(("param", "value", "status"), FAULTS)
def test_the_field_at_fault_is_named(server, param: str, value: Any, status: int) -> None:
    body = generation_body(**{param.partition(".")[0]: value})
    headers = {"content-type": "application/json"}
    reply = server.request(
        "POST", "/v1/images/generations", content=json.dumps(body), headers=headers
    )
    server.assert_blames(reply, param, status)
    good = server.request("POST", "/v1/images/generations", json=generation_body())
    assert good.status_code == 200


@pytest.mark.parametrize(
    ("files", "fields", "param"),
    [
        ({}, {}, "image"),
        ({"image": ("a.png", b"\x89PNG", "image/png")}, {}, "image"),
        ({"image": ("a.png", png((65, 65)), "image/png")}, {}, "image"),
        ({"image": ("a.txt", b"hello", "text/plain")}, {}, "image"),
        ({"image": ("a.png", png()), "mask": ("m.png", png((16, 32)))}, {}, "mask"),
        ({"image": ("a.png", png())}, {"url": "file:///etc/passwd"}, "url"),
        ({"image": ("a.png", png())}, {"url": "http://127.0.0.1:1/"}, "url"),
        ({"image": ("a.png", png())}, {"n": "many"}, "n"),
        ({"image": ("a.png", png())}, {"prompt": ""}, "prompt"),
        ({"image": ("a.png", png())}, {"strength": "0"}, "strength"),
        ({"image": ("a.png", png())}, {"foo": "1"}, "foo"),
        ({"image": ("a.png", png())}, {"padding_mask_cropp": "1"}, "padding_mask_cropp"),
        ({"sound": ("a.png", png())}, {}, "sound"),
    ],
)
def test_what_is_wrong_with_a_picture_is_told(server, files, fields, param: str) -> None:
    data = {"prompt": "a hat", "size": SIZE, "num_inference_steps": "2", **fields}
    body = files or {"user": (None, b"me")}
    server.assert_blames(server.request("POST", "/v1/images/edits", data=data, files=body), param)


def test_a_transparent_picture_is_edited_and_two_are_not(server: GenerationServer) -> None:
    data = {"prompt": "a hat", "size": SIZE, "num_inference_steps": "2", "strength": "0.6"}
    clear = ("image", ("a.png", png(mode="RGBA"), "image/png"))
    assert server.request("POST", "/v1/images/edits", data=data, files=[clear]).is_success
    both = [("image[]", ("a.png", png(), "image/png"))] * 2
    reply = server.request("POST", "/v1/images/edits", data=data, files=both)
    assert "takes one picture, not 2" in server.assert_blames(reply, "image")


def test_a_typo_is_told_with_what_was_meant(server: GenerationServer) -> None:
    body = generation_body(num_inference_step=3)
    reply = server.request("POST", "/v1/images/generations", json=body)
    told = server.assert_blames(reply, "num_inference_step")
    assert told == "Unknown parameter: 'num_inference_step'; did you mean 'num_inference_steps'?"


def test_arguments_of_the_pipeline_may_be_given_beside_the_fields(client: openai.OpenAI) -> None:
    dog = {"prompt_2": "a dog in the rain"}
    beside = generate(client, extra_body={**dog, "style": None}).data[0].b64_json
    assert beside == generate(client, extra_body={"extra_params": dog}).data[0].b64_json
    assert beside == generate(client, extra_body={"extra_args": dog}).data[0].b64_json
    assert beside != generate(client).data[0].b64_json


def test_a_size_that_is_left_open(server: GenerationServer) -> None:
    """An edit has its picture's shape; all else is as large as may be."""
    files = {"image": ("a.png", png((64, 32)), "image/png")}
    data = {"prompt": "a hat", "num_inference_steps": "2"}
    reply = server.request("POST", "/v1/images/edits", data=data, files=files)
    assert (reply.status_code, reply.json()["size"]) == (200, "64x32"), reply.text
    body = {"prompt": "a cat", **STEPS, "size": "auto"}
    reply = server.request("POST", "/v1/images/generations", json=body)
    assert (reply.status_code, reply.json()["size"]) == (200, "64x64"), reply.text


def test_a_prompt_that_is_cut_is_told_in_the_log(server: GenerationServer) -> None:
    body = generation_body(prompt="a cat and " * 100)
    headers = {"X-Request-Id": "long-prompt"}
    reply = server.request("POST", "/v1/images/generations", json=body, headers=headers)
    assert reply.status_code == 200
    cut = [line for line in server.log.read_text().splitlines() if "long-prompt" in line]
    assert sum("is not read by one text encoder (tokenizer)" in line for line in cut) == 1, cut


def test_extra_arguments_are_no_way_around_the_bounds(server: GenerationServer) -> None:
    for name, value in (("height", 10**5), ("num_inference_steps", 10**9)):
        body = generation_body(extra_params={name: value})
        server.assert_blames(server.request("POST", "/v1/images/generations", json=body), name)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_there_are_no_videos_here(server: GenerationServer, method: str) -> None:
    server.assert_blames(server.request(method, "/v1/videos/video_x"), "model")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("modalities", ["audio"]),
        ("sampling_params_list", [{"height": 32}]),
        ("logprobs", True),
        ("foo", 1),
    ],
)
def test_a_conversation_refuses_what_it_would_ignore(server, param: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a cat"}], param: value}
    server.assert_blames(server.request("POST", "/v1/chat/completions", json=body), param)


def test_an_error_of_the_engine_ends_a_stream_in_order(server: GenerationServer) -> None:
    """Row A-47: an error event, then the end, and HTTP 200."""
    body = generation_body(stream=True, layers=3)
    reply = server.request("POST", "/v1/images/generations", json=body)
    assert reply.status_code == 200
    events = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, "layers")


def test_a_client_sees_the_error_of_a_stream(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="layers"):
        list(generate(client, stream=True, extra_body={"layers": 3}))


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync"])
def test_the_right_route_is_told(server: GenerationServer, path: str) -> None:
    reply = server.request("POST", path, data={"prompt": "a cat"})
    assert "/v1/images/generations" in server.assert_blames(reply, "model")


@pytest.mark.parametrize("path", ["images/generations", "images/edits", "chat/completions"])
def test_no_key_no_picture(server: GenerationServer, path: str) -> None:
    for key in (None, "wrong"):
        assert server.request("POST", f"/v1/{path}", key, json={}).status_code == 401
    assert server.request("GET", "/v1/models", OTHER_KEY).status_code == 200


def test_whatever_comes_is_no_fault_of_the_server(server: GenerationServer) -> None:
    assert fuzz(server, ("/v1/images", "/v1/chat")) == []
    assert server.request("POST", "/v1/images/generations", json=generation_body()).is_success


def test_the_examples(server: GenerationServer, tmp_path: Path) -> None:
    ask = ["--url", f"{server.url}/v1", "--size", SIZE, "--steps", "3"]
    change = ["image_to_image.py", "painted.png", "a blue fox"]
    env = {**os.environ, "OPENAI_API_KEY": KEY}
    for script, *arguments in (["text_to_image.py"], change):
        command = [sys.executable, str(EXAMPLES / script), *arguments, *ask]
        subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=120)
    for name in ("painted.png", "watched.png", "changed.png"):
        assert Image.open(tmp_path / name).size == (32, 32)


async def cancelled(client: httpx.AsyncClient, rng: random.Random, edit: bool) -> None:
    """A request whose client leaves at a random moment."""
    fields = {"prompt": "a cat", "size": SIZE, "stream": rng.random() < 0.5}
    fields |= {"num_inference_steps": rng.randint(1, 30), "n": rng.randint(1, 3)}
    if edit:
        files = {"image": ("a.png", png(), "image/png")}
        data = {name: str(value).lower() for name, value in fields.items()}
        sending = client.post("/v1/images/edits", data=data, files=files)
    else:
        sending = client.post("/v1/images/generations", json=fields)
    try:
        async with asyncio.timeout(rng.choice((0.01, 0.05, 0.2)) * rng.random()):
            await sending
    except (TimeoutError, httpx.HTTPError):
        return


async def cancel_many(server: GenerationServer, count: int, seed: int) -> None:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=AT_ONCE)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, limits=limits, timeout=60
    ) as client:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(edit: bool) -> None:
            async with slots:
                await cancelled(client, rng, edit)

        await asyncio.gather(*(one(rng.random() < 0.3) for _ in range(count)))


def test_cancelling_leaves_nothing_behind(server: GenerationServer, client) -> None:
    """300 clients leave at random moments: no request, no file and no memory stays."""
    before = generate(client).data[0].b64_json
    asyncio.run(cancel_many(server, CANCELS // 4, seed=0))  # what is kept for good is kept now
    server.wait_idle()
    memory, files = server.memory(), server.files()
    asyncio.run(cancel_many(server, CANCELS - CANCELS // 4, seed=1))
    server.wait_idle()
    assert server.files() == files
    assert server.memory() - memory < 40 << 20
    assert generate(client).data[0].b64_json == before


@pytest.mark.parametrize("backend", ["openai-images-omni", "openai-image-edits-omni"])
def test_bench_serve(
    server: GenerationServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """REFERENCE.md 2.7."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    requests = ("--dataset-name", "sentences-mm", "--random-mm-bucket-config", "{(32, 32, 1): 1}")
    body = ("--extra-body", json.dumps({"size": SIZE, **STEPS}))
    options = (*requests, "--num-prompts", "3", "--request-rate", "50", *body)
    result = bench(server.url, backend, tmp_path, *options)
    assert (result["completed"], result["failed"]) == (3, 0), result["errors"]
    assert (result["total_images"], result["average_pixels_per_image"]) == (3, 32 * 32)
    steps = STEPS["num_inference_steps"]
    latency = result["mean_image_generation_ms"]
    assert result["mean_denoise_step_latency_ms"] == pytest.approx(latency / steps)
    assert latency == pytest.approx(result["mean_e2el_ms"])
