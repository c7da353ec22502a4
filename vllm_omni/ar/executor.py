# SPDX-License-Identifier: Apache-2.0
"""vLLM's executor of several ranks, which ends them all as soon as one has died."""

from multiprocessing.process import BaseProcess

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class RanksExecutor(MultiprocExecutor):
    """The ranks of a stage on a CPU, each in a process of its own."""

    @staticmethod
    def _ensure_worker_termination(worker_procs: list[BaseProcess]) -> None:
        """End the ranks; see vLLM's method, which gives each of them time to end by itself.

        Where one has died, the others wait for its share of a sum, which nothing but a kill ends,
        and requests wait for the engine core, which ends after them.
        """
        if any(process.exitcode for process in worker_procs):
            for process in worker_procs:
                process.kill()
        MultiprocExecutor._ensure_worker_termination(worker_procs)
