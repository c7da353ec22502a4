# SPDX-License-Identifier: Apache-2.0
"""Engine cores whose server is gone."""

import os
import select
import signal
import threading
import time

from vllm_omni.connectors.segments import raze

ORPHAN_STOP_S = 3.0
"""What an orphan gets to leave nothing behind before it is killed."""


def end_with(pid: int, deployment_id: str) -> None:
    """End this process when the process `pid` is gone, SIGKILL included.

    vLLM does no such thing, and an orphaned engine core keeps its memory for good.
    """
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        raise SystemExit("the process that this one belongs to has ended") from None

    def wait() -> None:
        select.select([parent], [], [])
        raze(deployment_id)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_STOP_S)
        raze(deployment_id)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-host", daemon=True).start()
