# SPDX-License-Identifier: Apache-2.0
"""One deployment for all tests of this folder: `async_chunk`, chunked prefill, prefix caching."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoProcessor
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.parity.harness import Deployment, deployment
from vllm_omni.outputs import OmniRequestOutput

AR: dict[str, Any] = {
    "devices": "cpu",
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
}
# A model of random weights would fill its JSON with spaces.
COMPACT_JSON = {"backend": "xgrammar", "disable_any_whitespace": True}
CONFIG = {
    "base_config": "qwen3_omni_moe.yaml",
    "platforms": {},
    "stages": [
        {"stage_id": 0, **AR, "structured_outputs_config": COMPACT_JSON},
        {"stage_id": 1, **AR},
        {"stage_id": 2, "devices": "cpu", "max_num_seqs": 8},
    ],
}
GREEDY_TALKER: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "seed": None}


@dataclass
class Answer:
    """A request's outputs: the text as one output, the sound as one piece."""

    output: OmniRequestOutput | None = None
    sound: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    outputs: list[OmniRequestOutput] = field(default_factory=list)

    @property
    def completion(self) -> Any:
        assert self.output is not None
        return self.output.outputs[0]

    @property
    def text(self) -> str:
        return self.completion.text

    @property
    def token_ids(self) -> list[int]:
        return list(self.completion.token_ids)


class Client:
    """Asks the deployment. Greedy, unless a request says otherwise."""

    def __init__(self, running: Deployment, model: Path) -> None:
        self.running = running
        self.omni = running.omni
        self.model = model
        self.processor = AutoProcessor.from_pretrained(model)

    def prompt(self, words: str) -> str:
        messages = [{"role": "user", "content": [{"type": "text", "text": words}]}]
        return self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )

    async def ask_async(
        self,
        words: str,
        *,
        audio: bool = False,
        voice: str | None = None,
        talker: dict[str, Any] | None = None,
        **params: Any,
    ) -> Answer:
        wanted = {
            "temperature": 0,
            "max_tokens": 12,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            **params,
        }
        answer = Answer()
        pieces = []
        async for output in self.omni.generate(
            {"prompt": self.prompt(words)},
            SamplingParams(**wanted),
            sampling_params_list=[None, {**GREEDY_TALKER, **(talker or {})}, None],
            output_modalities=("text", "audio") if audio else ("text",),
            voice=voice,
        ):
            answer.outputs.append(output)
            if output.final_output_type == "text":
                answer.output = output
            elif output.audio is not None:
                pieces.append(output.audio.samples)
        if pieces:
            answer.sound = np.concatenate(pieces)
        return answer

    def ask(self, words: str, **kwargs: Any) -> Answer:
        return self.running.run(self.ask_async(words, **kwargs))


@pytest.fixture(scope="package")
def client(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Client]:
    model = tiny_checkpoint("qwen3_omni_moe")
    with deployment(model, deploy_config=CONFIG, async_chunk=True) as running:
        yield Client(running, model)
