# SPDX-License-Identifier: Apache-2.0
"""The process groups of a replica's ranks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vllm_omni.diffusion.ranks.layout import Layout
from vllm_omni.diffusion.ranks.messages import Spot

TIMEOUT = timedelta(minutes=30)
"""Of one exchange of tensors. Ranks enter one at about the same time, or one of them hangs."""
CFG, RING, ULYSSES, TENSOR = "cfg", "ring", "ulysses", "tensor"
"""Dimensions of the mesh; diffusers wants the middle ones to have these names."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By kind of device. diffusers exchanges lengths of sequences on the CPU where it may."""


@dataclass(frozen=True, slots=True)
class Group:
    """This process among its replica's ranks.

    Attributes:
        layout: How they share the work.
        rank: This one.
        device: Its device.
        mesh: Of all ranks, by the dimensions above.
    """

    layout: Layout
    rank: int
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def join(cls, layout: Layout, rank: int, device: torch.device, folder: str) -> "Group":
        """Meet the other ranks; returns when all are there.

        Args:
            layout: How they share the work.
            rank: This one.
            device: Its device.
            folder: Where they can find each other; common to all.
        """
        # They are on one host. Else gloo listens where the host's name leads.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device.type != "cpu":
            torch.get_device_module(device).set_device(device)
        store = dist.FileStore(str(Path(folder, "ranks")), layout.world_size)
        dist.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=rank,
            world_size=layout.world_size,
            timeout=TIMEOUT,
        )
        mesh = init_device_mesh(
            device.type,
            (layout.cfg, 1, layout.ulysses, layout.tensor),
            mesh_dim_names=(CFG, RING, ULYSSES, TENSOR),
        )
        return cls(layout, rank, device, mesh)

    @property
    def share(self) -> int:
        """Which rows of a batch this rank takes."""
        return self.layout.share_of(self.rank)

    @property
    def leads(self) -> bool:
        """Whether it is the one that sends what comes of them."""
        return self.rank == self.layout.leader_of(self.share)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors of rank 0, on its device or the CPU, to all ranks (`receive`)."""
        for tensor in tensors:
            dist.broadcast(tensor.contiguous(), src=0)

    def receive(self, spots: Sequence[Spot]) -> list[torch.Tensor]:
        """The tensors that rank 0 broadcasts."""
        tensors = [spot.room(self.device) for spot in spots]
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
        return tensors

    def send_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send results to rank 0 (`take_from`)."""
        for tensor in tensors:
            dist.send(tensor.contiguous(), dst=0)

    def take_from(self, rank: int, spots: Sequence[Spot]) -> list[torch.Tensor]:
        """The results that a rank sends back."""
        tensors = [spot.room(self.device) for spot in spots]
        for tensor in tensors:
            dist.recv(tensor, src=rank)
        return tensors
