# SPDX-License-Identifier: Apache-2.0
"""What our half of an AR stage says to the other half, through vLLM's own message fields.

vLLM's engine-core messages are a fixed set. Two of their fields carry free-form data and are used
here: `SamplingParams.extra_args` on the way in, `EngineCoreOutput.kv_transfer_params` on the way
out. Each carries one opaque msgpack value under `OMNI_KEY`; this module is the only one that knows
what is inside.
"""

from typing import Any

import msgspec
from vllm import SamplingParams

from vllm_omni.config.sampling import SUBTALKER, SubtalkerSampling
from vllm_omni.errors import OmniClientError
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import RowInput

OMNI_KEY = "omni"
CONTROL_REQUEST_ID = "omni-control"
"""Request id of a message that is no request: it carries updates for requests that run already."""


class FrameSampling(msgspec.Struct, frozen=True, array_like=True):
    """How to draw the further codes of a talker's frame (`subtalker_sampling_params`).

    Attributes:
        guidance: Weight of classifier-free guidance; None for the model's own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    guidance: float | None = None


class StageRequest(msgspec.Struct, frozen=True, array_like=True):
    """What the stage must know about a new request beyond vLLM's own fields.

    Attributes:
        request_id: The pipeline's id (vLLM's own id has a random suffix); keys of tensors use it.
        emit: Rows are wanted downstream.
        rows: The prompt's rows, for a row-driven stage.
        frames: Sampling inside of a frame, for a row-driven stage.
        contents: See `RowPrompt`.
    """

    request_id: str
    emit: bool = False
    rows: RowInput | None = None
    frames: FrameSampling = FrameSampling()
    contents: bytes = b""


class RowUpdate(msgspec.Struct, frozen=True, array_like=True):
    """More input positions for a running request, by vLLM's internal id."""

    internal_id: str
    rows: RowInput


def frame_sampling(params: SamplingParams) -> FrameSampling:
    """How to draw inside of a frame, given a talker's sampling parameters.

    `extra_args["subtalker_sampling_params"]` says so; without it the further codes are drawn as
    the first one is. A greedy talker is greedy throughout, as in transformers, and the request's
    seed is the frame's seed.
    """
    wanted = (params.extra_args or {}).get(SUBTALKER)
    if wanted is None:
        top_k = max(0, params.top_k)
        drawn_alike = FrameSampling(params.temperature, top_k, params.top_p, params.seed)
        return FrameSampling(seed=params.seed) if params.temperature == 0 else drawn_alike
    try:
        given = {key: value for key, value in dict(wanted).items() if key in _SUBTALKER_KEYS}
        drawn = msgspec.convert({"seed": params.seed, **given}, SubtalkerSampling)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise OmniClientError(
            f"{SUBTALKER}: {error}", param=f"sampling_params_list.extra_args.{SUBTALKER}"
        ) from error
    if params.temperature == 0:
        return FrameSampling(seed=params.seed, guidance=drawn.guidance_scale)
    # -1 is vLLM's spelling of all.
    top_k = max(0, drawn.top_k)
    return FrameSampling(drawn.temperature, top_k, drawn.top_p, drawn.seed, drawn.guidance_scale)


_SUBTALKER_KEYS = frozenset(SubtalkerSampling.__struct_fields__)
_request_decoder = msgspec.msgpack.Decoder(StageRequest)
_updates_decoder = msgspec.msgpack.Decoder(list[RowUpdate])
_spans_decoder = msgspec.msgpack.Decoder(list[RowSpan])
_encoder = msgspec.msgpack.Encoder()


def attach_request(params: SamplingParams, request: StageRequest) -> None:
    """Put `request` into sampling parameters that the caller owns."""
    params.extra_args = {**(params.extra_args or {}), OMNI_KEY: _encoder.encode(request)}


def read_request(params: SamplingParams | None) -> StageRequest | None:
    """The request that `attach_request` put there, if any."""
    raw = (params.extra_args or {}).get(OMNI_KEY) if params is not None else None
    # A client can set extra arguments too, but JSON has no bytes: what is none is not ours.
    return _request_decoder.decode(raw) if isinstance(raw, bytes) else None


def updates_params(updates: list[RowUpdate]) -> SamplingParams:
    """Sampling parameters of a control message that carries `updates`."""
    return SamplingParams(max_tokens=1, extra_args={OMNI_KEY: _encoder.encode(updates)})


def read_updates(params: SamplingParams) -> list[RowUpdate]:
    """The updates in a control message."""
    assert params.extra_args is not None
    return _updates_decoder.decode(params.extra_args[OMNI_KEY])


def attach_spans(kv_transfer_params: dict[str, Any] | None, spans: list[RowSpan]) -> dict[str, Any]:
    """`kv_transfer_params` of an engine-core output, with emitted rows added."""
    return {**(kv_transfer_params or {}), OMNI_KEY: _encoder.encode(spans)}


def split_spans(
    kv_transfer_params: dict[str, Any] | None,
) -> tuple[dict[str, Any] | None, tuple[RowSpan, ...]]:
    """Undo `attach_spans`: what vLLM itself put there, and the rows."""
    if not kv_transfer_params or OMNI_KEY not in kv_transfer_params:
        return kv_transfer_params, ()
    rest = {key: value for key, value in kv_transfer_params.items() if key != OMNI_KEY}
    return rest or None, tuple(_spans_decoder.decode(kv_transfer_params[OMNI_KEY]))
