# SPDX-License-Identifier: Apache-2.0
"""`/v1/images/generations` and `/v1/images/edits`."""

import base64
import io
import json
from typing import Any

import aiohttp
from PIL import Image
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni.benchmarks.backends.calling import AnswerError, check, model_of, post
from vllm_omni.benchmarks.backends.media import content_of, items
from vllm_omni.benchmarks.outputs import OmniOutput


async def paint(
    asked: RequestFuncInput, session: aiohttp.ClientSession, output: OmniOutput
) -> None:
    """Have a picture made."""
    await _pictures(asked, session, output, json=_fields(asked))


async def edit(asked: RequestFuncInput, session: aiohttp.ClientSession, output: OmniOutput) -> None:
    """Have the request's pictures changed."""
    form = form_of(_fields(asked))
    images = items(asked, "image_url")
    for number, url in enumerate(images):
        media_type, data = content_of(url)
        name = "image" if len(images) == 1 else "image[]"
        form.add_field(name, data, filename=f"{number}.jpg", content_type=media_type)
    await _pictures(asked, session, output, data=form)


def _fields(asked: RequestFuncInput) -> dict[str, Any]:
    body = {"model": model_of(asked), "prompt": asked.prompt, "response_format": "b64_json"}
    return body | (asked.extra_body or {})


def form_of(fields: dict[str, Any]) -> aiohttp.FormData:
    """As a multipart form: texts as they are, anything else as JSON."""
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        form.add_field(name, value if isinstance(value, str) else json.dumps(value))
    return form


async def _pictures(
    asked: RequestFuncInput, session: aiohttp.ClientSession, output: OmniOutput, **body: Any
) -> None:
    output.steps = steps_of(asked)
    async with post(asked, session, **body) as response:
        await check(response)
        answer = await response.read()
        output.ended()
    made = json.loads(answer)["data"]
    if not made:
        raise AnswerError("the answer has no picture")
    for each in made:
        width, height = _size(each)
        output.images += 1
        output.pixels += width * height


def steps_of(asked: RequestFuncInput) -> int | None:
    """How many denoising steps it asks for, if it says so."""
    steps = (asked.extra_body or {}).get("num_inference_steps")
    return None if steps is None else int(steps)


def _size(made: dict[str, Any]) -> tuple[int, int]:
    """Of a picture in the answer; only its header is read."""
    data = made.get("b64_json")
    content = base64.b64decode(data) if data else content_of(made["url"])[1]
    with Image.open(io.BytesIO(content)) as picture:
        return picture.size
