# SPDX-License-Identifier: Apache-2.0
"""Second attempts at requests that were lost with a replica before they had said anything.

A second attempt runs under an id of its own, so that nothing which a live stage still says about
the first can be taken for its output. The caller knows only the id that it submitted.
"""

import msgspec

from vllm_omni.engine.messages import Emit, ErrorMessage, Message

_SEPARATOR = "~"


class Attempts:
    """Which id a request has in the stages, and which one at its caller, where they differ."""

    def __init__(self) -> None:
        self._current: dict[str, str] = {}
        self._caller: dict[str, str] = {}

    def again(self, request_id: str) -> str:
        """A new id for a request that starts over, which it does once."""
        current = f"{request_id}{_SEPARATOR}2"
        self._current[request_id] = current
        self._caller[current] = request_id
        return current

    def is_second(self, request_id: str) -> bool:
        """Whether a request has started over before."""
        return request_id in self._caller

    def current(self, caller_id: str) -> str:
        """The id in the stages of what the caller submitted under `caller_id`."""
        return self._current.get(caller_id, caller_id)

    def forget(self, request_id: str) -> None:
        """Note that an attempt has ended and its last message has been sent."""
        caller = self._caller.pop(request_id, None)
        if caller is not None:
            del self._current[caller]

    def for_caller(self, messages: list[Message]) -> list[Message]:
        """The messages under the ids that the caller knows."""
        if not self._caller:
            return messages
        return [self._translated(message) for message in messages]

    def _translated(self, message: Message) -> Message:
        if not isinstance(message, Emit | ErrorMessage) or message.request_id not in self._caller:
            return message
        return msgspec.structs.replace(message, request_id=self._caller[message.request_id])
