# SPDX-License-Identifier: Apache-2.0
"""Models of `diffusion_table_gpu.py`: transformers of published sizes with random weights.

What is beside them is small: text encoders have two thin layers, but the published width, and VAEs
have few channels, but the published compression. Both sides of every comparison have the same.
"""

import json
import random
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import WORK
from diffusers import DiffusionPipeline
from diffusion_batching import WORDS, Job
from gpu_models import tiny_folder

from vllm_omni.diffusion.engine import Emission, Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import diffusers as programs
from vllm_omni.diffusion.programs.diffusers.acceleration import NATIVE, accelerate, use_attention
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.load import load
from vllm_omni.diffusion.scheduler import CallScheduler
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.generation import PARAMETERS

MAX_BATCH = 32
PROMPT_WORDS = 20
KL: Mapping[str, Any] = {
    "block_out_channels": (16,) * 4,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": 16,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model's sizes.

    Attributes:
        tiny: Family of the tiny checkpoint that is made so large.
        configs: Component -> what is changed in its config; mappings inside are changed in turn.
        fixed: Arguments of every request.
        video: It makes videos.
    """

    tiny: str
    configs: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    video: bool = False


SHAPES: Mapping[str, Shape] = {
    "qwen_image": Shape(
        "qwen_image",
        {
            "transformer": {
                "in_channels": 64,
                "out_channels": 16,
                "num_layers": 60,
                "num_attention_heads": 24,
                "attention_head_dim": 128,
                "joint_attention_dim": 3584,
                "axes_dims_rope": (16, 56, 56),
            },
            "text_encoder": {
                "text_config": {
                    "hidden_size": 3584,
                    "num_attention_heads": 28,
                    "num_key_value_heads": 4,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1e6,
                        "mrope_section": [16, 24, 24],
                    },
                },
                "vision_config": {"out_hidden_size": 3584},
            },
            "vae": {
                "z_dim": 16,
                "dim_mult": (1, 1, 1, 1),
                "temperal_downsample": (False, True, True),
                "latents_mean": [0.0] * 16,
                "latents_std": [1.0] * 16,
            },
        },
    ),
    "flux_schnell": Shape(
        "flux",
        {
            "transformer": {
                "in_channels": 64,
                "out_channels": 64,
                "num_layers": 19,
                "num_single_layers": 38,
                "num_attention_heads": 24,
                "attention_head_dim": 128,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 768,
                "axes_dims_rope": (16, 56, 56),
                "guidance_embeds": False,
            },
            "text_encoder": {"hidden_size": 768, "projection_dim": 768},
            "text_encoder_2": {"d_model": 4096},
            "vae": KL,
        },
        {"max_sequence_length": 256},
    ),
    "z_image": Shape(
        "z_image",
        {
            "transformer": {
                "in_channels": 16,
                "dim": 3840,
                "n_layers": 30,
                "n_refiner_layers": 2,
                "n_heads": 30,
                "n_kv_heads": 30,
                "cap_feat_dim": 2560,
                "axes_dims": (32, 48, 48),
                "axes_lens": (1536, 512, 512),
            },
            "text_encoder": {"hidden_size": 2560},
            "vae": KL,
        },
        {"guidance_scale": 0.0},  # as of the distilled one
    ),
    "wan22_ti2v": Shape(
        "wan22_ti2v",
        {
            "transformer": {
                "num_layers": 30,
                "num_attention_heads": 24,
                "attention_head_dim": 128,
                "ffn_dim": 14336,
                "freq_dim": 256,
                "text_dim": 4096,
                "rope_max_seq_len": 1024,
            },
            "text_encoder": {"d_model": 4096},
        },
        {"guidance_scale": 5.0},
        video=True,
    ),
}


class TableModel:
    """A shape on a device, asked through diffusers and through the engine.

    Args:
        name: Of `SHAPES`.
        device: Where it runs.
        dtype: Of its weights, which are random.
        tiny: Take the tiny checkpoint as it is, to try the script.
    """

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, tiny: bool) -> None:
        self.name, self.shape, self.device = name, SHAPES[name], device
        folder = tiny_folder(self.shape.tiny) if tiny else _folder(name)
        self._context = LoadContext(str(folder), device, dtype, random_weights=True)
        torch.manual_seed(0)
        with torch.inference_mode():
            self._loaded = load(replace(self._context, diffusion_attention_backend=NATIVE))
        self._kit: Kit = self._loaded.assets["kit"]
        self.pipeline: DiffusionPipeline = self._kit.base
        use_attention([self.denoiser], NATIVE)  # diffusers goes on with the last model's
        self.size: Mapping[str, int] = {}
        """Height, width and, of a video, frames of the requests that follow."""

    @property
    def denoiser(self) -> torch.nn.Module:
        """The transformer."""
        return self.pipeline.transformer

    def sized(self, size: Mapping[str, int]) -> "TableModel":
        """The same, for requests of that size."""
        self.size = size
        return self

    def accelerate(self, attention: str) -> None:
        """Compile and choose the attention backend, as a stage does when it starts."""
        torch.compiler.set_stance("default")
        context = replace(self._context, enforce_eager=False, diffusion_attention_backend=attention)
        accelerate(self.pipeline, self._kit, context)

    def stock(self, job: Job) -> float:
        """Seconds that diffusers takes for a request."""
        began = time.perf_counter()
        with torch.inference_mode():
            made = self.pipeline(
                prompt=job.prompt,
                generator=torch.Generator().manual_seed(job.seed),
                output_type="pt",
                return_dict=False,
                **self._arguments(job),
            )
            assert bool(made[0].float().cpu().isfinite().all())
        return time.perf_counter() - began

    def message(self, job: Job) -> Message:
        """The same request for the engine."""
        given = self._arguments(job)
        params = {name: given.pop(name) for name in PARAMETERS if name in given}
        params |= {"seed": job.seed, "output_type": "pt", "extra_args": given}
        options = {"prompt": job.prompt, "seed": job.seed, "params": params}
        return Message(options, final=True)

    def engine(self) -> Engine:
        """A new engine over the same weights."""
        program = programs.video if self.shape.video else programs.image
        scheduler = CallScheduler(MAX_BATCH)
        return Engine(program, self._loaded, device=self.device, scheduler=scheduler)

    def _arguments(self, job: Job) -> dict[str, Any]:
        return {**self.shape.fixed, **self.size, "num_inference_steps": job.steps}


def run_all(engine: Engine, messages: Mapping[str, Message]) -> dict[str, float]:
    """Seconds at which requests that come at once are done, by their ids."""
    began = time.perf_counter()
    done: dict[str, float] = {}
    for request_id, message in messages.items():
        engine.add(request_id, message)
    while engine.has_work:
        for emission in engine.step():
            _check(emission)
            if emission.finished:
                done[emission.request_id] = time.perf_counter() - began
    return done


def mixed(count: int, fewest: int, most: int, seed: int = 0) -> list[Job]:
    """Requests with step counts spread evenly from `fewest` to `most`, in random order."""
    draw = random.Random(seed)
    steps = [round(fewest + (most - fewest) * i / (count - 1)) for i in range(count)]
    draw.shuffle(steps)
    return [
        Job(" ".join(draw.choices(WORDS, k=PROMPT_WORDS)), number, i)
        for i, number in enumerate(steps)
    ]


def _check(emission: Emission) -> None:
    if emission.error is not None:
        raise RuntimeError(f"request {emission.request_id}: {emission.error}")


def _folder(name: str) -> Path:
    """The configs of a shape, without weights."""
    shape = SHAPES[name]
    folder = WORK / "diffusers" / f"{name}_shape"
    shutil.copytree(
        tiny_folder(shape.tiny),
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    for component, changes in shape.configs.items():
        path = folder / component / "config.json"
        path.write_text(json.dumps(_changed(json.loads(path.read_text()), changes)))
    return folder


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    inside = {
        name: _changed(config[name], value)
        for name, value in changes.items()
        if isinstance(value, Mapping) and isinstance(config.get(name), Mapping)
    }
    return {**config, **changes, **inside}
