# SPDX-License-Identifier: Apache-2.0
"""Requests for pictures, videos and sounds: what is wrong is told with the field's name (A-44)."""

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import regex as re
from fastapi import FastAPI, Request
from PIL import Image

from vllm_omni.entrypoints.openai.addresses import AddressPolicy
from vllm_omni.entrypoints.openai.error_handlers import install_error_handlers
from vllm_omni.entrypoints.openai.forms import read_form
from vllm_omni.entrypoints.openai.generation.films import FILES, OBJECTS, read_media
from vllm_omni.entrypoints.openai.generation.service import Generation
from vllm_omni.entrypoints.openai.media_fetch import FetchSettings
from vllm_omni.entrypoints.openai.protocol.audio_generate import AudioGenerateRequest
from vllm_omni.entrypoints.openai.protocol.diffusion_chat import DiffusionChatRequest
from vllm_omni.entrypoints.openai.protocol.images import ImageEditRequest, ImageGenerationRequest
from vllm_omni.entrypoints.openai.protocol.videos import VideoGenerationRequest
from vllm_omni.entrypoints.openai.references import References, repainted
from vllm_omni.media.audio_encode import encode
from vllm_omni.media.video_encode import encode_video
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]
MAX_PIXELS = 64 * 64


def picture(size: tuple[int, int] = (32, 24), mode: str = "RGB", format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, "red" if mode == "RGB" else None).save(file, format)
    return file.getvalue()


PNG = ("a.png", picture(), "image/png")


def application() -> FastAPI:
    """The routes' front halves: everything before the engine."""
    app = FastAPI()
    install_error_handlers(app)
    references = References(FetchSettings(AddressPolicy()), MAX_PIXELS)
    engine: Any = None  # nothing gets so far
    generation = Generation(engine, (), references, MAX_PIXELS)

    @app.post("/images")
    async def images(body: ImageGenerationRequest) -> dict[str, Any]:
        return {"body": body.model_dump(), "dimensions": body.dimensions()}

    @app.post("/chat")
    async def chat(body: DiffusionChatRequest) -> dict[str, Any]:
        return {"ignored": body.ignored(), "unknown": body.unknown()}

    @app.post("/audio")
    async def audio(body: AudioGenerateRequest) -> dict[str, Any]:
        return body.model_dump()

    @app.post("/edits")
    async def edits(request: Request) -> dict[str, Any]:
        async with read_form(
            request,
            ImageEditRequest,
            files=("image", "mask"),
            objects=("lora", "extra_params"),
            lists=("url",),
            max_field_bytes=1 << 16,
        ) as form:
            sources = [*form.files.get("image", ()), *form.fields.url]
            pictures = [await references.image(each, "image") for each in sources]
            masks = [
                await references.mask(each, pictures[0].size, "mask")
                for each in form.files.get("mask", ())
            ]
            return {
                "body": form.fields.model_dump(),
                "sizes": [each.size for each in pictures],
                "masks": [each.getextrema() for each in masks],
            }

    @app.post("/videos")
    async def videos(request: Request) -> dict[str, Any]:
        async with read_form(
            request,
            VideoGenerationRequest,
            files=FILES,
            objects=OBJECTS,
            max_field_bytes=1 << 20,
        ) as form:
            fields = form.fields
            found: dict[str, Any] = {"body": fields.model_dump(), "frames": fields.frames(16)}
            found["dimensions"] = fields.dimensions()
            media = await read_media(generation, form)
            found["media"] = {name: described(value) for name, value in media.items()}
            return found

    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as it:
        yield it


def described(medium: Any) -> Any:
    """Size of a picture, shape of a video, samples and rate of a sound."""
    match medium:
        case Image.Image():
            return medium.size
        case np.ndarray():
            return medium.shape
        case (np.ndarray() as samples, int(rate)):
            return len(samples), rate
    return [described(each) for each in medium]


def assert_blames(reply: httpx.Response, param: str | None, status: int = 400) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert len(error["message"]) < 2100
    if param:
        assert param.split(".")[0] in error["message"]
    return error["message"]


IMAGE_FAULTS: list[tuple[str, Any]] = [
    *(("prompt", value) for value in ("", None, 5, "a" * 100_000, ["a"], "\ud800")),
    *(("n", value) for value in (0, -1, 11, 10**30, "two", 1.5, None)),
    *(("size", value) for value in ("big", "8x8", "99999x99999", "1024", "-1x5", "0x0", 5)),
    *(("output_format", value) for value in ("gif", "", "../png", 3)),
    *(("output_compression", value) for value in (-1, 101, "x")),
    *(("partial_images", value) for value in (-1, 4)),
    *(("response_format", value) for value in ("b64", 1)),
    *(("background", value) for value in ("plaid", 1)),
    *(("num_inference_steps", value) for value in (0, 1001, -5, "many")),
    *(("guidance_scale", value) for value in (-1, 1e9, "inf", "nan")),
    *(("seed", value) for value in (-1, 2**63, 1.5, "x")),
    *(("strength", value) for value in (-0.1, 1.1)),
    *(("generator_device", value) for value in ("/dev/null", "cuda:0; rm", "tpu")),
    *(("lora.name", {"name": value}) for value in ("", "../../etc/passwd", "/etc", "a\0b")),
    *(("lora.scale", {"name": "a", "scale": value}) for value in (1e9, "nan")),
    *(("width", value) for value in (8, 20_000)),
    *(("layers", value) for value in (0, 1000)),
    ("extra_params", "x"),
    ("extra_params", {str(i): i for i in range(300)}),
]


@pytest.mark.parametrize(("param", "value"), IMAGE_FAULTS)
async def test_each_field_of_images_has_its_bounds(client, param: str, value: Any) -> None:
    body = {"prompt": "a cat", param.partition(".")[0]: value}
    headers = {"content-type": "application/json"}
    reply = await client.post("/images", content=json.dumps(body), headers=headers)
    assert_blames(reply, param)
    assert (await client.post("/images", json={"prompt": "a cat"})).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"width": 64}, "height"),
        ({"height": 64}, "width"),
        ({"partial_images": 1}, "partial_images"),
        ({"background": "transparent", "output_format": "jpeg"}, "background"),
        ({}, "prompt"),
        ({"style": "vivid"}, "style"),
        ({"input_fidelity": "high"}, "input_fidelity"),
    ],
)
async def test_what_does_not_go_together(client, fields: dict[str, Any], param: str) -> None:
    prompt = {} if param == "prompt" else {"prompt": "a cat"}
    assert_blames(await client.post("/images", json={**prompt, **fields}), param)


SIDES = {"width": 32, "height": 16}


@pytest.mark.parametrize(
    ("fields", "param", "other"),
    [
        ({"n": 2, "num_outputs_per_prompt": 3}, "num_outputs_per_prompt", "n"),
        ({"size": "64x48", **SIDES}, "size", "width"),
        ({"true_cfg_scale": 1, "cfg_scale": 2}, "cfg_scale", "true_cfg_scale"),
        ({"sys_type": "a", "use_system_prompt": "b"}, "sys_type", "use_system_prompt"),
        ({"size": "64x48", "extra_body": {"size": "32x32"}}, "extra_body.size", "size"),
    ],
)
async def test_two_fields_that_contradict_each_other(client, fields, param, other) -> None:
    reply = await client.post("/images", json={"prompt": "a cat", **fields})
    assert f"`{other}" in assert_blames(reply, param)


async def test_extra_body_is_as_if_beside(client) -> None:
    body = {"prompt": "a cat", "extra_body": {"size": "64x48", "n": 2, "style": None}}
    reply = (await client.post("/images", json=body)).json()
    assert (reply["dimensions"], reply["body"]["n"]) == ([64, 48], 2)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages.0.content.0.image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            "messages.0.content.0.image_url",
        ),
        ({"role": "robot"}, "messages.0"),
    ],
)
async def test_places_are_those_of_the_body(client, message, param: str) -> None:
    """Row A-44: nothing of how the body is checked is told."""
    told = assert_blames(await client.post("/chat", json={"messages": [message]}), param)
    assert not re.search(r"function-|\[|constrained|Part|ImageUrl|tagged", told), told


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
        ({"n": 2, "num_outputs_per_prompt": 3}, "num_outputs_per_prompt"),
    ],
)
async def test_a_conversation_refuses_what_its_answer_would_lack(client, fields, param) -> None:
    body = {"messages": [{"role": "user", "content": "a cat"}], **fields}
    assert_blames(await client.post("/chat", json=body), param)


async def test_what_only_talking_models_use_is_no_error(client) -> None:
    body = {"messages": [{"role": "user", "content": "a cat"}], "temperature": 1, "tools": []}
    reply = (await client.post("/chat", json={**body, "logprobs": False, "foo": 1})).json()
    assert reply == {"ignored": ["logprobs", "temperature", "tools"], "unknown": {"foo": 1}}


@pytest.mark.parametrize(
    ("fields", "dimensions"),
    [
        ({}, None),
        ({"size": "auto"}, None),
        ({"size": "64x48"}, [64, 48]),
        ({"size": " 64 X 48 "}, [64, 48]),
        ({"width": 32, "height": 16}, [32, 16]),
        ({"size": "32x16", "width": 32, "height": 16}, [32, 16]),
    ],
)
async def test_sizes(client, fields: dict[str, Any], dimensions: list[int] | None) -> None:
    reply = await client.post("/images", json={"prompt": "a cat", **fields})
    assert reply.json()["dimensions"] == dimensions


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("input", value) for value in ("", None, 1)),
        *(("audio_length", value) for value in (0, -1, 1e9, "nan")),
        *(("audio_start", value) for value in (-1, 1e9)),
        *(("response_format", value) for value in ("midi", 5)),
        *(("speed", value) for value in (0.1, 5)),
        *(("frame_rate", value) for value in (0, 1e9)),
        *(("num_frames", value) for value in (0, 10**9)),
    ],
)
async def test_each_field_of_sounds_has_its_bounds(client, param: str, value: Any) -> None:
    assert_blames(await client.post("/audio", json={"input": "rain", param: value}), param)


VIDEO_FAULTS: list[tuple[str, str]] = [
    *(("prompt", value) for value in ("", "a" * 100_000)),
    *(("seconds", value) for value in ("0", "-4", "1e9", "nan", "long")),
    *(("size", value) for value in ("1x1", "huge", "65536x65536")),
    *(("fps", value) for value in ("0", "1000", "x")),
    *(("num_frames", value) for value in ("0", "1000000", "1.5")),
    *(("quality", value) for value in ("-1", "11")),
    *(("aspect_ratio", value) for value in ("16/9", "0:1", "-1:1")),
    *(("num_outputs_per_prompt", value) for value in ("0", "2")),
    *(("generate_sound", value) for value in ("perhaps",)),
    *(("extra_params", value) for value in ("{", "[]", "5", "[" * 100_000)),
    *(("audio_reference", value) for value in ("", "{", "null]", "[]", '"x"')),
    ("audio_reference.audio_url", '{"audio_url": ""}'),
    ("audio_reference.audio_url", "{}"),
    ("audio_reference.more", '{"audio_url": "data:audio/wav;base64,AAAA", "more": 1}'),
    ("video_reference.video_url", '{"video_url": 5}'),
]


@pytest.mark.parametrize(("param", "value"), VIDEO_FAULTS)
async def test_each_field_of_videos_has_its_bounds(client, param: str, value: str) -> None:
    fields = {"prompt": "a cat", param.partition(".")[0]: value}
    assert_blames(await client.post("/videos", data=fields), param)


@pytest.mark.parametrize(
    ("fields", "dimensions", "frames"),
    [
        ({}, None, None),
        ({"seconds": "2"}, None, 32),
        ({"seconds": "2", "fps": "8"}, None, 16),
        ({"seconds": "2", "num_frames": "33"}, None, 33),
        ({"seconds": "2", "num_frames": "16", "fps": "8"}, None, 16),
        ({"aspect_ratio": "16:9", "short_edge": "90"}, [160, 90], None),
        ({"aspect_ratio": "9:16", "short_edge": "90"}, [90, 160], None),
        ({"size": "64x32"}, [64, 32], None),
        ({"size": "64x36", "aspect_ratio": "16:9", "short_edge": "36"}, [64, 36], None),
    ],
)
async def test_how_large_and_how_long(client, fields, dimensions, frames) -> None:
    reply = (await client.post("/videos", data={"prompt": "a cat", **fields})).json()
    assert (reply["dimensions"], reply["frames"]) == (dimensions, frames)


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


async def test_a_sound_comes_by_data_url_beside_a_video(client) -> None:
    """Row A-40: `audio_reference` goes with the other references."""
    frames = np.zeros((5, 16, 16, 3), np.uint8)
    fields = {
        "prompt": "a cat",
        "audio_reference": json.dumps(
            {"audio_url": data_url(encode(sound(0.5, 16_000), 16_000, "wav"), "audio/wav")}
        ),
        "video_reference": json.dumps(
            {"video_url": data_url(encode_video(frames, 8), "video/mp4")}
        ),
    }
    reply = (await client.post("/videos", data=fields)).json()
    assert reply["media"] == {"audio": [8000, 16_000], "video": [5, 16, 16, 3]}


@pytest.mark.parametrize(
    ("count", "media"),
    [
        (1, {"image": [32, 24]}),
        (2, {"image": [32, 24], "last_image": [32, 24]}),
        (3, {"reference_images": [[32, 24]] * 3}),
    ],
)
@pytest.mark.parametrize("by", ["file", "url"])
async def test_one_two_and_many_pictures(client, by: str, count: int, media) -> None:
    if by == "file":
        files = [("input_reference", PNG)] * count
        reply = await client.post("/videos", data={"prompt": "a cat"}, files=files)
    else:
        urls = [{"image_url": data_url(picture(), "image/png")}] * count
        fields = {"prompt": "a cat", "image_reference": json.dumps(urls if count > 1 else urls[0])}
        reply = await client.post("/videos", data=fields)
    assert reply.json()["media"] == media


async def test_an_uploaded_video(client) -> None:
    film = ("a.mp4", encode_video(np.zeros((2, 16, 16, 3), np.uint8), 8), "video/mp4")
    reply = await client.post("/videos", data={"prompt": "a cat"}, files={"input_reference": film})
    assert reply.json()["media"] == {"video": [2, 16, 16, 3]}
    wrong = ("a.mp4", picture(), "video/mp4")
    reply = await client.post("/videos", data={"prompt": "a cat"}, files={"input_reference": wrong})
    assert_blames(reply, "input_reference")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"image_reference": "[]"}, "image_reference"),
        ({"image_reference": '{"file_id": "file-1"}'}, "image_reference.image_url"),
        ({"image_reference": '{"image_url": "ftp://x"}'}, "image_reference"),
        ({"enable_frame_interpolation": "true"}, "enable_frame_interpolation"),
        ({"size": "64x32", "width": "32", "height": "32"}, "size"),
        ({"size": "64x32", "aspect_ratio": "1:1", "short_edge": "32"}, "aspect_ratio"),
        (
            {"image_reference": '{"image_url": "x"}', "video_reference": '{"video_url": "x"}'},
            "video_reference",
        ),
    ],
)
async def test_references_that_are_none(client, fields, param: str) -> None:
    assert_blames(await client.post("/videos", data={"prompt": "a cat", **fields}), param)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:audio/wav;base64,!!!", "audio data is not valid base64."),
        ("data:audio/wav,plain", "audio data is not valid base64."),
        ("data:audio/wav;base64,", "audio data is empty."),
        ("data:image/png;base64,AAAA", "should be of type audio"),
        ("data:audio/wav;base64,AAAAAAAA", "cannot read the audio"),
        ("/etc/passwd", "must be an http(s) URL or data URL."),
        ("file:///etc/passwd", "must be an http(s) URL or data URL."),
        ("ftp://example.com/a.wav", "must be an http(s) URL or data URL."),
        ("http://127.0.0.1:1/a.wav", "failed to download audio."),
        ("http://169.254.169.254/latest", "failed to download audio."),
        ("http://[::1", "failed to download audio."),
    ],
)
async def test_sounds_that_cannot_be_had(client, url: str, reason: str) -> None:
    """Row A-41."""
    fields = {"prompt": "a cat", "audio_reference": json.dumps({"audio_url": url})}
    assert reason in assert_blames(await client.post("/videos", data=fields), "audio_reference")


@pytest.mark.parametrize("part", ["image", "image[]"])
async def test_pictures_by_file_and_url(client, part: str) -> None:
    url = data_url(picture((16, 16), format="WEBP"), "image/webp")
    reply = await client.post(
        "/edits",
        data={"prompt": "a hat", "n": "2", "url[]": url, "lora": '{"name": "a"}', "stream": "true"},
        files=[(part, PNG), (part, ("b.jpg", picture((20, 10), format="JPEG"), "image/jpeg"))],
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["sizes"] == [[32, 24], [20, 10], [16, 16]]
    body = reply.json()["body"]
    assert (body["n"], body["stream"], body["lora"]["name"]) == (2, True, "a")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (("a.png", b"", "image/png"), "empty"),
        (("a.png", b"\x89PNG not", "image/png"), "cannot read the image"),
        (("a.png", picture()[:-30], "image/png"), "cannot read the image"),
        (("a.txt", b"hello", "text/plain"), "should be of type image"),
        (("a.html", picture(), "text/html"), "should be of type image"),
        (("a.svg", b"<svg/>", "image/svg+xml"), "cannot read the image"),
        (("../../a.png", b"GIF89a", "image/gif"), "cannot read the image"),
        (("a.png", picture((4000, 4000), "1"), "image/png"), "more than the 4096"),
        (("a.png", picture((30_000, 30_000), "1", "TIFF"), None), "exceeds limit"),
    ],
)
async def test_pictures_that_are_none(client, file, reason: str) -> None:
    reply = await client.post("/edits", data={"prompt": "a hat"}, files={"image": file})
    assert reason in assert_blames(reply, "image")
    good = await client.post("/edits", data={"prompt": "a hat"}, files={"image": PNG})
    assert good.json()["sizes"] == [[32, 24]]


async def test_a_mask_is_as_large_as_its_picture(client) -> None:
    def files(mask: bytes) -> dict[str, Any]:
        return {"image": PNG, "mask": ("m.png", mask, "image/png")}

    data = {"prompt": "a hat"}
    reply = await client.post("/edits", data=data, files=files(picture((24, 32), "L")))
    assert "32x24" in assert_blames(reply, "mask")
    reply = await client.post("/edits", data=data, files=files(picture((32, 24), "RGBA")))
    assert reply.json()["masks"] == [[255, 255]]  # transparent: all of it is to be repainted


def test_masks_of_both_kinds() -> None:
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    clear.putpixel((1, 0), (9, 9, 9, 0))
    assert list(repainted(clear).tobytes()) == [0, 255]
    plain = Image.new("L", (2, 1))
    plain.putpixel((1, 0), 255)
    assert list(repainted(plain).tobytes()) == [0, 255]


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"prompt": "a", "image": "text"}, {"mask": PNG}, "image"),
        ({"prompt": "a"}, {"prompt": PNG}, "prompt"),
        ({"prompt": ["a", "b"]}, {"image": PNG}, "prompt"),
        ({}, {"image": PNG}, "prompt"),
        ({"prompt": "a", "n": "x"}, {"image": PNG}, "n"),
        ({"prompt": "a", "url": "gopher://x"}, {"image": PNG}, "image"),
    ],
)
async def test_parts_that_are_something_else(client, data, files, param: str) -> None:
    assert_blames(await client.post("/edits", data=data, files=files), param)


async def test_bodies_that_are_no_form(client) -> None:
    assert_blames(await client.post("/edits", json={"prompt": "a"}), None, 415)
    assert_blames(await client.post("/edits", content=b""), None, 415)
    broken = {"content-type": "multipart/form-data"}
    assert_blames(await client.post("/edits", content=b"x", headers=broken), None)
    cut = {"content-type": "multipart/form-data; boundary=b"}
    for content in (b"--b\r\nContent-Disp", b"--b\r\n\r\nx\r\n--b--\r\n", b""):
        assert (await client.post("/edits", content=content, headers=cut)).status_code == 400
    large = {"prompt": "a", "url": "data:" + "a" * (1 << 17)}
    reply = await client.post("/edits", data=large, files={"image": PNG})
    assert reply.status_code == 400
