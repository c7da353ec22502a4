# SPDX-License-Identifier: Apache-2.0
"""docs/models/supported_models.md, from the registry of pipelines and the tiny checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.docs.tables import table
from vllm_omni.config.diffusers import modality_of, pipeline_class
from vllm_omni.pipelines.registry import BUILTINS, PIPELINES
from vllm_omni.testing.diffusers_tiny import MODULES, recipe
from vllm_omni.testing.diffusers_tiny.media import VideoExample
from vllm_omni.testing.diffusers_tiny.recipe import Example

TRANSFORMERS = "transformers"
AUTHORS = "the authors' package"
PLAIN = "a plain implementation of its description (no package of it runs here)"
DEPLOY = Path(__file__).parents[2] / "vllm_omni" / "deploy"
FOUND_MEDIA = ("image", "mask", "video", "audio")


@dataclass(frozen=True, slots=True)
class Family:
    """What the registry does not say of a family.

    Attributes:
        name: As people call it.
        models: Names at the hub.
        reference: What its answers are compared with.
        test: Module of `tests/parity`.
    """

    name: str
    models: tuple[str, ...]
    reference: str
    test: str


FAMILIES: Mapping[str, Family] = {
    "csm": Family("CSM", ("sesame/csm-1b",), TRANSFORMERS, "test_csm"),
    "dia": Family("Dia", ("nari-labs/Dia-1.6B-0626",), TRANSFORMERS, "test_dia"),
    "higgs_audio_v2": Family(
        "Higgs-Audio v2",
        ("bosonai/higgs-audio-v2-generation-3B-base",),
        TRANSFORMERS,
        "test_higgs_audio_v2",
    ),
    "higgs_multimodal_qwen3": Family(
        "Higgs-Audio v3", ("bosonai/higgs-audio-v3-tts-4b",), PLAIN, "test_higgs_audio_v3"
    ),
    "moss_tts": Family(
        "MOSS-TTS (delay model)", ("OpenMOSS-Team/MOSS-TTS",), PLAIN, "test_moss_tts"
    ),
    "qwen2_5_omni": Family(
        "Qwen2.5-Omni",
        ("Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen2.5-Omni-3B"),
        TRANSFORMERS,
        "test_qwen_omni",
    ),
    "qwen3_omni_moe": Family(
        "Qwen3-Omni", ("Qwen/Qwen3-Omni-30B-A3B-Instruct",), TRANSFORMERS, "test_qwen_omni"
    ),
    "qwen3_tts": Family(
        "Qwen3-TTS",
        tuple(
            f"Qwen/Qwen3-TTS-12Hz-1.7B-{kind}" for kind in ("CustomVoice", "VoiceDesign", "Base")
        ),
        AUTHORS,
        "test_qwen3_tts",
    ),
    "vibevoice": Family("VibeVoice", ("microsoft/VibeVoice-1.5B",), TRANSFORMERS, "test_vibevoice"),
    "voxcpm2": Family("VoxCPM2", ("openbmb/VoxCPM2",), AUTHORS, "test_voxcpm2"),
    "voxtral_tts": Family(
        "Voxtral TTS", ("mistralai/Voxtral-4B-TTS-2603",), PLAIN, "test_voxtral_tts"
    ),
}

INTRO = """\
# Supported models

A model is in these tables when the test suite compares its answers with those of its reference, on
a tiny random checkpoint of the same layout, in single precision on a CPU: alone, in mixed batches,
streamed and not. *Parity* names the reference and the test. Published weights were not downloaded
for this; what ran on a GPU, at which size, is in [Benchmarks](../benchmarks.md).

How to ask each for something: [Tasks](../tasks/index.md). Another model: [Adding a
model](../design/adding_a_model.md).
"""
DIFFUSERS = """\
## Diffusers pipelines

Any checkpoint whose `model_index.json` names a diffusers pipeline is served. These are the ones
that are compared with the stock pipeline, called alone: every step of a mixed batch (sizes, step
counts, guidance, seeds), largest difference 1e-4; most of a family's further pipelines at night
(`--run-level full_model`). *Tiny* is the name of the checkpoint that
`python -m vllm_omni.testing.diffusers_tiny NAME FOLDER` makes.
"""


def render() -> str:
    """The page."""
    images, media = ("tests/diffusion/test_image_parity.py", "tests/diffusion/test_media_parity.py")
    return "\n".join(
        [
            INTRO,
            "## Pipelines of stages\n",
            table(("model", "architecture", "answers with", "deploy files", "parity"), _stages()),
            DIFFUSERS,
            f"Parity of pictures: `{images}`; of videos and sounds: `{media}`.\n",
            table(("pipeline", "makes", "from", "tiny"), _diffusers()),
        ]
    )


def _stages() -> list[tuple[str, ...]]:
    rows = []
    for family in sorted(BUILTINS, key=lambda builtin: FAMILIES[builtin.module].name.lower()):
        about = FAMILIES[family.module]
        models = ", ".join(f"`{model}`" for model in about.models)
        rows.append(
            (
                f"{about.name}: {models}",
                ", ".join(f"`{name}`" for name in family.architectures),
                ", ".join(PIPELINES[family.module].output_modalities),
                _deploy_files(family.module),
                f"{about.reference}; `tests/parity/{about.test}.py`",
            )
        )
    return rows


def _deploy_files(module: str) -> str:
    """The packaged deploy files of a pipeline: its own, and what follows its name in others'."""
    names = sorted(path.stem for path in DEPLOY.glob(f"{module}*.yaml"))
    return ", ".join([f"`{module}`", *(f"`…{name.removeprefix(module)}`" for name in names[1:])])


def _diffusers() -> list[tuple[str, ...]]:
    rows = []
    for module in MODULES:
        for family in MODULES[module]:
            for example in recipe(family).examples:
                cls = pipeline_class(example.pipeline)
                rows.append(
                    (f"`{example.pipeline}`", modality_of(cls), _takes(example), f"`{family}`")
                )
    return sorted(rows, key=lambda row: (row[1], row[0]))


def _takes(example: Example) -> str:
    """What the example's request is made of."""
    arguments = [example.image or "", example.mask or ""]
    if isinstance(example, VideoExample):
        arguments += example.inputs
    text = ["text"] if example.prompt else []
    found = [medium for medium in FOUND_MEDIA if any(medium in name for name in arguments)]
    return ", ".join(text + found)
