# SPDX-License-Identifier: Apache-2.0
"""A thinker and a talker replica side by side, without an orchestrator between them."""

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig
from vllm import SamplingParams

from tests.parity.cases import Case
from vllm_omni.ar.launch import (
    ArLaunch,
    Told,
    engine_config,
    preload,
    prepare_platform,
)
from vllm_omni.ar.replica import ArReplica
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.config.pipeline import EdgeContext
from vllm_omni.connectors.segments import new_deployment_id
from vllm_omni.models.hf_overrides import talker_config
from vllm_omni.outputs import TokenOutput

T = TypeVar("T")


@dataclass
class Spoken:
    """What both stages gave for one request."""

    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    frames: list[torch.Tensor] = field(default_factory=list)

    def joined(self, name: str) -> torch.Tensor:
        return torch.cat(self.rows[name])


class Stages:
    """Two AR replicas of a family and the loop that drives them.

    Args:
        family: Name of the pipeline module.
        model: Tiny checkpoint.
        thinker: Engine arguments for the thinker beside the common ones.
        talker: Likewise for the talker.
    """

    def __init__(
        self, family: str, model: Path, thinker: dict[str, Any], talker: dict[str, Any]
    ) -> None:
        prepare_platform()
        self.pipeline = import_module(f"vllm_omni.pipelines.{family}").PIPELINE
        self.model = str(model)
        self.config = AutoConfig.from_pretrained(model)
        common = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 64 << 20,
        }
        deployment = new_deployment_id()
        preload([self.pipeline.architectures[0]])
        self._launches = [
            ArLaunch.of(config, os.environ, told=Told(metrics=True))
            for config in (
                engine_config(
                    ArStageConfig(
                        stage="thinker",
                        emits=self._emits(),
                        target="talker",
                        deployment_id=deployment,
                    ),
                    {**common, **thinker},
                ),
                engine_config(
                    ArStageConfig(
                        stage="talker",
                        emits=("codes",),
                        row_driven=True,
                        source="thinker",
                        target="code2wav",
                        deployment_id=deployment,
                    ),
                    {**common, **talker},
                    talker_config,
                ),
            )
        ]
        starting = [launch.begin() for launch in self._launches]
        self.thinker, self.talker = (each.ready() for each in starting)
        self._loop = asyncio.new_event_loop()
        self._queues: dict[tuple[str, str], asyncio.Queue[TokenOutput]] = {}
        self._polls = [
            self._loop.create_task(self._poll("thinker", self.thinker)),
            self._loop.create_task(self._poll("talker", self.talker)),
        ]

    def _emits(self) -> tuple[str, ...]:
        layer = vars(self.config.talker_config).get("accept_hidden_layer")
        names = self.pipeline.stage("thinker").emits
        return tuple(name.replace("accept", str(layer)) for name in names)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout))

    def close(self) -> None:
        for task in self._polls:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._polls, return_exceptions=True))
        self.thinker.shutdown(0)
        self.talker.shutdown(0)
        for launch in self._launches:
            launch.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _poll(self, stage: str, replica: ArReplica) -> None:
        while True:
            for output in await replica.outputs():
                assert isinstance(output, TokenOutput)
                self._queues[stage, output.request_id].put_nowait(output)

    async def _outputs(self, stage: str, request_id: str) -> Any:
        queue = self._queues[stage, request_id]
        while True:
            output = await queue.get()
            yield output
            if output.finished:
                return

    async def speak(
        self,
        request_id: str,
        prompt: str,
        case: Case,
        *,
        streaming: bool = True,
        repetition_penalty: float = 1.05,
        slow_s: float = 0.0,
    ) -> Spoken:
        """One request through both stages and the edge between them, greedily.

        Args:
            slow_s: Pause after each thinker output, so that the talker must wait.
        """
        self._queues["thinker", request_id] = asyncio.Queue()
        self._queues["talker", request_id] = asyncio.Queue()
        spoken = Spoken()
        data = case.multi_modal_data()
        await self.thinker.submit(
            request_id,
            {"prompt": prompt, **({"multi_modal_data": data} if data else {})},
            SamplingParams(temperature=0, max_tokens=case.max_tokens),
            emit=True,
        )
        await asyncio.gather(
            self._think(request_id, case, spoken, streaming, repetition_penalty, slow_s),
            self._talk(request_id, spoken),
        )
        return spoken

    async def _think(
        self,
        request_id: str,
        case: Case,
        spoken: Spoken,
        streaming: bool,
        repetition_penalty: float,
        slow_s: float,
    ) -> None:
        edge = self.pipeline.edges[0].start(EdgeContext(self.model, self.config, None, streaming))
        constraints = self.pipeline.stage("talker").sampling_constraints(self.config)
        params = SamplingParams(
            temperature=0,
            max_tokens=case.talker_max_tokens,
            repetition_penalty=repetition_penalty,
            **constraints,
        )
        started = False
        async for output in self._outputs("thinker", request_id):
            spoken.token_ids += output.new_token_ids
            spoken.prompt_token_ids = output.prompt_token_ids or spoken.prompt_token_ids
            stage_input = edge.feed(output)
            if stage_input is None:
                continue
            if started:
                await self.talker.update([(request_id, stage_input)])
            else:
                started = True
                await self.talker.submit(request_id, stage_input, params, emit=True)
            await asyncio.sleep(slow_s)

    async def _talk(self, request_id: str, spoken: Spoken) -> None:
        async for output in self._outputs("talker", request_id):
            for span in output.spans:
                payload = self.talker._connector.get(
                    "talker", "code2wav", span.handle.key, span.handle
                )
                spoken.frames.append(payload["codes"])

    async def think(self, request_id: str, prompt: str, case: Case) -> Spoken:
        """The thinker alone; its rows are read here."""
        self._queues["thinker", request_id] = asyncio.Queue()
        spoken = Spoken()
        data = case.multi_modal_data()
        await self.thinker.submit(
            request_id,
            {"prompt": prompt, **({"multi_modal_data": data} if data else {})},
            SamplingParams(temperature=0, max_tokens=case.max_tokens),
            emit=True,
        )
        async for output in self._outputs("thinker", request_id):
            spoken.token_ids += output.new_token_ids
            spoken.prompt_token_ids = output.prompt_token_ids or spoken.prompt_token_ids
            for span in output.spans:
                payload = self.thinker._connector.get(
                    "thinker", "talker", span.handle.key, span.handle
                )
                for name, rows in payload.items():
                    spoken.rows.setdefault(name, []).append(rows)
        return spoken
