# SPDX-License-Identifier: Apache-2.0
"""Which connector serves which edge."""

import re
from collections.abc import Mapping
from dataclasses import replace

from vllm_omni.config.capture_sizes import capture_lengths
from vllm_omni.config.load import LoadedDeploy, find_stage
from vllm_omni.config.pipeline import Pipeline
from vllm_omni.config.plan import ConnectorSpec, StagePlan
from vllm_omni.config.problems import did_you_mean
from vllm_omni.errors import OmniConfigError

Ends = tuple[str, str]


def resolve_connectors(
    pipeline: Pipeline, loaded: LoadedDeploy, stages: tuple[StagePlan, ...]
) -> tuple[StagePlan, ...]:
    """The stages with a `ConnectorSpec` for every edge; shared memory where none is given.

    Args:
        pipeline: Its edges.
        loaded: Its `connectors`.
        stages: With `input_connectors` and `output_connectors` as the user wrote them.
    """
    chosen: dict[Ends, tuple[str, str]] = {}
    for plan in stages:
        for key in ("input_connectors", "output_connectors"):
            for ends, name, where in _named(pipeline, plan, key):
                _choose(chosen, ends, name, where)
    specs = {
        (edge.source, edge.target): _spec(loaded, *chosen[edge.source, edge.target])
        if (edge.source, edge.target) in chosen
        else ConnectorSpec()
        for edge in pipeline.edges
    }
    return tuple(
        replace(
            plan,
            input_connectors={s: spec for (s, t), spec in specs.items() if t == plan.name},
            output_connectors={t: spec for (s, t), spec in specs.items() if s == plan.name},
        )
        for plan in stages
    )


def _named(pipeline: Pipeline, plan: StagePlan, key: str) -> list[tuple[Ends, str, str]]:
    """Edge ends, connector name and place of each entry of one mapping."""
    incoming = key == "input_connectors"
    given = plan.input_connectors if incoming else plan.output_connectors
    word = "from_stage" if incoming else "to_stage"
    entries = []
    for other, name in given.items():
        where = f"{plan.sources[key]}.{other} = {name!r}"
        match = re.fullmatch(rf"{word}_(\w+)", other)
        if match is None:
            raise OmniConfigError(f"{where}: the key should be {word}_<stage id>")
        peer = pipeline.stages[find_stage(pipeline, match[1], where)].name
        ends = (peer, plan.name) if incoming else (plan.name, peer)
        if not any((edge.source, edge.target) == ends for edge in pipeline.edges):
            raise OmniConfigError(
                f"{where}: pipeline {pipeline.name!r} has no edge {ends[0]} -> {ends[1]}"
            )
        entries.append((ends, str(name), where))
    return entries


def _choose(chosen: dict[Ends, tuple[str, str]], ends: Ends, name: str, where: str) -> None:
    if ends in chosen and chosen[ends][0] != name:
        raise OmniConfigError(f"{where}: contradicts {chosen[ends][1]}")
    chosen.setdefault(ends, (name, where))


def _spec(loaded: LoadedDeploy, name: str, where: str) -> ConnectorSpec:
    connectors: Mapping = loaded.config.connectors or {}
    if name not in connectors:
        raise OmniConfigError(
            f"{where}: there is no such connector{did_you_mean(name, connectors)} "
            f"(connectors: {', '.join(connectors) or 'none'})"
        )
    chosen = connectors[name]
    return ConnectorSpec(chosen.name, dict(chosen.extra), capture_lengths(chosen.extra))
