# SPDX-License-Identifier: Apache-2.0
"""Videos and sounds: a mixed batch equals the stock pipeline, called alone (A-42, A-43)."""

from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import MIXED, Ask, counted, load, served, stock
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.rules import methods_of
from vllm_omni.diffusion.spec import Component, Loaded
from vllm_omni.errors import OmniClientError
from vllm_omni.testing.diffusers_tiny import MODULES, Example, build, recipe
from vllm_omni.testing.diffusers_tiny.media import AudioExample

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

BOUND = 1e-4

ALWAYS = {
    "ace_step",
    "cogvideox",
    "cosmos2_v2w",
    "hunyuan_video",
    "longcat_audio",
    "ltx",
    "ltx2",
    "sana_video",
    "stable_audio",
    "wan22_t2v",
}
"""The first pipeline of these runs at every level: one of each kind of rule and of condition."""


@dataclass(frozen=True, slots=True)
class Listen(Ask):
    """A request for a sound; twice as high is twice as long."""

    def arguments(self, example: Example) -> dict[str, object]:
        assert isinstance(example, AudioExample)
        return example.arguments(
            self.prompt,
            negative_prompt=self.negative_prompt,
            steps=self.steps,
            guidance=self.guidance,
            seconds=example.default_seconds * self.height / 32,
        )


LOOK = (
    *MIXED[:3],
    replace(MIXED[3], prompt=MIXED[0].prompt),
    *MIXED[4:6],
    Ask('a shop window that says "open"', steps=3, guidance=1.0, seed=7),
    Ask(MIXED[0].prompt, steps=5, guidance=2.0, seed=8),
)
"""A prompt that comes thrice, since some families run only prompts of equal length together, and
one with a text to be drawn, which some encode apart."""
LISTEN = tuple(
    Listen(a.prompt, a.negative_prompt, a.height, a.width, a.steps, a.guidance, a.seed)
    for a in LOOK
)


def cases() -> list[object]:
    found = []
    for module, families in MODULES.items():
        if not module.startswith(("audio", "video")):
            continue
        for family in families:
            for number, example in enumerate(recipe(family).examples):
                marks = [] if family in ALWAYS and number == 0 else [pytest.mark.full_model]
                if missing := [name for name in example.needs if find_spec(name) is None]:
                    marks.append(pytest.mark.skip(reason=f"diffusers needs {', '.join(missing)}"))
                name = f"{family}-{example.pipeline}"
                found.append(pytest.param(family, example, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("family", "example"), cases())
def test_a_mixed_batch_equals_the_stock_pipeline(family: str, example: Example) -> None:
    loaded = load(build(family, CHECKPOINTS / "diffusers" / family), example.pipeline)
    asks = LISTEN if isinstance(example, AudioExample) else LOOK
    with counted(loaded) as together:
        made = served(loaded, example, asks)
    (alone,) = served(loaded, example, asks[1:2])
    with counted(loaded) as apart:
        wanted = [stock(loaded, example, ask) for ask in asks]
    torch.testing.assert_close(alone, wanted[1], atol=BOUND, rtol=0)
    for number, (result, reference) in enumerate(zip(made, wanted, strict=True)):
        assert result.keys() == reference.keys()
        for modality, tensor in result.items():
            assert tensor.std() > 1e-2
            difference = (tensor - reference[modality]).abs().max()
            assert difference <= BOUND, f"{modality} of {asks[number]}: {difference}"
    assert len(together) < len(apart)


def test_a_denoiser_without_rules_runs_right_one_call_at_a_time() -> None:
    """Nothing has to be written for a model to be served."""
    example = recipe("ltx").examples[0]
    loaded = load(build("ltx", CHECKPOINTS / "diffusers" / "ltx"), example.pipeline)
    unknown = type("UnknownTransformer", (nn.Module,), {"forward": lambda self: None})
    components = dict(loaded.components)
    components["transformer"] = Component(components["transformer"].module, methods_of(unknown()))
    loaded = Loaded(components, loaded.assets)
    with counted(loaded) as apart:
        made = served(loaded, example, LOOK[:3])
    assert len(apart) == sum(ask.steps for ask in LOOK[:3])
    for result, ask in zip(made, LOOK, strict=False):
        torch.testing.assert_close(result, stock(loaded, example, ask), atol=BOUND, rtol=0)


@pytest.mark.parametrize(
    ("family", "media", "pipeline"),
    [
        ("ltx2", ("image",), "LTX2ImageToVideoPipeline"),
        ("wan22_ti2v", ("image",), "WanImageToVideoPipeline"),
        ("wan21_t2v", ("video",), "WanVideoToVideoPipeline"),
        ("wan21_t2v", ("image",), None),
    ],
)
def test_media_choose_among_the_pipelines_of_the_same_weights(
    family: str, media: tuple[str, ...], pipeline: str | None
) -> None:
    folder = build(family, CHECKPOINTS / "diffusers" / family)
    kit: Kit = load(folder, recipe(family).examples[0].pipeline).assets["kit"]
    if pipeline is None:
        with pytest.raises(OmniClientError, match="takes no `image`"):
            kit.choose(media)
    else:
        assert type(kit.choose(media)).__name__ == pipeline
