# SPDX-License-Identifier: Apache-2.0
"""Recordings that a codec stage encodes.

Recordings of whole frames are padded at the end to run together; others run with those of their own
length, as Mimi pads what it makes of the last, incomplete frame in a way of its own.
"""

import itertools

import torch

from vllm_omni.diffusion.program import Program
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import media_name
from vllm_omni.models.mimi import MimiEncoding

REFERENCE = "reference"
"""Medium of recordings, and modality of what is made of them."""


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


def encoded_frames(
    encoder: MimiEncoding, samples: torch.Tensor, hop: int, groups: int
) -> torch.Tensor:
    """Codes of a recording; those of whole frames run together.

    Args:
        encoder: Its calls may be the engine's.
        samples: float32 [1, n].
        hop: Samples per frame.
        groups: Codes per frame.

    Returns:
        int32 [frames, groups], on the CPU.
    """
    encode = encoder.frames if samples.shape[1] % hop else encoder.whole_frames
    return encode(samples, groups=groups)[0].cpu()


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
