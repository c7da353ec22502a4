# SPDX-License-Identifier: Apache-2.0
"""Fetching a deployment's checkpoints, once, before its stages are started.

A process of its own does it: it can be ended in the midst of a download, and the server is left
without the threads of the hub's library.
"""

import math
import os
import threading
from multiprocessing.connection import wait

from vllm.utils.system_utils import set_process_title

from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.config.prefetch import Checkpoint, checkpoints, fetch, node_lock, vllm_lock
from vllm_omni.errors import OmniConfigError
from vllm_omni.fork_server import Lifeline, fork_server
from vllm_omni.start_report import Check, StartFailure, StartReport, receive_report

STOP_S = 5.0


def prefetch(plan: DeploymentPlan, check: Check) -> None:
    """Bring what the stages read from the hub into the local cache; nothing for local folders.

    Args:
        plan: What is about to be started.
        check: Called often; what it raises ends the download.

    Raises:
        OmniConfigError: A checkpoint cannot be had; the message names it and says what to do.
    """
    for checkpoint in checkpoints(plan):
        with (
            node_lock(checkpoint.model, check),
            vllm_lock(checkpoint.model, checkpoint.cache_dir, check),
        ):
            _fetch(checkpoint, check)


def _fetch(checkpoint: Checkpoint, check: Check) -> None:
    child = fork_server().fork(_main, checkpoint, environment=os.environ)
    try:
        report = receive_report(child, math.inf, check)
        report.raise_for_failure()
    except StartFailure as failure:
        whose = "" if repr(checkpoint.model) in failure.reason else f"model {checkpoint.model!r}: "
        raise OmniConfigError(f"{whose}{failure.reason}") from failure
    finally:
        child.stop(STOP_S)


def _main(lifeline: Lifeline, checkpoint: Checkpoint) -> None:
    """The process that downloads."""
    set_process_title("OmniPrefetch")
    threading.Thread(target=_end_with_server, args=(lifeline,), daemon=True).start()
    try:
        fetch(checkpoint)
        report = StartReport(pid=os.getpid())
    except OmniConfigError as error:
        report = StartReport(reason=str(error), misconfigured=True)
    lifeline.link.send_bytes(report.encode())


def _end_with_server(lifeline: Lifeline) -> None:
    wait([lifeline.link, lifeline.server])
    os._exit(1)
