# SPDX-License-Identifier: Apache-2.0
"""How late an event loop wakes up."""

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.02


class LoopLagProbe:
    """Wakes up at a fixed interval and reports by how much that was late.

    It runs only while there is something to do, so that an idle server sleeps.

    Args:
        report: Called with each lag, in seconds.
    """

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin on the running loop, if it has not begun."""
        if self._timer is None:
            self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        """End until the next start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(INTERVAL_S, self._tick, loop, loop.time() + INTERVAL_S)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._report(max(0.0, loop.time() - due))
        self._schedule(loop)
