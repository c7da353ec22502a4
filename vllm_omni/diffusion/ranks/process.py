# SPDX-License-Identifier: Apache-2.0
"""The process of a rank that is not the first: it runs what rank 0 says, until its pipe closes."""

import logging
import os
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from vllm.utils.system_utils import decorate_logs, set_process_title

from vllm_omni.config.plan import DiffusionStageConfig
from vllm_omni.diffusion.collate import function_of
from vllm_omni.diffusion.failures import is_out_of_memory
from vllm_omni.diffusion.ranks.group import Group
from vllm_omni.diffusion.ranks.layout import Layout
from vllm_omni.diffusion.ranks.messages import (
    Forward,
    Outcome,
    Report,
    Resume,
    Spot,
    autocast_of,
    decode_to_rank,
    encode,
    spots,
    unpacked,
)
from vllm_omni.diffusion.ranks.watch import Watch
from vllm_omni.diffusion.spec import load_context, resolve_program
from vllm_omni.diffusion.switch import under
from vllm_omni.diffusion.tensor_trees import iter_tensors
from vllm_omni.errors import OmniConfigError

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Where one rank fails, the others have so long to fail too; else they wait for it in a
collective."""


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a rank is started with.

    Attributes:
        program: Dotted path of the program.
        settings: The stage's settings.
        stage: Name of the stage.
        folder: Where ranks find each other; of the replica alone.
        layout: How they share the work.
    """

    program: str
    settings: DiffusionStageConfig
    stage: str
    folder: str
    layout: Layout


def rank_device(kind: str, rank: int) -> torch.device:
    """The device of a rank: ranks count those that the replica may see."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, rank)


def run_rank(
    config: RankConfig, rank: int, link: Connection, not_ours: tuple[Connection, ...], first: int
) -> None:
    """The process.

    Args:
        config: Common to all ranks.
        rank: This one.
        link: To rank 0.
        not_ours: Rank 0's ends of links, which it could not close while they are open here.
        first: Process id of rank 0.
    """
    set_process_title(f"OmniDiffusion_{config.stage}_rank{rank}")
    decorate_logs(f"OmniDiffusion_{config.stage}_rank{rank}")
    # Rank 0 hears of both, and ends in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for each in not_ours:
        each.close()
    if os.getppid() != first:
        return
    Watch({first: "rank 0"}, lambda _: os._exit(1))
    try:
        with torch.inference_mode():
            worker = _Rank(config, rank, link)
    except Exception as error:
        # Whatever it is, rank 0 gets to know, and ends this process.
        logger.error("Rank %d did not start:\n%s", rank, traceback.format_exc())
        misconfigured = isinstance(error, OmniConfigError)
        outcome = Outcome.MISCONFIGURED if misconfigured else Outcome.FAILED
        link.send_bytes(encode(Report(outcome, type(error).__name__, str(error))))
        link.poll(None)
        return
    link.send_bytes(encode(Report()))
    worker.serve()


class _Rank:
    """The rank's models and what it does with them."""

    def __init__(self, config: RankConfig, rank: int, link: Connection) -> None:
        device = rank_device(config.settings.device, rank)
        self._link = link
        self._group = Group.join(config.layout, rank, device, config.folder)
        spread = resolve_program(config.program).spread
        assert spread is not None  # rank 0 has looked
        context = load_context(config.settings, device, self._group)
        self._models: Mapping[str, nn.Module] = spread.load(context)

    def serve(self) -> None:
        """Run forwards until rank 0 closes the pipe."""
        while True:
            try:
                message = decode_to_rank(self._link.recv_bytes())
            except EOFError:
                return
            if not isinstance(message, Resume):
                self._answer(message)

    @torch.inference_mode()
    def _answer(self, message: Forward) -> None:
        share = self._receive(message)
        if share is None:
            self._report(Report())
            return
        args, kwargs = share
        function = function_of(self._models[message.component], message.method)
        try:
            with under(autocast_of(message.autocast)):
                result = function(*args, **kwargs)
        except Exception as error:
            # Whatever it is, it is rank 0 that tells the request.
            self._fail(error)
            return
        tensors = list(iter_tensors(result)) if self._group.leads else []
        self._report(Report(tensors=tuple(Spot.of(tensor) for tensor in tensors)))
        self._group.send_back(tensors)

    def _receive(self, message: Forward) -> tuple[list[Any], dict[str, Any]] | None:
        """The arguments of this rank's share; all ranks receive all shares' tensors."""
        nodes = [chain(share.args, share.kwargs.values()) for share in message.shares]
        wanted = [spot for share in nodes for node in share for spot in spots(node)]
        tensors = iter(self._group.receive(wanted))
        shares = [
            (
                [unpacked(node, tensors) for node in share.args],
                {name: unpacked(node, tensors) for name, node in share.kwargs.items()},
            )
            for share in message.shares
        ]
        own = self._group.share
        return shares[own] if own < len(shares) else None

    def _fail(self, error: Exception) -> None:
        """Say that a forward failed here; end if others go on waiting for this rank in it."""
        outcome = Outcome.NO_MEMORY if is_out_of_memory(error) else Outcome.FAILED
        self._report(Report(outcome, type(error).__name__, str(error)))
        if not self._link.poll(GRACE_S):
            logger.critical("Failed where other ranks wait: %s: %s", type(error).__name__, error)
            os._exit(1)

    def _report(self, report: Report) -> None:
        self._link.send_bytes(encode(report))
