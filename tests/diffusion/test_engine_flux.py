# SPDX-License-Identifier: Apache-2.0
"""A stock diffusers pipeline as a program: batched at every step, equal to running it alone."""

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)

from vllm_omni.diffusion.engine import Emission, Engine
from vllm_omni.diffusion.program import Message, Program
from vllm_omni.diffusion.rules import Batching, CallRules
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded, ProgramSpec

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

STEPS = [2, 5, 3, 4]
SIZE = 32


def load_components() -> Loaded:
    """A tiny Flux; the position ids have no batch dimension and are equal for equal sizes."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(8, 12, 12),
    ).eval()
    vae = AutoencoderKL(
        sample_size=32,
        block_out_channels=(32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=1.5,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
    ).eval()
    shared = {"txt_ids": Batching.SHARED, "img_ids": Batching.SHARED}
    return Loaded(
        {
            "transformer": Component(transformer, {"forward": CallRules(shared)}),
            "vae": Component(vae, {"decode": CallRules()}),
        }
    )


def make_image(pipeline_parts: dict[str, torch.nn.Module], seed: int, steps: int) -> torch.Tensor:
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        **pipeline_parts,
    )
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    return pipeline(
        prompt_embeds=torch.randn(1, 16, 64, generator=generator),
        pooled_prompt_embeds=torch.randn(1, 64, generator=generator),
        height=SIZE,
        width=SIZE,
        num_inference_steps=steps,
        generator=generator,
        output_type="pt",
    ).images


def flux(ctx: Program) -> None:
    parts = {"transformer": ctx.component("transformer"), "vae": ctx.component("vae")}
    image = make_image(parts, ctx.seed, ctx.options["steps"])
    ctx.emit("image", {"image": image}, {"steps": ctx.options["steps"]})


def load(ctx: LoadContext) -> Loaded:
    return load_components()


SPEC = ProgramSpec("flux", flux, load, "image")


def test_batched_steps_equal_single_requests() -> None:
    loaded = load_components()
    parts = {name: part.module for name, part in loaded.components.items()}
    alone = [make_image(parts, seed, steps) for seed, steps in enumerate(STEPS)]

    engine = Engine(SPEC, loaded)
    for seed, steps in enumerate(STEPS):
        engine.add(f"r{seed}", Message({"seed": seed, "steps": steps}))
    images: dict[str, Emission] = {}
    while engine.has_work:
        for emission in engine.step():
            images[emission.request_id] = emission
    assert len(engine) == 0
    for seed, reference in enumerate(alone):
        emission = images[f"r{seed}"]
        assert emission.finished and emission.error is None
        torch.testing.assert_close(emission.tensors["image"], reference, atol=2e-6, rtol=0)
    # Two steps in common to all four; what is left of each runs with what is left of the others.
    assert engine.forward_sizes[4] >= 2
    assert sum(engine.forward_sizes.values()) < sum(STEPS) + len(STEPS)
