# SPDX-License-Identifier: Apache-2.0
"""What SIGTERM and SIGINT do to a server: the first asks it to end, a second ends it at once."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIGNALLED = 128


class StopRequestedError(BaseException):
    """A signal came while the server was starting. Not an `Exception`: no stage failed to start."""


class StopSignals:
    """Installs the handlers; made in the main thread.

    A handler interrupts whatever runs, between the fork of a process and the note that it is there
    too, so it raises nothing: what takes long asks `check` from time to time.

    Attributes:
        requested: A signal has come.
    """

    def __init__(self) -> None:
        self.requested = False
        self._on_request: Callable[[], None] | None = None
        self.install()

    def install(self) -> None:
        """Install the handlers, again if something else has taken their place."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def check(self) -> None:
        """Raise `StopRequestedError` if a signal has come."""
        if self.requested:
            raise StopRequestedError

    def call(self, on_request: Callable[[], None]) -> None:
        """Have a signal call `on_request` in the main thread, at once if one has come already."""
        self._on_request = on_request
        if self.requested:
            on_request()

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            print("vllm-omni: stopped by a second signal", file=sys.stderr, flush=True)
            os._exit(_SIGNALLED + number)
        self.requested = True
        print("vllm-omni: stopping; a second signal does it at once", file=sys.stderr, flush=True)
        if self._on_request is not None:
            self._on_request()
