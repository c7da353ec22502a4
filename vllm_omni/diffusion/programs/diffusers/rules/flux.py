# SPDX-License-Identifier: Apache-2.0
"""FLUX and the transformers that descend from it: position ids are those of one picture.

FLUX.1's have no batch dimension; of FLUX.2's only the first row is read.
"""

from vllm_omni.diffusion.rules import Batching, CallRules

POSITIONS = {"txt_ids": Batching.SHARED, "img_ids": Batching.SHARED}

RULES = {
    name: {"forward": CallRules(POSITIONS)}
    for name in (
        "FluxTransformer2DModel",
        "Flux2Transformer2DModel",
        "ChromaTransformer2DModel",
        "OvisImageTransformer2DModel",
        "LongCatImageTransformer2DModel",
    )
}
