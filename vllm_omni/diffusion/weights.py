# SPDX-License-Identifier: Apache-2.0
"""One part of a large checkpoint: only the tensors under a prefix, into a module, strictly."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from vllm_omni.config.hf import register_configs
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniConfigError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def checkpoint_config(ctx: LoadContext) -> PretrainedConfig:
    """The checkpoint's whole Hugging Face config."""
    register_configs()
    return AutoConfig.from_pretrained(ctx.model, revision=ctx.revision)


def checkpoint_file(ctx: LoadContext, name: str) -> str:
    """Path of a file of the checkpoint.

    Raises:
        OSError: It has no such file.
    """
    path = cached_file(ctx.model, name, revision=ctx.revision)
    assert path is not None  # else it has raised
    return path


def read_tensors(
    ctx: LoadContext, prefix: str, folder: str = "", file: str = SAFE_WEIGHTS_NAME
) -> dict[str, torch.Tensor]:
    """As `find_tensors`.

    Raises:
        OmniConfigError: There are none.
    """
    tensors = find_tensors(ctx, prefix, folder, file)
    if not tensors:
        raise OmniConfigError(f"checkpoint {ctx.model!r} has no weights {prefix}*")
    return tensors


def find_tensors(
    ctx: LoadContext, prefix: str, folder: str = "", file: str = SAFE_WEIGHTS_NAME
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors whose names start with `prefix`, named without it, on the CPU.

    Only the files that hold such tensors are opened (and, from the hub, downloaded).

    Args:
        ctx: Which checkpoint.
        prefix: Of the tensors' names.
        folder: Of the checkpoint, with weights of its own.
        file: Name of the weights' file, if it is one.
    """
    index = cached_file(
        ctx.model,
        f"{file}.index.json",
        subfolder=folder,
        revision=ctx.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    if index is None:
        files = {file}
    else:
        with open(index, encoding="utf-8") as opened:
            weight_map = json.load(opened)["weight_map"]
        files = {shard for name, shard in weight_map.items() if name.startswith(prefix)}
    tensors = {}
    for shard_name in sorted(files):
        path = checkpoint_file(ctx, f"{folder}/{shard_name}" if folder else shard_name)
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name.startswith(prefix):
                    tensors[name.removeprefix(prefix)] = shard.get_tensor(name)
    return tensors


def load_module(
    ctx: LoadContext,
    make: Callable[[Any], ModuleT],
    config: Any,
    prefix: str,
    dtype: torch.dtype | None,
    folder: str = "",
) -> ModuleT:
    """A module with the checkpoint's weights, on its device, in evaluation mode.

    Args:
        ctx: What is loaded, and where to.
        make: The module's class.
        config: What the class takes.
        prefix: Of its weights' names.
        dtype: Of its weights; None for that of the checkpoint.
        folder: Of the checkpoint, with weights of its own; by default those of the whole.

    Raises:
        OmniConfigError: Weights are missing, unknown or of the wrong shape.
    """
    if ctx.random_weights:
        module = make(config)
    else:
        tensors = read_tensors(ctx, prefix, folder)
        with no_init_weights():
            module = make(config)
        try:
            module.load_state_dict(tensors, strict=True)
        except RuntimeError as error:
            raise OmniConfigError(f"checkpoint {ctx.model!r}, {prefix}*: {error}") from error
        if dtype is None:
            dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    return module.to(device=ctx.device, dtype=dtype).eval().requires_grad_(False)


def fill_codec(ctx: LoadContext, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a part of a codec its own of the codec's tensors.

    Raises:
        OmniConfigError: One is missing, or does not fit.
    """
    wanted = module.state_dict()
    try:
        module.load_state_dict({k: v for k, v in tensors.items() if k in wanted}, strict=True)
    except RuntimeError as error:
        raise OmniConfigError(f"codec of {ctx.model!r}: {error}") from error
