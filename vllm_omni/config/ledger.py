# SPDX-License-Identifier: Apache-2.0
"""Who wants how much of which device's memory, and whether it is there, before anything is loaded.

Shares are of a device's whole memory, as vLLM's `gpu_memory_utilization` is. An engine core refuses
to start where less than its share is free, whoever has the rest (vLLM's `request_memory`), so
replicas are counted in the order in which they start: each finds what those before it have left.

Nothing here asks a device or opens a file: both are handed in. What is not known (no source of
memory, no weights of that stage found) is not held against a deployment.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_omni.config.engine_args import engine_arg_defaults
from vllm_omni.config.plan import StagePlan
from vllm_omni.errors import OmniConfigError

SHARE = "gpu_memory_utilization"
GIB = 1 << 30
ROUNDING = 1e-6
SLACK = 0.01
"""Part of a device by which what one interface says of it differs from another (NVML counts what
CUDA reserves for itself): a refusal has to be beyond it."""
ACTIVATIONS = 1.1
"""A stage that states no share is taken to need its weights and a tenth."""
LOADED_AT_LEAST = 0.9
"""Part of a stage's tensors that is surely loaded: a checkpoint may carry heads that are left out
(of speculative decoding, of media that are switched off)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory, in bytes: all of it, and what nobody has taken."""

    total: int
    free: int


class MemorySource(Protocol):
    """Says how much memory a device has."""

    def __call__(self, device: str) -> DeviceMemory | None:
        """Of a device, by its index among those that this process may see; None if unknown.

        It must not begin to use the device: stages are forked after it.
        """


WeightSizes = Callable[[StagePlan], int]
"""Bytes that the weights of a stage take at least, once loaded; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a replica wants of one of its devices.

    Attributes:
        stage: `stage 1 (talker)`, with the replica if there are several.
        share: Of the whole device; 0 if it states none.
        source: Where the share comes from.
        weights: Bytes of weights that it loads there, at least; 0 if unknown.
        cache: Bytes of its KV cache, where it states these.
        keeps_share: It takes all of its share. An engine core whose cache has a size of its own
            wants the share to be free when it starts, and takes weights and cache.
    """

    stage: str
    share: float
    source: str
    weights: int = 0
    cache: int = 0
    keeps_share: bool = True

    @property
    def stated(self) -> float:
        """The share that it takes for good; 0 if it takes another amount."""
        return self.share if self.keeps_share else 0.0

    def asks(self, total: int) -> float:
        """Bytes that have to be free when it starts."""
        return max(self.share * total, self.takes(total))

    def takes(self, total: int) -> float:
        """Bytes that it has from then on."""
        if self.stated:
            return self.stated * total
        return ACTIVATIONS * self.weights + self.cache

    def written(self, total: int) -> str:
        """For people: `stage 1 (talker) 0.8 = 63.2 GiB`."""
        if self.stated:
            return f"{self.stage} {self.share:g} = {_gib(self.share * total)}"
        parts = [f"{_gib(self.weights)} of weights"] if self.weights else []
        parts += [f"{_gib(self.cache)} of KV cache"] if self.cache else []
        return f"{self.stage} {' and '.join(parts) or 'an unknown amount'}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The claims on each device, in the order in which replicas start."""

    claims: Mapping[str, tuple[Claim, ...]]

    @classmethod
    def of(cls, stages: Sequence[StagePlan], weights: WeightSizes = lambda stage: 0) -> "Ledger":
        """Of a plan's stages; those on a CPU claim nothing."""
        claims: dict[str, list[Claim]] = defaultdict(list)
        for stage in stages:
            if any(device != "cpu" for group in stage.devices for device in group):
                for device, claim in _claims(stage, weights(stage)):
                    claims[device].append(claim)
        return cls({device: tuple(claims[device]) for device in sorted(claims, key=_number)})

    def check_shares(self) -> None:
        """Check what needs no device: shares of the same one.

        Raises:
            OmniConfigError: They add up to more than 1.
        """
        for device, claims in self.claims.items():
            shares = [claim for claim in claims if claim.stated]
            total = sum(claim.share for claim in shares)
            if len(shares) > 1 and total > 1 + ROUNDING:
                asked = ", ".join(f"{claim.stage} {claim.share:g}" for claim in shares)
                raise OmniConfigError(
                    f"device {device}: {SHARE} adds up to {total:g}, more than 1: "
                    f"{asked}; lower the shares or move a stage to another device"
                )

    def check_memory(self, source: MemorySource) -> Iterator[str]:
        """Check each device's claims against what it has; gives a line for each, for the log.

        Raises:
            OmniConfigError: A stage does not fit; says which, who else is there and what to change.
        """
        for device, claims in self.claims.items():
            memory = source(device)
            if memory is None:
                continue
            for claim in claims:
                _check_weights(device, claim, memory)
            _check_turns(device, claims, memory)
            yield (
                f"device {device}: {_gib(memory.free)} of {_gib(memory.total)} free; "
                + ", ".join(claim.written(memory.total) for claim in claims)
            )


def _claims(stage: StagePlan, weights: int) -> Iterator[tuple[str, Claim]]:
    """Of each replica on each of its devices."""
    for replica_id, devices in enumerate(stage.devices):
        name = f"stage {stage.stage_id} ({stage.name})"
        if stage.num_replicas > 1:
            name += f" replica {replica_id}"
        for position, device in enumerate(devices):
            yield device, _claim(stage, name, _part(stage, position, weights))


def _part(stage: StagePlan, position: int, weights: int) -> int:
    """Bytes of a replica's weights that one of its devices takes at least; 0 if unknown."""
    if stage.diffusion is None:
        return weights // len(stage.devices[0])
    # The first has all models, its part of the denoisers; the others these alone.
    return 0 if position else weights // stage.diffusion.tensor_parallel_size


def _claim(stage: StagePlan, name: str, weights: int) -> Claim:
    args = stage.engine_args
    share = args.get(SHARE) if stage.diffusion is None else stage.diffusion.gpu_memory_utilization
    source = stage.sources.get(SHARE, "") if share is not None else "vLLM's default"
    if stage.diffusion is not None:
        return Claim(stage=name, share=share or 0.0, source=source, weights=weights)
    cache = args.get("kv_cache_memory_bytes") or 0
    return Claim(
        stage=name,
        share=float(engine_arg_defaults()[SHARE] if share is None else share),
        source=source,
        weights=weights,
        cache=int(cache),
        keeps_share=share is not None or not cache,
    )


def _check_weights(device: str, claim: Claim, memory: DeviceMemory) -> None:
    weights = LOADED_AT_LEAST * claim.weights
    limit = claim.share * memory.total if claim.stated else float(memory.total)
    if weights <= limit:
        return
    whose = f"{SHARE} = {claim.share:g} (from {claim.source})" if claim.stated else "all"
    least = weights / memory.total
    remedy = f"raise it above {least:.2f}" if least < 1 else "spread it with tensor_parallel_size"
    if least >= 1 and not claim.stated:
        remedy = "it needs a larger device"
    raise OmniConfigError(
        f"device {device}: the weights of {claim.stage} take {_gib(claim.weights)}, more than "
        f"{whose} of the device ({_gib(limit)}); {remedy}"
    )


def _check_turns(device: str, claims: Sequence[Claim], memory: DeviceMemory) -> None:
    """Let each take what it wants, in turn."""
    left = memory.free + SLACK * memory.total
    for claim in claims:
        if claim.asks(memory.total) > left:
            raise _no_room(device, claim, claims, memory)
        left -= claim.takes(memory.total)


def _no_room(
    device: str, claim: Claim, claims: Sequence[Claim], memory: DeviceMemory
) -> OmniConfigError:
    total = memory.total
    wanted = sum(each.takes(total) for each in claims)
    asked = ", ".join(each.written(total) for each in claims)
    message = (
        f"device {device}: {_gib(memory.free)} of its {_gib(total)} are free, and its stages want "
        f"{_gib(wanted)}: {asked}"
    )
    if not claim.keeps_share:
        message += (
            f"; {claim.stage} does not start where less than {claim.share:g} = "
            f"{_gib(claim.share * total)} is free ({SHARE}, {claim.source}), whatever its "
            "kv_cache_memory_bytes"
        )
    if claim.share:
        remedy = f"lower {SHARE} of {claim.stage} (from {claim.source})"
    else:
        remedy = f"{claim.stage} states no {SHARE}: lower that of another stage"
    return OmniConfigError(
        f"{message}; {remedy}, move a stage to another device with `devices`, or end what else "
        f"uses device {device}"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _number(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdecimal() else (-1, device)
