# SPDX-License-Identifier: Apache-2.0
"""Guidance that takes effect, or is refused: what pipelines themselves only warn about."""

from typing import Any

from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin

from vllm_omni.config.diffusers import call_parameters
from vllm_omni.diffusion.programs.diffusers.kit import registered
from vllm_omni.errors import OmniClientError


def guide(pipeline: DiffusionPipeline, arguments: dict[str, Any]) -> None:
    """See that what a request says about guidance takes effect, and complete it.

    Args:
        pipeline: The one to be called.
        arguments: Of the call so far; changed.

    Raises:
        OmniClientError: `guidance_scale` or `negative_prompt` would change nothing.
    """
    known = call_parameters(type(pipeline))
    if "do_classifier_free_guidance" in dir(pipeline):  # `guidance_scale` is all there is to it
        return
    if "guidance_scale" in arguments and not _reads_guidance(pipeline):
        hint = "; use `true_cfg_scale`" if "true_cfg_scale" in known else ""
        raise OmniClientError(
            "`guidance_scale`: has no effect, for this model was not distilled to take it" + hint,
            param="guidance_scale",
        )
    if "true_cfg_scale" in known and "negative_prompt" in known:
        _guide_true_cfg(arguments, known["true_cfg_scale"].default)


def _reads_guidance(pipeline: DiffusionPipeline) -> bool:
    """Whether the transformer is told the scale (FLUX.1 dev is, FLUX.1 schnell and Qwen-Image are
    not)."""
    transformer = registered(pipeline).get("transformer")
    return not (
        isinstance(transformer, ModelMixin) and transformer.config.get("guidance_embeds") is False
    )


def _guide_true_cfg(arguments: dict[str, Any], default: float) -> None:
    """Pipelines lead away from a negative prompt only by a scale above 1, and ignore that scale
    unless there is something to avoid, be it nothing (" ", as Qwen-Image's authors say)."""
    avoided = arguments.get("negative_prompt")
    if arguments.get("true_cfg_scale", default) > 1:
        if avoided is not None:
            return
        if "true_cfg_scale" in arguments:
            arguments["negative_prompt"] = " "
        else:  # a default that has no effect, and that the pipeline would warn of
            arguments["true_cfg_scale"] = 1.0
    elif avoided:
        raise OmniClientError(
            "`negative_prompt`: has no effect unless `true_cfg_scale` is above 1",
            param="negative_prompt",
        )
    else:
        arguments.pop("negative_prompt", None)
