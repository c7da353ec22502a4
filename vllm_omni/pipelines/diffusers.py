# SPDX-License-Identifier: Apache-2.0
"""Any diffusers checkpoint: one stage, which runs the pipeline that `model_index.json` names."""

from vllm_omni.config.diffusers import modality_of, pipeline_class
from vllm_omni.config.pipeline import Pipeline, Stage

STAGE = "diffusion"
PROGRAMS = "vllm_omni.diffusion.programs.diffusers"


def diffusers_pipeline(class_name: str) -> Pipeline:
    """The pipeline for a diffusers class.

    Raises:
        OmniConfigError: diffusers has no such class.
    """
    modality = modality_of(pipeline_class(class_name))
    return Pipeline(
        name=class_name,
        architectures=(class_name,),
        stages=(
            Stage(
                STAGE,
                engine="diffusion",
                program=f"{PROGRAMS}:{modality}",
                final_output=modality,
                takes_generation=True,
            ),
        ),
        async_chunk=False,
    )


def runs_diffusers(pipeline: Pipeline) -> bool:
    """Whether requests are arguments of a diffusers class, which the pipeline is named after."""
    return (pipeline.entry.program or "").startswith(f"{PROGRAMS}:")
