# SPDX-License-Identifier: Apache-2.0
"""Every row-driven model class is one that vLLM's Model Runner V2 can feed (on CUDA)."""

import pytest
from vllm import ModelRegistry

from vllm_omni.models.row_fed import RowFed
from vllm_omni.pipelines.registry import PIPELINES
from vllm_omni.plugin import register

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

ARCHITECTURES = sorted(
    {
        stage.arch
        for pipeline in map(PIPELINES.__getitem__, PIPELINES.names())
        for stage in pipeline.stages
        if stage.row_driven and stage.arch is not None
    }
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_can_be_fed_on_cuda(architecture: str) -> None:
    register()
    assert issubclass(ModelRegistry.models[architecture].load_model_cls(), RowFed)
