# SPDX-License-Identifier: Apache-2.0
"""Replicas on several devices, and checkpoints with enough heads for them."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from diffusers import DiffusionPipeline

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import Ask, Made, to_message
from vllm_omni.config.plan import DiffusionStageConfig
from vllm_omni.connectors.base import make_key
from vllm_omni.connectors.factory import create_connector
from vllm_omni.connectors.segments import new_deployment_id, sweep
from vllm_omni.diffusion.client import DiffusionReplica
from vllm_omni.diffusion.launch import DiffusionLaunch
from vllm_omni.diffusion.program import Message
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import ProgramInput
from vllm_omni.outputs import ProgramOutput
from vllm_omni.testing.diffusers_tiny import Example, build
from vllm_omni.testing.diffusers_tiny.weights import randomize

HEADS = 4
DIFFUSERS = "vllm_omni.diffusion.programs.diffusers:image"
STAGE, CLIENT = "diffusion", "client"


def wide(family: str) -> Path:
    """A family's tiny checkpoint, but for a transformer with `HEADS` heads."""
    folder = CHECKPOINTS / "diffusers-wide" / family
    if not (folder / "model_index.json").is_file():
        narrow = DiffusionPipeline.from_pretrained(
            build(family, CHECKPOINTS / "diffusers" / family)
        )
        cls, config = type(narrow.transformer), dict(narrow.transformer.config)
        config["num_attention_heads"] = HEADS
        if config.get("added_kv_proj_dim"):  # Wan's, as wide as all heads together
            config["added_kv_proj_dim"] = HEADS * config["attention_head_dim"]
        narrow.transformer = cls.from_config(config)
        randomize(narrow.transformer, torch.Generator().manual_seed(0))
        narrow.save_pretrained(folder)
    return folder


class Spread:
    """A replica on several ranks, and its client.

    Args:
        replica: That is running.
        deployment: Its id.
    """

    def __init__(self, replica: DiffusionReplica, deployment: str) -> None:
        self.replica = replica
        self.ranks = psutil.Process(replica.pid).children()
        self._connector = create_connector("SharedMemoryConnector", {}, deployment)

    async def outputs(self, *inputs: ProgramInput) -> list[list[ProgramOutput]]:
        """What comes of requests that are sent together."""
        for number, each in enumerate(inputs):
            await self.replica.submit(str(number), each, None)
        made: list[list[ProgramOutput]] = [[] for _ in inputs]
        missing = len(inputs)
        while missing:
            for output in await asyncio.wait_for(self.replica.outputs(), 60):
                assert isinstance(output, ProgramOutput)
                made[int(output.request_id)].append(output)
                missing -= output.finished
        return made

    def made(self, example: Example, asks: Sequence[Ask]) -> list[Made]:
        """What comes of requests to a pipeline that are sent together."""
        inputs = [self._input(to_message(example, ask), str(i)) for i, ask in enumerate(asks)]
        outputs = asyncio.run(self.outputs(*inputs))
        assert [each[-1].error for each in outputs] == [None] * len(asks)
        return [self.tensors(each[-1]) for each in outputs]

    def close(self) -> None:
        """End the client."""
        self._connector.close()

    def _input(self, message: Message, request_id: str) -> ProgramInput:
        """The message with its media behind handles."""
        spans = []
        if message.tensors:
            key = make_key(request_id, "media")
            handle = self._connector.put(CLIENT, STAGE, key, message.tensors).handle
            assert handle is not None
            spans = [RowSpan(0, 0, handle)]
        return ProgramInput(options=dict(message.options), spans=spans)

    def tensors(self, output: ProgramOutput) -> Made:
        """What an output holds."""
        assert output.payload is not None
        got = self._connector.get(STAGE, CLIENT, output.payload.key, output.payload)
        return {name: tensor.clone() for name, tensor in got.items()}


@contextmanager
def spread(program: str, model: str, **settings: Any) -> Iterator[Spread]:
    """A replica on several ranks; at the end nothing of it is left."""
    deployment = new_deployment_id()
    launch = DiffusionLaunch(
        program=program,
        settings=DiffusionStageConfig(model=model, device="cpu", **settings),
        stage=STAGE,
        source=CLIENT,
        deployment_id=deployment,
        init_timeout=120,
    )
    running = Spread(launch.begin().ready(), deployment)
    try:
        yield running
    finally:
        running.replica.shutdown()
        running.close()
        gone, left = psutil.wait_procs(running.ranks, timeout=10)
        assert not left and len(gone) == len(running.ranks)
        assert sweep(deployment) == 0, "segments were left in /dev/shm"
