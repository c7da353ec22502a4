# SPDX-License-Identifier: Apache-2.0
"""One part of a large checkpoint: only the tensors under a prefix, into a module, strictly."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from vllm_omni.errors import OmniConfigError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def checkpoint_config(model: str) -> PretrainedConfig:
    """The checkpoint's whole Hugging Face config."""
    return AutoConfig.from_pretrained(model)


def checkpoint_file(model: str, name: str) -> str:
    """Path of a file of a checkpoint (a folder or a name on the hub)."""
    path = cached_file(model, name)
    assert path is not None  # else it has raised
    return path


def read_tensors(model: str, prefix: str) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors whose names start with `prefix`, named without it, on the CPU.

    Only the files that hold such tensors are opened (and, from the hub, downloaded).

    Raises:
        OmniConfigError: There are none.
    """
    index = cached_file(model, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        files = {SAFE_WEIGHTS_NAME}
    else:
        with open(index, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
        files = {file for name, file in weight_map.items() if name.startswith(prefix)}
    tensors = {}
    for file in sorted(files):
        with safe_open(checkpoint_file(model, file), framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name.startswith(prefix):
                    tensors[name.removeprefix(prefix)] = shard.get_tensor(name)
    if not tensors:
        raise OmniConfigError(f"checkpoint {model!r} has no weights {prefix}*")
    return tensors


def load_module(
    make: Callable[[Any], ModuleT],
    config: Any,
    model: str,
    prefix: str,
    device: torch.device,
    dtype: torch.dtype | None,
) -> ModuleT:
    """A module with the checkpoint's weights, in evaluation mode.

    Args:
        make: Its class.
        config: What the class takes.
        model: Checkpoint folder or hub name.
        prefix: Of its weights' names.
        device: Where it goes.
        dtype: Of its weights; None for that of the checkpoint.

    Raises:
        OmniConfigError: Weights are missing, unknown or of the wrong shape.
    """
    tensors = read_tensors(model, prefix)
    with no_init_weights():
        module = make(config)
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise OmniConfigError(f"checkpoint {model!r}, weights {prefix}*: {error}") from error
    if dtype is None:
        dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    return module.to(device=device, dtype=dtype).eval().requires_grad_(False)
