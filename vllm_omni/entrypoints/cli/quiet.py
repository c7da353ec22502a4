# SPDX-License-Identifier: Apache-2.0
"""Signals while a command is only being imported: nothing has been started that had to end."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALLED = 128


@contextmanager
def quiet_signals() -> Iterator[None]:
    """Have SIGINT and SIGTERM end this process at once and without a traceback, with 130 or 143.

    An exception would do neither for sure: code that is being imported may take it for its own.
    """
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(_SIGNALLED + number)
