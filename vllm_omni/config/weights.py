# SPDX-License-Identifier: Apache-2.0
"""Which files weights may come from: safetensors, which hold nothing but numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_omni.errors import OmniConfigError

_PICKLED_FORMATS = ("pt", "npcache")
_PICKLED_FILES = ("*.bin", "*.pt", "*.pth")
_ANY_FORMAT = ("auto", "hf")


def safe_load_format(engine_args: Mapping[str, Any]) -> str:
    """The `load_format` of an AR stage, with pickled weights only under `trust_remote_code`.

    vLLM's `auto` takes pickles where there is no safetensors file.

    Args:
        engine_args: The stage's; `model`, `load_format` and `trust_remote_code` are read.

    Raises:
        OmniConfigError: The weights are pickles.
    """
    load_format = str(engine_args.get("load_format") or "auto")
    model = engine_args["model"]
    if engine_args.get("trust_remote_code"):
        return load_format
    if load_format in _PICKLED_FORMATS:
        raise OmniConfigError(
            f"load_format = {load_format!r} reads pickled weights, which takes --trust-remote-code"
        )
    if load_format not in _ANY_FORMAT:
        return load_format
    if _has(model, _PICKLED_FILES) and not _has(model, ("*.safetensors",)):
        raise OmniConfigError(
            f"model {model!r} has pickled weights ({', '.join(_PICKLED_FILES)}) and no "
            "*.safetensors; convert them, or trust them with --trust-remote-code"
        )
    return "safetensors"


def _has(model: str, patterns: tuple[str, ...]) -> bool:
    """Whether a folder has such files. What the hub has is told when vLLM looks there."""
    return any(True for pattern in patterns for _ in Path(model).glob(pattern))
