# SPDX-License-Identifier: Apache-2.0
"""Large media that go around the JSON parser arrive as they would through it."""

import base64
import json
import os
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.entrypoints.conftest import MODEL, LiveServer
from vllm_omni.entrypoints.openai.large_bodies import LARGE_PAYLOAD, Collected, cut_out
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

SMALL = base64.b64encode(os.urandom(90)).decode()
LARGE = base64.b64encode(os.urandom(LARGE_PAYLOAD)).decode()


def url_part(kind: str, payload: str, media_type: str, flat: bool, detail: bool) -> dict[str, Any]:
    url = f"data:{media_type};base64,{payload}"
    fields = {"detail": "low", "url": url} if detail else {"url": url}
    return {"type": f"{kind}_url", f"{kind}_url": url if flat else fields}


def sound_part(payload: str, format_first: bool) -> dict[str, Any]:
    fields = {"data": payload, "format": "wav"}
    if format_first:
        fields = dict(reversed(fields.items()))
    return {"type": "input_audio", "input_audio": fields}


PAYLOADS = st.sampled_from([SMALL, LARGE])
PARTS = st.one_of(
    st.builds(
        url_part,
        st.sampled_from(["image", "audio", "video"]),
        PAYLOADS,
        st.sampled_from(["image/png", "audio/wav;x=1", ""]),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(sound_part, PAYLOADS, st.booleans()),
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=20)),
)


def test_what_is_collected_is_all_that_came() -> None:
    pieces = [os.urandom(size) for size in (3 << 20, 0, 1, 70_000, 5 << 20)]
    collected = Collected()
    collected.append(pieces[:2])
    collected.append([])
    collected.append(map(bytearray, pieces[2:]))
    assert collected.whole()[:] == b"".join(pieces)


@settings(max_examples=40, deadline=None)
@given(st.lists(PARTS, max_size=6), st.sampled_from([None, 1]))
def test_what_is_cut_out_is_all_that_is_missing(parts: list[Any], indent: int | None) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}, indent=indent)
    rest, payloads = cut_out(bytearray(body.encode()))
    assert len(payloads) == body.count(LARGE)
    restored = rest.decode()
    for name, payload in payloads.items():
        assert restored.count(name) == 1
        restored = restored.replace(name, bytes(payload).decode())
    assert restored == body


@pytest.mark.parametrize(
    "value",
    [
        {"text": f"data:image/png;base64,{LARGE}"},
        {"text": LARGE},
        {"data": LARGE},
        {"url": f"data:image/png;base64,{LARGE}"},
        {"image_url": {"url": f"data:video/jpeg;base64,{LARGE},{LARGE}"}},
        {"image_url": {"url": f"data:image/png;base64,\n{LARGE}"}},
        {"text": '"image_url": "data:image/png;base64,' + LARGE},
    ],
)
def test_what_is_no_medium_stays(value: Any) -> None:
    body = json.dumps(value).encode()
    assert cut_out(bytearray(body)) == (body, {})


@pytest.mark.parametrize("end", [b"", b'"', b"\\", b'"}'])
def test_a_broken_body_is_left_to_the_parser(end: bytes) -> None:
    body = b'{"image_url": "data:image/png;base64,' + LARGE.encode() + end
    rest, _ = cut_out(bytearray(body))
    with pytest.raises(json.JSONDecodeError):
        json.loads(rest[:-1])


def test_a_recording_of_a_speech_request_is_cut_out() -> None:
    url = f"data:audio/wav;base64,{LARGE}"
    for value in (url, [url]):
        rest, payloads = cut_out(bytearray(json.dumps({"input": "a", "ref_audio": value}).encode()))
        assert [bytes(each).decode() for each in payloads.values()] == [LARGE]
        assert LARGE not in rest.decode()


def test_a_large_picture_is_seen_as_it_is(server: LiveServer) -> None:
    """Two pictures of noise, each in a body that is cut and in one with an escape, which is not."""

    def answers(seed: int) -> list[str]:
        pixels = np.random.default_rng(seed).integers(0, 256, (520, 520, 3), np.uint8)
        url = media.data_url(media.encode_image(Image.fromarray(pixels)), "png")
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is it?"},
        ]
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 16,
                "temperature": 0,
                "logprobs": True,
            }
        )
        escaped = body.replace("base64,iVBOR", "base64,\\u0069VBOR")
        assert escaped != body
        replies = [post(text) for text in (body, escaped)]
        return [json.dumps(reply["choices"][0]["logprobs"]["content"]) for reply in replies]

    def post(body: str) -> Any:
        headers = {"Content-Type": "application/json"}
        url = f"{server.url}/v1/chat/completions"
        reply = httpx.post(url, content=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    first, second = answers(1), answers(2)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0], "the picture matters"


def test_a_large_picture_that_is_none_is_the_clients_fault(server: LiveServer) -> None:
    url = f"data:image/png;base64,{LARGE * 4}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    reply = server.chat(body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages"
