# SPDX-License-Identifier: Apache-2.0
"""Looking at processes that may end meanwhile."""

import contextlib

import psutil


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def command_line(process: psutil.Process) -> str:
    """Empty for a process that has ended, be it a zombie still."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only waits to be reaped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True
