# SPDX-License-Identifier: Apache-2.0
"""What goes into the system and into a stage.

`OmniPrompt` is what a caller gives. The other structs are what the orchestrator sends to a stage's
replica; they hold handles, never tensors, and are msgpack-encodable by msgspec.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from vllm_omni.handles import RowSpan


class OmniPrompt(TypedDict, total=False):
    """A prompt as vLLM's `LLM.generate` takes it (text or token ids, media beside it).

    `additional_information` is read by pipelines (for example `{"speaker": "Ethan"}`).
    """

    prompt: str
    prompt_token_ids: list[int]
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    cache_salt: str
    additional_information: Mapping[str, Any]


class RowInput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Input positions for an autoregressive stage that is driven by rows of an upstream stage.

    The stage's request is a growing sequence of positions: first its prompt, then one per decode
    step. A message appends positions. Position k of the message takes row `index[k]` of the
    concatenation of this message's `spans` (-1: the position needs no upstream row), treated as
    the family-defined `kinds[k]` says.

    Attributes:
        spans: Upstream rows that ride with this message, in order.
        index: One entry per appended position.
        kinds: One byte per appended position, defined by the consuming model class.
        final: No position will be appended any more; from there on the model's pad row is used.
    """

    spans: list[RowSpan]
    index: list[int]
    kinds: bytes
    final: bool = False


class RowPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a row-driven request: its prompt.

    Attributes:
        token_ids: The stage's own ids, one per prompt position (placeholders included). Penalties
            and logits processors see them.
        rows: The first positions, one per token id, are the prompt; what may follow are the first
            decode positions.
        beside: Tensors for the stage after, which the edge passes on with its first message.
        initial_frames: Codec frames of the first window of sound, in place of the deployment's.
        contents: What the prompt's positions are recognized by (`ar.prefix.contents_of`): two
            prompts may share what was computed of a beginning in which these are equal. Empty where
            they say nothing, as where rows are another model's: nothing is shared.
        cache_salt: Only requests of the same salt share anything; of prompts with contents.
    """

    token_ids: list[int]
    rows: RowInput
    beside: list[RowSpan] = []
    initial_frames: int | None = None
    contents: bytes = b""
    cache_salt: str | None = None


class Window(msgspec.Struct, frozen=True, array_like=True):
    """One decode window over a growing sequence of codec frames (see `vllm_omni.framing`).

    Attributes:
        start: First frame to decode (left context included).
        stop: Frame after the last one to decode (right holdback included).
        emit_from: First sample of the stream that this window contributes, counted from the start
            of the stream in units of frames; `emit_to` likewise, exclusive. The decoder turns
            frames into samples.
        emit_to: See `emit_from`.
        last: The stream ends with this window: emit everything the decoder gives.
    """

    start: int
    stop: int
    emit_from: int
    emit_to: int
    last: bool


class ProgramInput(msgspec.Struct, frozen=True, kw_only=True):
    """One message to a program of the diffusion engine.

    The first message of a request starts its program; later ones are received by it while it runs.

    Attributes:
        options: What the request asks for (voice, seed, size, ...); first message only.
        spans: Tensors for the program, new since the last message.
        windows: Work that became possible with these tensors, in order.
        final: No message follows.
        trace: W3C headers of the span that this belongs to; first message only.
        priority: Of the request, lower first, as in vLLM; first message only.
    """

    options: dict[str, Any] = {}
    spans: list[RowSpan] = []
    windows: list[Window] = []
    final: bool = False
    trace: dict[str, str] = {}
    priority: int = 0


StageInput = RowPrompt | RowInput | ProgramInput
"""What an edge yields for its downstream stage."""
