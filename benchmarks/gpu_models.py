# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for `diffusion_gpu.py`: tiny ones, and such as fill a GPU, with random weights."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import WORK
from diffusers import DiffusionPipeline
from diffusion_batching import Job

from vllm_omni.diffusion.calls import Batch
from vllm_omni.diffusion.cost import CostModel
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import diffusers as programs
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.load import load
from vllm_omni.diffusion.scheduler import CallScheduler
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.generation import PARAMETERS
from vllm_omni.testing import diffusers_tiny

MAX_BATCH = 32
HEADS, HEAD_SIZE, ROPE = 16, 128, (16, 56, 56)
LARGE: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "flux": {
        "transformer": {
            "in_channels": 64,
            "out_channels": 64,
            "num_layers": 3,
            "num_single_layers": 8,
            "num_attention_heads": HEADS,
            "attention_head_dim": HEAD_SIZE,
            "axes_dims_rope": ROPE,
        },
        "vae": {
            "block_out_channels": (128, 256, 512, 512),
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
            "layers_per_block": 2,
            "latent_channels": 16,
            "norm_num_groups": 32,
        },
    },
    "qwen_image": {
        "transformer": {
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 6,
            "num_attention_heads": HEADS,
            "attention_head_dim": HEAD_SIZE,
            "axes_dims_rope": ROPE,
        },
        "vae": {
            "base_dim": 96,
            "dim_mult": (1, 2, 4, 4),
            "num_res_blocks": 2,
            "temperal_downsample": (False, True, True),
            "z_dim": 16,
            "latents_mean": [0.0] * 16,
            "latents_std": [1.0] * 16,
        },
    },
}
"""Family -> component -> what is changed in the tiny one's config. The transformers have about 1 B
parameters, the VAEs are as large as the families' own; text encoders stay tiny."""
FIXED = {"flux": {"max_sequence_length": 256}, "qwen_image": {"true_cfg_scale": 4.0}}
"""Of every request."""


def tiny_folder(family: str) -> Path:
    """The family's tiny checkpoint."""
    return diffusers_tiny.build(family, WORK / "diffusers" / family)


def large_folder(family: str) -> Path:
    """The configs of a large one, without weights."""
    folder = WORK / "diffusers" / f"{family}_large"
    shutil.copytree(
        tiny_folder(family),
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    for component, changes in LARGE[family].items():
        path = folder / component / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))
    return folder


class Timed(CostModel):
    """A cost model that remembers every forward that it was told of.

    Attributes:
        seen: (method, calls, seconds on the device) in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, float]] = []

    def observe(self, batch: Batch, seconds: float) -> None:
        """See `CostModel`."""
        function = batch.collator.function
        name = type(function) if isinstance(function, torch.nn.Module) else function
        self.seen.append((name.__qualname__, batch.calls, seconds))
        super().observe(batch, seconds)


class Model:
    """A checkpoint on a device, asked through diffusers and through the engine.

    Args:
        family: Of `diffusers_tiny`.
        folder: With its configs.
        device: Where it runs.
        dtype: Of its weights, which are random.
    """

    def __init__(self, family: str, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        context = LoadContext(str(folder), device, dtype, random_weights=True)
        torch.manual_seed(0)
        with torch.inference_mode():
            self.loaded = load(context)
        kit: Kit = self.loaded.assets["kit"]
        self.pipeline: DiffusionPipeline = kit.base
        self.denoiser: torch.nn.Module = self.pipeline.transformer
        self.device = device
        self.size = 256
        self.fixed = FIXED[family]
        self.negative = {"negative_prompt": "a blurred dog"} if family == "qwen_image" else {}

    def arguments(self, steps: int) -> dict[str, Any]:
        """Of `__call__`, but for prompts."""
        sides = {"height": self.size, "width": self.size}
        return {**self.fixed, **sides, "num_inference_steps": steps}

    def stock(self, batch: Sequence[Job]) -> tuple[float, torch.Tensor]:
        """Seconds that diffusers takes for a batch of equal requests, and what it makes."""
        generators = [torch.Generator().manual_seed(job.seed) for job in batch]
        negative = {name: [text] * len(batch) for name, text in self.negative.items()}
        began = time.perf_counter()
        with torch.inference_mode():
            made = self.pipeline(
                prompt=[job.prompt for job in batch],
                generator=generators,
                output_type="pt",
                **self.arguments(batch[0].steps),
                **negative,
            )
            pictures = made.images.float().cpu()
        return time.perf_counter() - began, pictures

    def message(self, job: Job) -> Message:
        """The same request for the engine."""
        given = self.arguments(job.steps)
        params = {name: given.pop(name) for name in PARAMETERS if name in given}
        params |= {"seed": job.seed, "output_type": "pt", "progress": True, "extra_args": given}
        options = {"prompt": job.prompt, **self.negative, "seed": job.seed, "params": params}
        return Message(options, final=True)

    def engine(self, cost: CostModel | None = None, *, foresee: bool = True) -> Engine:
        """A new engine over the same weights."""
        scheduler = CallScheduler(MAX_BATCH, cost=cost)
        return Engine(
            programs.image, self.loaded, device=self.device, scheduler=scheduler, foresee=foresee
        )
