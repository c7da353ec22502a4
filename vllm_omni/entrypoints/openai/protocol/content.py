# SPDX-License-Identifier: Apache-2.0
"""Early checks of a body's strings and of the content parts of its messages.

vLLM validates parts while it renders the prompt, where an error no longer knows its place.
"""

from collections.abc import Iterator
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import MM_PARSER_MAP

# The keys that tell a part of words from one of media, whose type may be left out.
_WORDS = frozenset({"text", "thinking", "refusal", "name"})
# Types of parts that hold a URL, and where.
_URL_PARTS = ("image_url", "audio_url", "video_url")


def check_text(body: Any) -> None:
    """Refuse strings that are no Unicode text (JSON can escape half of a surrogate pair).

    Raises:
        VLLMValidationError: Names the place.
    """
    for path, text in _strings(body, ""):
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise VLLMValidationError(
                f"{path} has an unpaired surrogate at character {error.start}.", parameter=path
            ) from error


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (path or "The body"), str(key)
            yield from _strings(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _strings(item, f"{path}.{i}")


def check_parts(messages: Any) -> None:
    """Check references to sounds, and the parts of messages whose content is a list.

    Raises:
        VLLMValidationError: Names the part.
    """
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        if message.get("audio") is not None:
            _require_text(message["audio"], f"messages.{i}.audio", ("id",))
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            _check_part(part, f"messages.{i}.content.{j}")


def check_truncation(body: dict[str, Any]) -> None:
    """Refuse to cut a prompt that has media: what stands for them has no length before they are
    processed, so a cut would leave a part of it, or none of it.

    Raises:
        VLLMValidationError: The prompt is to be cut and has media.
    """
    if body.get("truncate_prompt_tokens") is not None and any(_media(body.get("messages"))):
        raise VLLMValidationError(
            "`truncate_prompt_tokens` is not possible for messages with media.",
            parameter="truncate_prompt_tokens",
        )


def _media(messages: Any) -> Iterator[bool]:
    """Of every part of messages, or of lists of messages, whether it is something to process."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, list):
            yield from _media(message)
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            yield isinstance(part, dict) and not _WORDS & part.keys()


def _check_part(part: Any, path: str) -> None:
    if not isinstance(part, dict):
        raise VLLMValidationError(f"{path} must be an object.", parameter=path)
    kind = part.get("type")
    if kind is None:
        return  # vLLM takes parts that are told by their one key
    if kind not in MM_PARSER_MAP:
        raise VLLMValidationError(
            f"{path}.type must be one of {sorted(MM_PARSER_MAP)}, got {str(kind)[:80]!r}.",
            parameter=f"{path}.type",
        )
    if kind == "text" and not isinstance(part.get("text"), str):
        raise VLLMValidationError(f"{path}.text must be a string.", parameter=f"{path}.text")
    if "uuid" in part:
        return  # media that the server may have cached under that name
    if kind in _URL_PARTS:
        _require_text(part.get(kind), f"{path}.{kind}", ("url",))
    elif kind == "input_audio":
        _require_text(part.get(kind), f"{path}.{kind}", ("data", "format"))


def _require_text(value: Any, path: str, names: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise VLLMValidationError(f"{path} must be an object.", parameter=path)
    for name in names:
        if not isinstance(value.get(name), str) or not value[name]:
            raise VLLMValidationError(
                f"{path}.{name} must be a string that is not empty.", parameter=f"{path}.{name}"
            )
