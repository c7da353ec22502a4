# SPDX-License-Identifier: Apache-2.0
"""A video's file as an answer."""

from typing import BinaryIO

from fastapi.responses import FileResponse, JSONResponse
from starlette.types import Message, Receive, Scope, Send

from vllm_omni.entrypoints.openai.error_handlers import error_body


class ContentResponse(FileResponse):
    """An open file, whole or a range of it; closed afterwards.

    The file may have lost its name: a video that is deleted while it is sent is sent to its end.
    What is wrong with a range is told in OpenAI's shape.

    Args:
        file: Open.
        media_type: What it is.
        filename: What the client may call it.
    """

    def __init__(self, file: BinaryIO, media_type: str, filename: str) -> None:
        super().__init__(path_of(file), media_type=media_type, filename=filename)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        refused: Message | None = None

        async def told(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refused = message
            if refused is None:
                await send(message)

        with self._file:
            await super().__call__(scope, receive, told)
        if refused is not None:
            status = refused["status"]
            message = "Range: cannot be read, or nothing of the video lies in it"
            body = error_body(message, status, "BadRequestError", "Range")
            await JSONResponse(body, status)(scope, receive, send)


def path_of(file: BinaryIO) -> str:
    """A path to an open file, whatever became of its name."""
    return f"/proc/self/fd/{file.fileno()}"
