# SPDX-License-Identifier: Apache-2.0
"""Prompts of which a text encoder reads only the beginning (CLIP: 77 tokens) are told in the log.

Another encoder of the same pipeline (T5) may read the whole, so that it is no error. diffusers
warns for some pipelines, without saying whose prompt it is, and for most not at all.
"""

import logging
from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline
from transformers import PreTrainedTokenizerBase

from vllm_omni.config.diffusers import call_parameters
from vllm_omni.diffusion.proxy import disguised

logger = logging.getLogger(__name__)


def telling(
    name: str, tokenizer: PreTrainedTokenizerBase, request_id: str, read: int | None
) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that tells the log of texts which are not read to their end; what a
    pipeline sets (its `padding_side`) is the copy's own.

    Args:
        name: Of the pipeline's component.
        tokenizer: The component.
        request_id: Whose texts.
        read: Tokens that the pipeline keeps of a text, if it cuts by itself; see `tokens_kept`.
    """

    cls = type(tokenizer)

    def call(self: PreTrainedTokenizerBase, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        limits = [] if read is None else [read]
        if kwargs.get("truncation"):
            limits.append(kwargs.get("max_length") or self.model_max_length)
        if limits and _is_text(text):
            texts = [text] if isinstance(text, str) else text
            special = kwargs.get("add_special_tokens", True)
            whole = cls.__call__(self, texts, add_special_tokens=special, verbose=False)
            tokens = max(len(row) for row in whole["input_ids"])
            if tokens > min(limits):
                logger.warning(
                    "%s: the end of its prompt is not read by one text encoder (%s): it has %d "
                    "tokens, of which %d are read",
                    request_id,
                    name,
                    tokens,
                    min(limits),
                )
        return cls.__call__(self, text, *args, **kwargs)

    view = object.__new__(disguised(cls, {"__call__": call}))
    vars(view).update(vars(tokenizer))
    return view


def tokens_kept(pipeline: DiffusionPipeline, arguments: Mapping[str, Any]) -> int | None:
    """Tokens of a text that a pipeline keeps after its encoder (Qwen-Image: the beginning of its
    own template and `max_sequence_length`); None if it leaves cutting to its tokenizers.

    Args:
        pipeline: The one that is called.
        arguments: Of the call.
    """
    template = vars(pipeline).get("prompt_template_encode_start_idx")
    parameter = call_parameters(type(pipeline)).get("max_sequence_length")
    if not isinstance(template, int) or parameter is None:
        return None
    kept = arguments.get("max_sequence_length", parameter.default)
    return template + kept if isinstance(kept, int) else None


def _is_text(text: Any) -> bool:
    return isinstance(text, str) or (
        isinstance(text, list) and bool(text) and all(isinstance(each, str) for each in text)
    )
