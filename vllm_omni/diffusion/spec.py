# SPDX-License-Identifier: Apache-2.0
"""How a program declares itself: what it loads, how its components' calls batch, what it runs.

A program is a module-level `ProgramSpec`, which a stage names by its dotted path
(`program="vllm_omni.diffusion.programs.code2wav:qwen3_omni"`).
"""

import importlib
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_omni.config.plan import DiffusionStageConfig, PipelineSettings
from vllm_omni.diffusion.ranks.group import Group
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.errors import OmniConfigError

if TYPE_CHECKING:
    from vllm_omni.diffusion.program import Program


@dataclass(frozen=True, slots=True)
class LoadContext(PipelineSettings):
    """What a loader is given, with the settings of a pipeline.

    Attributes:
        model: The checkpoint: a folder or a name on the hub.
        device: Where the components go.
        dtype: The deployment's dtype; None for the program's or checkpoint's own choice.
        revision: Branch, tag or commit on the hub.
        random_weights: Do not read weights (`load_format: dummy`).
        trust_remote_code: Run code that comes with the checkpoint.
        enforce_eager: Compile nothing.
        group: This process among the replica's ranks; None if it is alone.
    """

    model: str
    device: torch.device
    dtype: torch.dtype | None = None
    revision: str | None = None
    random_weights: bool = False
    trust_remote_code: bool = False
    enforce_eager: bool = True
    group: Group | None = None


def load_context(
    settings: DiffusionStageConfig, device: torch.device, group: Group | None = None
) -> LoadContext:
    """What a stage's settings say to a loader.

    Raises:
        OmniConfigError: Its dtype is none.
    """
    return LoadContext(
        settings.model,
        device,
        _dtype(settings.dtype),
        settings.revision,
        random_weights=settings.load_format == "dummy",
        trust_remote_code=settings.trust_remote_code,
        enforce_eager=settings.enforce_eager,
        group=group,
        **settings.of_pipeline(),
    )


@dataclass(frozen=True, slots=True)
class Component:
    """A model that programs call and that the engine runs.

    Attributes:
        module: The model, in evaluation mode, on its device.
        methods: Methods that park, with their rules. `forward` means calling the module.
        within: Makes the module a variant of itself (one with an adapter, say) for one forward.
            Programs name theirs by `Program.vary`, None is the module as it is. Calls of
            different variants never run together. It may yield another module, which then runs in
            the place of this one.
        spread: Its forwards run on all ranks of the replica, where it has several.
    """

    module: nn.Module
    methods: Mapping[str, CallRules] = field(default_factory=lambda: {"forward": CallRules()})
    within: Callable[[Hashable], AbstractContextManager[nn.Module | None]] | None = None
    spread: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a loader returns.

    Attributes:
        components: By the name that the program uses.
        assets: Anything else that the programs of a replica share and do not change.
    """

    components: Mapping[str, Component]
    assets: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpreadProgram:
    """What a program needs that can run on several devices.

    Attributes:
        check: Looks at settings and checkpoint before anything is loaded; raises `OmniConfigError`
            if they do not go together.
        load: Loads what runs on ranks other than the first, by the name of the component.
    """

    check: Callable[[LoadContext], None]
    load: Callable[[LoadContext], Mapping[str, nn.Module]]


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A program and what it needs.

    Attributes:
        name: For logs and error messages.
        run: The program: ordinary code, run once per request.
        load: Loads the components, once per replica.
        modality: What it makes; of outputs that are only an end mark or an error.
        default_seed: Seed of a request that gives none.
        spread: How it runs on several devices; None if it cannot.
    """

    name: str
    run: Callable[["Program"], None]
    load: Callable[[LoadContext], Loaded]
    modality: str = "audio"
    default_seed: int = 0
    spread: SpreadProgram | None = None


def resolve_program(path: str) -> ProgramSpec:
    """The program at `module:name`.

    Raises:
        OmniConfigError: There is none.
    """
    module_name, _, name = path.partition(":")
    try:
        found = vars(importlib.import_module(module_name)).get(name)
    except ModuleNotFoundError as error:
        raise OmniConfigError(f"program {path!r}: {error}") from error
    if not isinstance(found, ProgramSpec):
        raise OmniConfigError(
            f"program {path!r}: {module_name!r} has no program {name!r} (a ProgramSpec)"
        )
    return found


def _dtype(name: str) -> torch.dtype | None:
    if name == "auto":
        return None
    dtypes = {str(d).removeprefix("torch."): d for d in _DTYPES}
    if name not in dtypes:
        raise OmniConfigError(f"dtype {name!r} is not supported; known: auto, {', '.join(dtypes)}")
    return dtypes[name]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
