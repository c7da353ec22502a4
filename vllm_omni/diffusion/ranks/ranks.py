# SPDX-License-Identifier: Apache-2.0
"""Rank 0's side of a replica on several devices."""

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import torch

from vllm_omni.diffusion.ranks.group import Group
from vllm_omni.diffusion.ranks.messages import (
    Forward,
    Outcome,
    Report,
    Resume,
    Share,
    decode_report,
    encode,
    named_autocast,
    packed,
)
from vllm_omni.diffusion.ranks.process import GRACE_S, RankConfig, rank_device, run_rank
from vllm_omni.diffusion.ranks.watch import Watch
from vllm_omni.diffusion.spread import Arguments
from vllm_omni.diffusion.switch import Autocast, under
from vllm_omni.diffusion.tensor_trees import filled, iter_tensors
from vllm_omni.errors import OmniConfigError, OmniGenerateError

logger = logging.getLogger(__name__)

T = TypeVar("T")

END_S = 5.0
"""How long the others may take to end before they are killed."""


class RankError(OmniGenerateError):
    """A rank failed where others did not."""


class Ranks:
    """The other ranks of a replica, and this one among them.

    Args:
        config: What the others are started with; their number is its layout's.
        device: Kind of device of all of them.
    """

    def __init__(self, config: RankConfig, device: str) -> None:
        self.layout = config.layout
        context = multiprocessing.get_context("fork")
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(1, self.layout.world_size):
            ours, theirs = context.Pipe()
            self._links.append(ours)
            process = context.Process(
                target=run_rank,
                args=(config, rank, theirs, tuple(self._links), os.getpid()),
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
        names = {process.pid: process.name for process in self._processes}
        self._watch = Watch({pid: name for pid, name in names.items() if pid}, self._lost)
        self._device = rank_device(device, 0)
        self._folder = config.folder
        self._group: Group | None = None

    def join(self) -> Group:
        """Meet the others; from here on this process uses its device."""
        self._group = Group.join(self.layout, 0, self._device, self._folder)
        return self._group

    def wait_until_ready(self) -> None:
        """Block until the others have loaded their models.

        Raises:
            OmniConfigError: The deployment or the checkpoint is wrong.
            RuntimeError: One of them failed for any other reason.
        """
        for process, report in zip(self._processes, self._reports(None), strict=True):
            if report.outcome is Outcome.MISCONFIGURED:
                raise OmniConfigError(report.reason)
            if report.outcome is not Outcome.DONE:
                raise RuntimeError(f"{process.name}: {report.kind}: {report.reason}")

    def method(self, component: str, method: str) -> "SpreadMethod":
        """What runs forwards of one method on all ranks."""
        return SpreadMethod(self, component, method)

    def run(
        self,
        component: str,
        method: str,
        forward: Callable[..., Any],
        autocast: Autocast,
        shares: Sequence[Arguments],
    ) -> list[Any]:
        """See `Spread`."""
        group = self._group
        assert group is not None  # it has joined
        self._tell(encode(_message(component, method, autocast, shares)))
        tensors = chain.from_iterable(iter_tensors((s.args, s.kwargs)) for s in shares)
        self._exchange(lambda: group.broadcast(list(tensors)))
        result, error = None, None
        try:
            with under(autocast):
                result = forward(*shares[0].args, **shares[0].kwargs)
        except Exception as raised:
            # Whatever it is: the others are to know before the caller does.
            error = raised
        try:
            reports = self._reports(None if error is None else GRACE_S)
            others = [self._taken(group, share, reports) for share in range(1, len(shares))]
            self._settle(reports, error)
        finally:
            del error  # its traceback leads to this frame
        return [result, *(filled(result, tensors) for tensors in others)]

    def _taken(self, group: Group, share: int, reports: Sequence[Report]) -> list[torch.Tensor]:
        """What came of a share that others have run; nothing if it failed."""
        rank = self.layout.leader_of(share)
        spots = reports[rank - 1].tensors
        return self._exchange(lambda: group.take_from(rank, spots))

    def close(self) -> None:
        """End the others."""
        self._watch.close()
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(END_S)
            process.kill()
            process.join()

    def _settle(self, reports: Sequence[Report], error: Exception | None) -> None:
        """Raise what went wrong, if anything did, once all ranks have ended that forward."""
        failed = {
            process.name: report
            for process, report in zip(self._processes, reports, strict=True)
            if report.outcome is not Outcome.DONE
        }
        if failed:
            self._tell(encode(Resume()))
        if error is not None:
            raise error
        for name, report in failed.items():
            logger.error("%s failed: %s: %s", name, report.kind, report.reason)
        if any(report.outcome is Outcome.NO_MEMORY for report in failed.values()):
            raise torch.OutOfMemoryError(f"on {', '.join(failed)}")
        if failed:
            raise RankError("; ".join(f"{name}: {each.kind}" for name, each in failed.items()))

    def _tell(self, message: bytes) -> None:
        for process, link in zip(self._processes, self._links, strict=True):
            try:
                link.send_bytes(message)
            except OSError:
                self._lost(process.name)

    def _reports(self, patience: float | None) -> list[Report]:
        """What each has to say; the end of this process if one has ended, or is stuck in an
        exchange that others have left."""
        reports = []
        for process, link in zip(self._processes, self._links, strict=True):
            try:
                if not link.poll(patience):
                    self._lost(process.name)
                reports.append(decode_report(link.recv_bytes()))
            except (EOFError, OSError):
                self._lost(process.name)
        return reports

    def _exchange(self, exchange: Callable[[], T]) -> T:
        try:
            return exchange()
        except RuntimeError as error:
            # Of torch's process groups: there is nobody at the other end.
            logger.error("Ranks cannot reach each other: %s", error)
            self._lost("a rank")

    def _lost(self, name: str) -> NoReturn:
        """End this process, which is no use any more and may hang in a collective."""
        logger.critical("%s has ended or is stuck; the replica ends with it", name)
        for process in self._processes:
            process.kill()
        logging.shutdown()
        os._exit(1)


def _message(
    component: str, method: str, autocast: Autocast, shares: Sequence[Arguments]
) -> Forward:
    packed_shares = [
        Share([packed(a) for a in s.args], {n: packed(v) for n, v in s.kwargs.items()})
        for s in shares
    ]
    return Forward(component, method, named_autocast(autocast), packed_shares)


@dataclass(frozen=True, slots=True)
class SpreadMethod:
    """One method of one component, on all ranks."""

    ranks: Ranks
    component: str
    name: str

    @property
    def width(self) -> int:
        """See `Spread`."""
        return self.ranks.layout.cfg

    def run(
        self, forward: Callable[..., Any], autocast: Autocast, shares: Sequence[Arguments]
    ) -> list[Any]:
        """See `Spread`."""
        return self.ranks.run(self.component, self.name, forward, autocast, shares)
