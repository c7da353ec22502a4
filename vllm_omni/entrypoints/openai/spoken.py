# SPDX-License-Identifier: Apache-2.0
"""What was said under an audio id, for conversations that go on.

OpenAI's clients send an assistant's spoken turn back as `{"role": "assistant", "audio": {"id":
...}}`, without its text. The server remembers the transcript until `expires_at`.
"""

import time
from collections import OrderedDict
from typing import Any

from vllm_omni.errors import OmniClientError

MAX_REMEMBERED = 4096


class SpokenTexts:
    """Transcripts by audio id; the oldest go first when there are too many.

    Args:
        limit: Most transcripts to keep.
    """

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._texts: OrderedDict[str, tuple[int, str]] = OrderedDict()

    def remember(self, audio_id: str, expires_at: int, transcript: str) -> None:
        """Keep a transcript until a Unix time."""
        self._texts[audio_id] = (expires_at, transcript)
        if len(self._texts) > self._limit:
            self._texts.popitem(last=False)

    def fill_in(self, messages: list[Any]) -> None:
        """Give messages that refer to a sound, and say nothing else, its transcript as content.

        Raises:
            OmniClientError: The sound is unknown or has expired.
        """
        for i, message in enumerate(messages):
            if isinstance(message, dict) and message.get("audio") and not message.get("content"):
                message["content"] = self._text(message["audio"]["id"], i)

    def _text(self, audio_id: str, index: int) -> str:
        expires_at, transcript = self._texts.get(audio_id, (0, ""))
        if expires_at < time.time():
            raise OmniClientError(
                f"`messages.{index}.audio.id`: {audio_id!r} is unknown or has expired; "
                "send the message's text in `content`.",
                param=f"messages.{index}.audio.id",
                code="audio_not_found",
            )
        return transcript
