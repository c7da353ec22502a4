# SPDX-License-Identifier: Apache-2.0
"""Replicas on several devices, and checkpoints with enough heads for them."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from diffusers import DiffusionPipeline

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import Ask, Made, to_message
from vllm_omni.config.plan import DiffusionStageConfig
from vllm_omni.connectors.factory import create_connector
from vllm_omni.diffusion.client import DiffusionReplica
from vllm_omni.diffusion.launch import DiffusionLaunch
from vllm_omni.inputs import ProgramInput
from vllm_omni.testing.diffusers_tiny import Example, build
from vllm_omni.testing.diffusers_tiny.weights import randomize

HEADS = 4
PROGRAM = "vllm_omni.diffusion.programs.diffusers:image"


def wide(family: str) -> Path:
    """A family's tiny checkpoint, but for a transformer with `HEADS` heads."""
    folder = CHECKPOINTS / "diffusers-wide" / family
    if not (folder / "model_index.json").is_file():
        pipeline = DiffusionPipeline.from_pretrained(
            build(family, CHECKPOINTS / "diffusers" / family)
        )
        narrow = pipeline.transformer
        made = type(narrow).from_config({**narrow.config, "num_attention_heads": HEADS})
        randomize(made, torch.Generator().manual_seed(0))
        pipeline.transformer = made
        pipeline.save_pretrained(folder)
    return folder


@contextmanager
def replica(folder: Path, deployment: str, **settings: Any) -> Iterator[DiffusionReplica]:
    """A replica of a checkpoint."""
    launch = DiffusionLaunch(
        program=PROGRAM,
        settings=DiffusionStageConfig(model=str(folder), device="cpu", **settings),
        stage="diffusion",
        source="client",
        deployment_id=deployment,
        init_timeout=120,
    )
    running = launch.begin().ready()
    try:
        yield running
    finally:
        running.shutdown()


async def made_by(
    running: DiffusionReplica, deployment: str, example: Example, asks: Sequence[Ask]
) -> list[Made]:
    """What a replica makes of requests that come together."""
    connector = create_connector("SharedMemoryConnector", {}, deployment)
    try:
        for number, ask in enumerate(asks):
            message = to_message(example, ask)
            options = json.loads(msgspec.json.encode(message.options))
            await running.submit(str(number), ProgramInput(options=options), None)
        done: dict[str, Made] = {}
        while len(done) < len(asks):
            for output in await asyncio.wait_for(running.outputs(), 60):
                assert output.error is None, output.error
                if output.payload is not None:
                    key = output.payload.key
                    got = connector.get("diffusion", "client", key, output.payload)
                    done[output.request_id] = {n: t.clone() for n, t in got.items()}
        return [done[str(number)] for number in range(len(asks))]
    finally:
        connector.close()
