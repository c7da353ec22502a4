# SPDX-License-Identifier: Apache-2.0
"""FLUX.1: position ids have no batch dimension and are equal for equal sizes."""

from vllm_omni.diffusion.rules import Batching, CallRules

RULES = {
    "FluxTransformer2DModel": {
        "forward": CallRules({"txt_ids": Batching.SHARED, "img_ids": Batching.SHARED})
    },
}
