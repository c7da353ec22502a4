# SPDX-License-Identifier: Apache-2.0
"""Requests to a tiny diffusers checkpoint, by the stock pipeline and by the engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from vllm_omni.config.diffusers_tasks import MEDIA
from vllm_omni.diffusion.calls import Batch
from vllm_omni.diffusion.cost import CostModel
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs.diffusers import image as image_program
from vllm_omni.diffusion.programs.diffusers.arguments import PARAMETERS as ARGUMENTS
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.results import tensors_of
from vllm_omni.diffusion.scheduler import CallScheduler
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.generation import PARAMETERS, GenerationRequest, checked_params, media_name
from vllm_omni.testing.diffusers_tiny import Example

CPU = torch.device("cpu")
DENOISERS = ("transformer", "unet")


class Unmeasured(CostModel):
    """Learns nothing, so that which calls run together does not depend on how fast they run."""

    def observe(self, batch: Batch, seconds: float) -> None:
        """Forget it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What differs between the requests of a batch."""

    prompt: str
    negative_prompt: str = "blurry"
    height: int = 32
    width: int = 32
    steps: int = 2
    guidance: float = 3.0
    seed: int = 0

    def arguments(self, example: Example) -> dict[str, object]:
        """Of the stock `__call__`."""
        return example.arguments(
            self.prompt,
            negative_prompt=self.negative_prompt,
            height=self.height,
            width=self.width,
            steps=self.steps,
            guidance=self.guidance,
            image_seed=self.seed,
        )


MIXED = (
    Ask("a red square on a white ground", seed=1),
    Ask("two blue rings", steps=4, guidance=5.0, seed=2),
    Ask("a long walk along the river, in the rain and in the evening", steps=3, seed=3),
    Ask("cat", guidance=1.5, seed=4),
    Ask("the same sky twice", height=64, seed=5),
    Ask("a small ball, at rest", height=64, steps=3, negative_prompt="dark and ugly", seed=6),
    Ask("an open window", steps=3, guidance=1.0, seed=7),
    Ask("a fox jumps over a lazy dog near the river", steps=5, guidance=2.0, seed=8),
)
"""Different steps, guidance, prompt lengths, negative prompts, sizes and seeds."""


def load(
    folder: Path, pipeline: str, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Loaded:
    """The checkpoint as a stage loads it, for one pipeline class."""
    context = LoadContext(str(folder), device, dtype, model_class_name=pipeline)
    return image_program.load(context)


Made = Mapping[str, torch.Tensor]
"""What a request made, by modality."""


def stock(loaded: Loaded, example: Example, ask: Ask) -> Made:
    """What the pipeline itself makes, called alone."""
    pipeline = _pipeline(loaded)
    generator = torch.Generator().manual_seed(ask.seed)
    shown = output_type(example)
    output = pipeline(**ask.arguments(example), generator=generator, output_type=shown)
    return tensors_of(output, shown)


def served(
    loaded: Loaded, example: Example, asks: Sequence[Ask], device: torch.device = CPU
) -> list[Made]:
    """What the engine makes of requests that all come at once; one alone has room for guidance."""
    scheduler = CallScheduler(max(2, len(asks)), cost=Unmeasured())
    engine = Engine(image_program, loaded, device=device, scheduler=scheduler)
    for number, ask in enumerate(asks):
        engine.add(str(number), to_message(example, ask))
    done: dict[str, Made] = {}
    while engine.has_work:
        for emission in engine.step():
            assert emission.error is None, emission.error
            assert emission.tensors is not None
            done[emission.request_id] = emission.tensors
    return [done[str(number)] for number in range(len(asks))]


def output_type(example: Example) -> str:
    """Floats; Cosmos makes bytes of its videos for the guardrail, so that there latents are."""
    return "latent" if example.pipeline.startswith("Cosmos") else "pt"


@contextmanager
def counted(loaded: Loaded) -> Iterator[list[str]]:
    """Notes each forward of the denoisers."""
    forwards: list[str] = []
    hooks = [
        part.module.register_forward_pre_hook(lambda *_, name=name: forwards.append(name))
        for name, part in loaded.components.items()
        if name.startswith(DENOISERS)
    ]
    try:
        yield forwards
    finally:
        for hook in hooks:
            hook.remove()


def _pipeline(loaded: Loaded) -> DiffusionPipeline:
    kit: Kit = loaded.assets["kit"]
    return kit.base


def to_message(example: Example, ask: Ask) -> Message:
    """The request as a client sends it."""
    given = ask.arguments(example)
    texts = {name: given.pop(name, None) for name in ("prompt", "negative_prompt")}
    if given.get("true_cfg_scale", 2.0) <= 1:  # then it has no effect, and is refused
        texts["negative_prompt"] = None
    media, tensors = _media(given)
    params = {name: given.pop(name) for name in list(given) if name in PARAMETERS}
    for field, names in ARGUMENTS.items():
        for name in given.keys() & set(names):
            params[field] = given.pop(name)
    params |= {"seed": ask.seed, "output_type": output_type(example), "extra_args": given}
    request = GenerationRequest(**texts, params=checked_params(params, ""), media=media)
    options = {**msgspec.to_builtins(request), "seed": ask.seed}
    return Message(options, tensors)


def _media(given: dict[str, object]) -> tuple[dict[str, int], Mapping[str, torch.Tensor]]:
    """Takes the pictures out of the arguments."""
    counts: dict[str, int] = {}
    tensors: dict[str, torch.Tensor] = {}
    for medium, names in MEDIA.items():
        for name in names:
            value = given.get(name)
            pictures = value if isinstance(value, list) else [value]
            if not all(isinstance(picture, Image.Image) for picture in pictures):
                continue
            moving = medium.endswith("video")
            if moving != (isinstance(value, list) and name not in MEDIA["image"]):
                continue
            del given[name]
            pixels = [torch.from_numpy(np.array(picture)) for picture in pictures]
            pieces = [torch.stack(pixels)] if moving else pixels
            counts[medium] = len(pieces)
            for index, piece in enumerate(pieces):
                tensors[media_name(medium, index)] = piece
    return counts, tensors
