# SPDX-License-Identifier: Apache-2.0
"""The typed pipeline graph: stages and the edges between them (DESIGN.md section 5).

A pipeline is data about a model family. Where it runs (devices, replicas, memory) is the deploy
configuration's business.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, Protocol

from transformers import PretrainedConfig

from vllm_omni.config.problems import Problem
from vllm_omni.errors import OmniConfigError
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import StageInput
from vllm_omni.outputs import StageOutput
from vllm_omni.speech.family import SpeechFamilyFactory

Modality = Literal["text", "audio", "image", "video", "action", "reference"]
"""`reference`: what a codec makes of a recording; asked for by the front end, not by clients."""


@dataclass(frozen=True, slots=True)
class EdgeContext:
    """What an edge may know when a request starts.

    Attributes:
        model: Folder or hub name of the checkpoint.
        config: The checkpoint's whole Hugging Face config.
        voice: The requested speaker, already validated by the pipeline, or None for its default.
        streaming: `async_chunk`: yield as data arrives, else once at the end.
        extra: The connector's `extra` of this edge from the deploy YAML (chunk sizes, ...).
        beside: Tensors of the request's prompt for the target stage (see `RowPrompt`).
        initial_frames: Likewise.
    """

    model: str
    config: PretrainedConfig
    voice: str | None
    streaming: bool
    extra: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[RowSpan, ...] = ()
    initial_frames: int | None = None


class EdgeState(Protocol):
    """One request's passage over one edge: a small object, pure but for its own bookkeeping."""

    def feed(self, output: StageOutput) -> StageInput | None:
        """Take one upstream output; return input for the downstream stage, or None for not yet.

        The first input that is returned submits the request downstream, later ones update it.
        After an output with `finished`, the returned input (if any) must be marked final.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """One model of a pipeline.

    Attributes:
        name: Unique within the pipeline (`thinker`).
        engine: `ar` (vLLM engine core) or `diffusion` (call-batching engine).
        arch: vLLM architecture to load, for `ar`.
        program: Dotted path `module:function` of the program, for `diffusion`.
        config_name: Attribute of the checkpoint's config that is this stage's own config
            (`talker_config`); None for the whole config.
        needs: Output modality that makes this stage necessary; None if every request visits it.
        emits: Names of the row tensors that it emits for downstream stages: `embeds` (the inputs
            of the first layer), `hidden` (the final norm's output), `hidden:N` (the input of
            layer N; `hidden:accept` takes N from the talker config's `accept_hidden_layer`),
            `positions` (int32 [n, 3]); of a row-driven stage its frames, under a name of its own:
            `codes` (int32 [n, groups]) or numbers (float32 [n, width]).
        row_driven: Its inputs are rows: of an upstream stage (a talker), or of the prompt (the
            codec language model of a `speech` pipeline).
        final_output: Modality that it gives to the client, if any.
        owns_tokenizer: It turns text into tokens and back.
        default_sampling: Sampling defaults of the family (below YAML, flags and request).
        shared_sections: Sections of the checkpoint's config (dotted, "" for the whole) whose layers
            ranks of `tensor_parallel_size` divide among them; empty if they cannot.
        takes_generation: Its requests are `GenerationRequest`s, not tokens or rows.
        also_makes: Modalities that it makes of requests for these alone, which enter here and
            visit no other stage (a codec encodes recordings).
        sampling_constraints: Always win over a request (`stop_token_ids` are united).
    """

    name: str
    engine: Literal["ar", "diffusion"]
    arch: str | None = None
    program: str | None = None
    config_name: str | None = None
    needs: Modality | None = None
    emits: tuple[str, ...] = ()
    row_driven: bool = False
    final_output: Modality | None = None
    owns_tokenizer: bool = False
    shared_sections: tuple[str, ...] = ()
    takes_generation: bool = False
    also_makes: tuple[Modality, ...] = ()
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    sampling_constraints: Callable[[PretrainedConfig], Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed connection; `start` makes the per-request state object."""

    source: str
    target: str
    start: Callable[[EdgeContext], EdgeState]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A model family as a DAG of stages.

    Attributes:
        name: Registry key, as users know it (`qwen3_omni_moe`).
        architectures: `architectures` of checkpoints that it serves.
        stages: In the order of their ids.
        edges: Source and target are stage names.
        voices: Names of the speakers a checkpoint offers, given its config and folder, in the
            checkpoint's own spelling; compared without case. The first one is the default.
        default_voice: The family's default speaker, if the checkpoint has it.
        async_chunk: Default of the deploy YAML's `async_chunk`.
        files: Files that a checkpoint must have beside config, tokenizer and weights: of each
            entry, one.
        problems: What is wrong with a checkpoint, given its config (whose sections are there) and
            its folder; checked before any stage is started.
        speech: Of a text-to-speech pipeline: makes the entry stage's rows of `SpeechRequest`s.
    """

    name: str
    architectures: tuple[str, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...] = ()
    voices: Callable[[PretrainedConfig, str], tuple[str, ...]] | None = None
    default_voice: str | None = None
    async_chunk: bool = True
    files: tuple[tuple[str, ...], ...] = ()
    problems: Callable[[PretrainedConfig, str], Iterable[Problem]] | None = None
    speech: SpeechFamilyFactory | None = None

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise OmniConfigError(f"pipeline {self.name!r}: stage names must be unique: {names}")
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in names:
                    raise OmniConfigError(
                        f"pipeline {self.name!r}: edge {edge.source} -> {edge.target} names the "
                        f"unknown stage {end!r}; stages are {names}"
                    )
        graph: dict[str, list[str]] = {name: [] for name in names}
        for edge in self.edges:
            graph[edge.target].append(edge.source)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            raise OmniConfigError(
                f"pipeline {self.name!r}: edges form a cycle: {error.args[1]}"
            ) from error
        entries = [name for name, sources in graph.items() if not sources]
        if len(entries) != 1:
            raise OmniConfigError(
                f"pipeline {self.name!r}: exactly one stage must have no incoming edge: {entries}"
            )

    @property
    def entry(self) -> Stage:
        """The stage that takes the client's prompt."""
        targets = {edge.target for edge in self.edges}
        return next(stage for stage in self.stages if stage.name not in targets)

    @property
    def output_modalities(self) -> tuple[Modality, ...]:
        """Modalities that a client can ask for."""
        return tuple(dict.fromkeys(s.final_output for s in self.stages if s.final_output))

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def stage_id(self, name: str) -> int:
        """Index of the stage of that name."""
        return [stage.name for stage in self.stages].index(name)

    def edges_from(self, name: str) -> tuple[Edge, ...]:
        """Outgoing edges of a stage."""
        return tuple(edge for edge in self.edges if edge.source == name)

    def needed_stages(self, modalities: frozenset[str]) -> tuple[Stage, ...]:
        """Stages that a request for these output modalities visits, in order."""
        for stage in self.stages:
            if modalities <= set(stage.also_makes):
                return (stage,)
        return tuple(s for s in self.stages if s.needs is None or s.needs in modalities)
