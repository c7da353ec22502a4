# SPDX-License-Identifier: Apache-2.0
"""Sizes that a pipeline lets pass and its models cannot take.

Pipelines check sizes by half: what is longer than a model's table of positions, or more pictures
than it takes at a time, ends in a complaint of torch's about shapes.
"""

import regex as re

from vllm_omni.generation import GenerationRequest

LONG_PROMPT = 2048
"""Characters of a prompt that is likelier to be at fault than anything else."""
_ABOUT_SHAPES = re.compile(
    r"size of tensor|sizes of tensors|expanded size|invalid for input of size"
    r"|shapes cannot be multiplied|kernel size can't be greater|output size is too small"
    r"|expected input.* to have \d+ channels",
    re.IGNORECASE,
)


def field_at_fault(error: RuntimeError, request: GenerationRequest) -> str | None:
    """The field of a request whose size a model cannot take; None if the fault is not its.

    Args:
        error: What a pipeline raised.
        request: What it was given.
    """
    if type(error) is not RuntimeError or not _ABOUT_SHAPES.search(str(error)):
        return None
    several = next((medium for medium, count in request.media.items() if count > 1), None)
    params = request.params
    if len(request.prompt or "") > LONG_PROMPT:
        return "prompt"
    if several is not None:
        return several
    if params.num_frames is not None:
        return "num_frames"
    if params.height is not None or params.width is not None:
        return "height"
    return next(iter(request.media), None)
