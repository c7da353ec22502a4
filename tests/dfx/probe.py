# SPDX-License-Identifier: Apache-2.0
"""What a deployment holds, in this process and in its stages."""

import inspect
import os
from dataclasses import dataclass
from typing import Any

import psutil
from vllm.v1.engine.core import EngineCore

from tests.processes import command_line
from vllm_omni import AsyncOmni
from vllm_omni.ar.replica import ArReplica
from vllm_omni.fork_server import fork_server

EXTENSION = "tests.dfx.probe.StageProbe"
"""Goes into a stage's `worker_extension_cls`."""


class StageProbe:
    """vLLM mixes it into an AR stage's worker; `collective_rpc("probe")` calls it.

    Worker and scheduler share a process here, and an RPC runs below the engine core's loop.
    """

    def probe(self) -> dict[str, int]:
        """How much of each kind the engine core holds; all zero when no request is there."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        scheduler: Any = _engine_core().scheduler
        blocks = scheduler.kv_cache_manager.block_pool
        inputs = runner._rows.inputs
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "requests": len(scheduler.requests),
            "blocks": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
            "encoder_cache": len(getattr(scheduler.encoder_cache_manager, "cached", ()))
            and sum(map(bool, scheduler.encoder_cache_manager.cached.values())),
            "inflows": len(scheduler._inflows),
            "pipeline_ids": len(scheduler._pipeline_ids),
            "rows_out": len(scheduler._rows_out._waiting),
            "rows_covered": len(scheduler._rows_out._covered),
            # A runner forgets with its next step; `scheduler` says which these are.
            "runner_requests": len(runner.requests.keys() - scheduler.finished_req_ids),
            "runner_stage_requests": len(
                runner._rows._requests.keys() - scheduler.finished_req_ids
            ),
            "runner_rows": len(
                set(inputs._requests if inputs else ()) - scheduler.finished_req_ids
            ),
            "runner_pages": (len(inputs._pages._tables) - len(inputs._requests)) if inputs else 0,
        }


def _engine_core() -> EngineCore:
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCore):
            return owner
        frame = frame.f_back
    raise RuntimeError("not called below an engine core")


async def held(omni: AsyncOmni) -> dict[str, Any]:
    """Everything that requests hold anywhere; empty when none is there."""
    engine = omni._engine
    holds: dict[str, Any] = {
        "streams": len(omni._streams),
        "ids": len(omni._inner_ids),
        "shm": segments(omni),
    }
    for pool in engine.pools:
        holds[f"{pool.stage.name}.bound"] = len(pool._bound)
        for replica_id in pool.live_replica_ids:
            replica = pool.replica(replica_id)
            name = f"{pool.stage.name}.{replica_id}"
            holds[f"{name}.load"] = replica.load
            if isinstance(replica, ArReplica):
                processor = replica.llm.output_processor
                holds[f"{name}.processor"] = len(processor.request_states)
                holds[f"{name}.external_ids"] = len(processor.external_req_ids)
                holds[f"{name}.parents"] = len(processor.parent_requests)
                holds[f"{name}.spans"] = len(processor._spans)
    for number, counts in enumerate(await omni.collective_rpc("probe")):
        holds |= {f"core.{number}.{kind}": count for kind, count in counts.items()}
    return {kind: count for kind, count in holds.items() if count}


def segments(omni: AsyncOmni) -> list[str]:
    """What of the deployment is in shared memory, but for its lock."""
    prefix = f"vllm-omni-{omni._launched.deployment_id}-"
    return [
        name
        for name in os.listdir("/dev/shm")
        if name.startswith(prefix) and not name.endswith("-lock")
    ]


@dataclass(frozen=True)
class Resources:
    """What the operating system counts for this process and its children."""

    descriptors: int
    threads: int
    processes: int

    @classmethod
    def now(cls) -> "Resources":
        own = psutil.Process()
        family = [own, *own.children(recursive=True)]
        return cls(
            descriptors=sum(process.num_fds() for process in family),
            threads=sum(process.num_threads() for process in family),
            processes=len(family),
        )


def children() -> set[psutil.Process]:
    """Processes below this one, but for those that fork and count for them, which stay."""
    return {
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid != fork_server().pid and "resource_tracker" not in command_line(process)
    }


def leftovers(omni: AsyncOmni) -> dict[str, list[str]]:
    """Files of a deployment in shared memory, and which processes have each open."""
    found = {}
    for name in os.listdir("/dev/shm"):
        if omni._launched.deployment_id not in name:
            continue
        path = f"/dev/shm/{name}"
        found[name] = [f"{p.pid} {p.name()}" for p in psutil.process_iter() if _has_open(p, path)]
    return found


def _has_open(process: psutil.Process, path: str) -> bool:
    try:
        return any(path in os.readlink(each.path) for each in os.scandir(f"/proc/{process.pid}/fd"))
    except OSError:
        return False
