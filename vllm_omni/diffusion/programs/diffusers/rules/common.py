# SPDX-License-Identifier: Apache-2.0
"""Rules for whole kinds of models."""

from collections.abc import Mapping
from operator import attrgetter

from diffusers.models.autoencoders.autoencoder_oobleck import OobleckDiagonalGaussianDistribution
from diffusers.models.autoencoders.vae import (
    DiagonalGaussianDistribution,
    IdentityDistribution,
)

from vllm_omni.diffusion.rules import UNUSED, CallRules, Packing

ALONE = CallRules(max_batch=1)

INLINE = CallRules(inline=True)
"""Of a language model's loop over tokens: it samples, and keeps positions on the model."""

ENCODER = CallRules(dropped_outputs=frozenset({"past_key_values"}))
"""Of a text or image encoder: who has passed no key-value cache in does not want one either."""

DISTRIBUTIONS = (
    DiagonalGaussianDistribution,
    IdentityDistribution,
    OobleckDiagonalGaussianDistribution,
)
VAE: Mapping[str, CallRules] = {
    "encode": CallRules(
        packings={cls: Packing(attrgetter("parameters"), cls) for cls in DISTRIBUTIONS}
    ),
    "decode": CallRules(),
}
"""What an encoder makes is a distribution of latents, which its caller draws from."""

DETERMINISTIC_VAE = {**VAE, "decode": CallRules({"generator": UNUSED})}
"""Of those whose decoder takes a generator, for the sake of others that need one."""
