# SPDX-License-Identifier: Apache-2.0
"""MMS-TTS (VITS, https://huggingface.co/facebook/mms-tts-eng) as a pipeline outside of the package.

Reference: transformers' `VitsModel`. One forward makes the whole sound, so there is one stage.
"""

import msgspec
import torch
from transformers import AutoTokenizer, VitsModel

from vllm_omni.config.pipeline import Pipeline, Stage
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded, ProgramSpec
from vllm_omni.generation import GenerationRequest
from vllm_omni.pipelines.registry import register_pipeline

MODEL = "vits"


def load(context: LoadContext) -> Loaded:
    """The checkpoint, once per replica."""
    model = VitsModel.from_pretrained(context.model, dtype=context.dtype or torch.float32)
    # It draws random numbers between its forwards, so its calls run in the request's program.
    rules = CallRules(inline=True)
    return Loaded(
        components={MODEL: Component(model.eval().to(context.device), {"forward": rules})},
        assets={
            "tokenizer": AutoTokenizer.from_pretrained(context.model),
            "sample_rate": model.config.sampling_rate,
        },
    )


def run(program: Program) -> None:
    """One request: text in, sound out."""
    request = msgspec.convert(dict(program.receive().options), GenerationRequest)
    tokens = program.assets["tokenizer"](request.prompt or "", return_tensors="pt")
    waveform = program.component(MODEL, VitsModel)(**tokens.to(program.device)).waveform
    facts = {"sample_rate": program.assets["sample_rate"], "seed": program.seed}
    program.emit("audio", {"audio": waveform[:, None].float().cpu()}, facts)  # [1, channels, n]


program = ProgramSpec("mms_tts", run, load)

PIPELINE = Pipeline(
    name="mms_tts",
    architectures=("VitsModel",),
    stages=(
        Stage(
            "vits",
            engine="diffusion",
            program="mms_tts:program",
            final_output="audio",
            takes_generation=True,
        ),
    ),
    async_chunk=False,
)


def register() -> None:
    """What the entry point `vllm.general_plugins` names."""
    register_pipeline(PIPELINE, model_types=("vits",))
