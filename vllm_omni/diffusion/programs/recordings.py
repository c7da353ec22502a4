# SPDX-License-Identifier: Apache-2.0
"""Recordings that a codec stage encodes."""

import itertools
from collections.abc import Callable, Mapping

import torch

from vllm_omni.diffusion.program import Program
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import media_name
from vllm_omni.speech.family import REFERENCE


def received_recordings(ctx: Program) -> list[torch.Tensor]:
    """What the messages bring, to their end.

    Raises:
        OmniClientError: That is nothing.
    """
    tensors: dict[str, torch.Tensor] = {}
    final = False
    while not final:
        message = ctx.receive()
        tensors.update(message.tensors)
        final = message.final
    named = (tensors.get(media_name(REFERENCE, index)) for index in itertools.count())
    recordings = list(itertools.takewhile(lambda tensor: tensor is not None, named))
    if not recordings:
        raise OmniClientError("there is no recording to encode", param=REFERENCE)
    return recordings


def encode_recordings(
    ctx: Program, encode: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
) -> None:
    """Encode what the messages bring; emits one `reference` each.

    Args:
        ctx: Of the request.
        encode: A recording -> tensors by name, on the CPU; the first one has a row per frame.
    """
    for index, recording in enumerate(received_recordings(ctx)):
        made = encode(recording)
        frames = len(next(iter(made.values())))
        ctx.emit(REFERENCE, made, {"index": index, "frames": frames})


def checked_recording(recording: torch.Tensor, least: int) -> torch.Tensor:
    """The recording as float32 [samples].

    Raises:
        OmniClientError: It is too short, or has samples that are no numbers.
    """
    samples = recording.reshape(-1).float()
    if len(samples) < least:
        raise OmniClientError(
            f"a recording of {len(samples)} samples is too short: at least {least} are needed",
            param=REFERENCE,
        )
    if not samples.isfinite().all():
        raise OmniClientError("a recording has samples that are no numbers", param=REFERENCE)
    return samples
