# SPDX-License-Identifier: Apache-2.0
"""The speakers of a Qwen2.5-Omni checkpoint: its `spk_dict.pt`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers.utils import cached_file

from vllm_omni.errors import OmniConfigError

SPEAKERS_FILE = "spk_dict.pt"


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice.

    Attributes:
        bos_token: Its start token, an id of the thinker's vocabulary.
        conditioning: float32 [1, enc_emb_dim].
        reference_mel: float32 [1, frames, mel_dim].
    """

    bos_token: int
    conditioning: torch.Tensor
    reference_mel: torch.Tensor


def read_speakers(path: str) -> dict[str, Speaker]:
    """The speakers of a file by name, in its order. Nothing in the file is executed.

    Raises:
        OmniConfigError: It is no such file, or a speaker in it is not whole.
    """
    try:
        speakers = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch fails with whatever the bytes lead to
        raise OmniConfigError(f"{path}: cannot be read as tensors: {error}") from error
    if not isinstance(speakers, Mapping) or not speakers:
        raise OmniConfigError(f"{path}: should hold speakers by name, and at least one")
    return {str(name): _speaker(path, str(name), entry) for name, entry in speakers.items()}


def _speaker(path: str, name: str, entry: Any) -> Speaker:
    entry = entry if isinstance(entry, Mapping) else {}
    token = entry.get("bos_token")
    token = token.item() if isinstance(token, torch.Tensor) and token.numel() == 1 else token
    if isinstance(token, bool) or not isinstance(token, int):
        raise OmniConfigError(f"{path}: {name}.bos_token = {token!r}: should be a token id")
    return Speaker(
        token,
        _tensor(f"{path}: {name}.cond", entry.get("cond"), 2),
        _tensor(f"{path}: {name}.ref_mel", entry.get("ref_mel"), 3),
    )


def _tensor(where: str, value: Any, dimensions: int) -> torch.Tensor:
    if (
        not isinstance(value, torch.Tensor)
        or value.dim() != dimensions
        or not value.numel()
        or not value.isfinite().all()
    ):
        raise OmniConfigError(
            f"{where}: should be a tensor of {dimensions} dimensions with finite numbers"
        )
    return value.float()


@cache
def speakers(model: str) -> Mapping[str, Speaker]:
    """The speakers of a checkpoint by name, in the file's order.

    Args:
        model: Folder or hub name of the checkpoint.

    Raises:
        OmniConfigError: The file is missing or broken.
    """
    try:
        path = cached_file(model, SPEAKERS_FILE)
    except OSError as error:
        raise OmniConfigError(f"model {model!r}: it has no {SPEAKERS_FILE}: {error}") from error
    assert path is not None  # else it has raised
    return read_speakers(path)
