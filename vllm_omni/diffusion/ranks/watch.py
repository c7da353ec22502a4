# SPDX-License-Identifier: Apache-2.0
"""The end of one rank is the end of all: those that are left would wait for it in a collective."""

import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait


class Watch:
    """Sees processes end, in a thread of its own.

    Args:
        processes: What each is, by process id.
        on_end: Called in that thread with the first that has ended.
    """

    def __init__(self, processes: Mapping[int, str], on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._watched = {os.pidfd_open(pid): name for pid, name in processes.items()}
        self._reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        os.close(self._writer)
        self._thread.join()
        for descriptor in (*self._watched, self._reader):
            os.close(descriptor)

    def _run(self) -> None:
        ready = wait([self._reader, *self._watched])
        if self._reader not in ready:
            self._on_end(next(self._watched[fd] for fd in ready if isinstance(fd, int)))
