# SPDX-License-Identifier: Apache-2.0
"""The media that a benchmark request brings, in OpenAI's shape of chat content."""

import base64
from typing import Any

from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput


def parts(asked: RequestFuncInput) -> list[dict[str, Any]]:
    """They as parts of a message."""
    content = asked.multi_modal_content
    if content is None:
        return []
    return content if isinstance(content, list) else [content]


def items(asked: RequestFuncInput, kind: str) -> list[str]:
    """The URLs of one kind: `image_url`, `audio_url` or `video_url`."""
    return [part[kind]["url"] for part in parts(asked) if part["type"] == kind]


def content_of(data_url: str) -> tuple[str, bytes]:
    """Media type and bytes of a data URL."""
    head, _, data = data_url.partition(",")
    return head.removeprefix("data:").partition(";")[0], base64.b64decode(data)
