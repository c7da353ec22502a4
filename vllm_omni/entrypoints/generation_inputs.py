# SPDX-License-Identifier: Apache-2.0
"""From a caller's prompt to the input of a diffusion stage."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from vllm_omni.connectors import serialization
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import (
    MAX_PROMPT_CHARACTERS,
    GenerationRequest,
    OmniDiffusionSamplingParams,
    checked_params,
    media_name,
)
from vllm_omni.handles import RowSpan, TensorHandle
from vllm_omni.inputs import ProgramInput
from vllm_omni.media.pixels import eight_bit

SEED_BITS = 32
"""Of seeds that are made up: short enough to be copied from an answer into a request."""
MAX_PIECES = 64
"""Most pieces of one medium."""
PROMPT_KEYS = frozenset({"prompt", "negative_prompt", "multi_modal_data", "additional_information"})
MASKS = frozenset({"mask_image", "mask_video"})
VIDEOS = frozenset({"video", "mask_video", "pose_video", "face_video"})
SOUNDS = frozenset({"audio"})


def merged_params(
    defaults: Mapping[str, Any], given: Any, field: str
) -> OmniDiffusionSamplingParams:
    """A request's parameters over the stage's defaults, checked.

    Args:
        defaults: The stage's, by name.
        given: `OmniDiffusionSamplingParams`, a mapping, or None.
        field: Name of the request field that holds `given`.

    Raises:
        OmniClientError: Names the parameter at fault.
    """
    if given is None:
        own: Mapping[str, Any] = {}
    elif isinstance(given, OmniDiffusionSamplingParams):
        own = given.given()
    elif isinstance(given, Mapping):
        own = given
    else:
        raise OmniClientError(
            f"`{field}` should be OmniDiffusionSamplingParams, a mapping or None, "
            f"not {type(given).__name__}",
            param=field,
        )
    extra = {**defaults.get("extra_args", {}), **own.get("extra_args", {})}
    merged = {**defaults, **own, **({"extra_args": extra} if extra else {})}
    params = checked_params(merged, field)
    if params.seed is None:
        params.seed = secrets.randbits(SEED_BITS)
    return params


def generation_input(prompt: Any, params: OmniDiffusionSamplingParams) -> ProgramInput:
    """The one message that starts a request of a diffusion stage.

    Args:
        prompt: Text, or a mapping with `prompt`, `negative_prompt` and `multi_modal_data`: pictures
            (Pillow's, or uint8 arrays [h, w, channels]), videos (uint8 [frames, h, w, 3] or lists
            of pictures), sounds (float [n] or [channels, n], or (samples, rate)).
        params: Checked; its seed is set.

    Raises:
        OmniClientError: Names what is wrong.
    """
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise OmniClientError(
            f"`prompt` should be text or a mapping, not {type(prompt).__name__}", param="prompt"
        )
    for key in prompt:
        if key not in PROMPT_KEYS:
            raise OmniClientError(f"unknown key {key!r} of a prompt", param=f"prompt.{key}")
    tensors, rate = _media(prompt.get("multi_modal_data") or {})
    request = GenerationRequest(
        prompt=_text(prompt, "prompt"),
        negative_prompt=_text(prompt, "negative_prompt"),
        params=params,
        media=_counts(tensors),
        sample_rate=rate,
    )
    spans = []
    if tensors:
        payload = serialization.encode(tensors)
        handle = TensorHandle("", payload.size, payload.to_bytes())
        spans.append(RowSpan(0, len(tensors), handle))
    return ProgramInput(options=_plain(request), spans=spans, final=True)


def _plain(request: GenerationRequest) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(request)
    # The engine reads a program's seed by this name.
    plain["seed"] = request.params.seed
    return plain


def _text(prompt: Mapping[str, Any], key: str) -> str | None:
    text = prompt.get(key)
    if text is not None and not isinstance(text, str):
        raise OmniClientError(f"`{key}` should be text, not {type(text).__name__}", param=key)
    if text is not None and len(text) > MAX_PROMPT_CHARACTERS:
        raise OmniClientError(
            f"`{key}` has {len(text)} characters, at most {MAX_PROMPT_CHARACTERS} are allowed",
            param=key,
        )
    return text


def _counts(tensors: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in tensors:
        medium = name.rpartition(".")[0]
        counts[medium] = counts.get(medium, 0) + 1
    return counts


def _media(data: Any) -> tuple[dict[str, torch.Tensor], int | None]:
    """Tensors by `media_name`, and the rate of the sounds."""
    if not isinstance(data, Mapping):
        raise OmniClientError("`multi_modal_data` should be a mapping", param="multi_modal_data")
    tensors: dict[str, torch.Tensor] = {}
    rate = None
    for medium, value in data.items():
        field = f"multi_modal_data.{medium}"
        if medium in SOUNDS:
            tensors[media_name(medium, 0)], rate = _sound(value, field)
            continue
        pieces = [value] if medium in VIDEOS else _pieces(value, field)
        for i, piece in enumerate(pieces):
            make = _video if medium in VIDEOS else _mask if medium in MASKS else _picture
            tensors[media_name(medium, i)] = make(piece, field)
    return tensors, rate


def _pieces(value: Any, field: str) -> Sequence[Any]:
    pieces = list(value) if isinstance(value, list | tuple) else [value]
    if not 1 <= len(pieces) <= MAX_PIECES:
        raise OmniClientError(f"`{field}`: from 1 to {MAX_PIECES} pictures", param=field)
    return pieces


def _picture(value: Any, field: str) -> torch.Tensor:
    if isinstance(value, Image.Image):
        value = eight_bit(value)
        value = np.array(value if value.mode in ("RGB", "RGBA") else value.convert("RGB"))
    return _pixels(value, field, ndim=3, what="a picture: Pillow's or uint8 [h, w, 3 or 4]")


def _mask(value: Any, field: str) -> torch.Tensor:
    if isinstance(value, Image.Image):
        value = np.array(eight_bit(value).convert("L"))
    return _pixels(value, field, ndim=2, what="a mask: Pillow's or uint8 [h, w]")


def _video(value: Any, field: str) -> torch.Tensor:
    if isinstance(value, list | tuple) and value and isinstance(value[0], Image.Image):
        frames = [np.array(eight_bit(frame).convert("RGB")) for frame in value]
        if len({frame.shape for frame in frames}) > 1:
            raise OmniClientError(f"`{field}`: its frames differ in size", param=field)
        value = np.stack(frames)
    return _pixels(value, field, ndim=4, what="a video: pictures or uint8 [frames, h, w, 3]")


def _pixels(value: Any, field: str, ndim: int, what: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    good = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == ndim
    if good and ndim > 2:
        good = value.shape[-1] in ((3, 4) if ndim == 3 else (3,))
    if not good or value.size == 0:
        raise OmniClientError(f"`{field}` should be {what}", param=field)
    return torch.from_numpy(np.ascontiguousarray(value))


def _sound(value: Any, field: str) -> tuple[torch.Tensor, int | None]:
    rate = None
    if isinstance(value, tuple) and len(value) == 2:
        value, rate = value
    samples = np.asarray(value, dtype=np.float32)
    if samples.ndim == 1:
        samples = samples[None]
    if samples.ndim != 2 or samples.size == 0 or not np.isfinite(samples).all():
        raise OmniClientError(
            f"`{field}` should be samples [n] or [channels, n], or (samples, rate)", param=field
        )
    return torch.from_numpy(np.ascontiguousarray(samples)), None if rate is None else int(rate)
