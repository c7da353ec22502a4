# SPDX-License-Identifier: Apache-2.0
"""Random numbers of requests that are batched: each is a function of its request's seed, of the
position it is for, and of where in the draw it stands.

So what a request draws does not depend on what it is batched with, it is drawn again after a
preemption, and the numbers of a whole batch are a few kernels without a generator per request, as a
CUDA graph needs it. (Reference: SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", counted instead of iterated, as in counter-based generators.)
"""

import math
from dataclasses import dataclass

import torch

_GOLDEN = -7046029254386353131
"""0x9E3779B97F4A7C15; int64 arithmetic wraps around."""
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)
_BITS = 23
"""Of a number: as many as (k + 1/2) / 2^23 has in float32, exactly, so never 0 and never 1."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers of b requests.

    Attributes:
        seeds: int64 [b].
        positions: int64 [b]; of the token that each request draws for.
    """

    seeds: torch.Tensor
    positions: torch.Tensor

    def uniform(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Numbers between 0 and 1, both excluded, float32 [b, *shape].

        Args:
            shape: Of one request's.
            stream: Distinguishes the draws for one position.
        """
        keys = _mixed(self.seeds * _GOLDEN + stream)
        keys = _mixed(keys + self.positions * _GOLDEN)
        count = math.prod(shape)
        counters = torch.arange(1, count + 1, device=keys.device) * _GOLDEN
        bits = _mixed(keys[:, None] + counters)
        bits = bits.bitwise_right_shift_(64 - _BITS).bitwise_and_((1 << _BITS) - 1)
        return bits.float().add_(0.5).mul_(2.0**-_BITS).view(-1, *shape)

    def exponential(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Of rate 1, float32 [b, *shape]; see `uniform`."""
        return self.uniform(*shape, stream=stream).log_().neg_()

    def normal(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Of mean 0 and variance 1, float32 [b, *shape]; see `uniform`."""
        return self.uniform(*shape, stream=stream).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer, in place; `numbers` are the caller's own."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        numbers.bitwise_xor_(_shifted(numbers, shift)).mul_(multiplier)
    return numbers.bitwise_xor_(_shifted(numbers, 31))


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Logically to the right: torch's shift of int64 keeps the sign."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)
