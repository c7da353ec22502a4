# SPDX-License-Identifier: Apache-2.0
"""What a replica's client and process say to each other: one frame, one struct, in msgpack."""

import msgspec

from vllm_omni.inputs import ProgramInput
from vllm_omni.outputs import ProgramOutput


class Inputs(msgspec.Struct, frozen=True, array_like=True, tag="inputs"):
    """First or further messages of requests, in order.

    Attributes:
        inputs: (request id, message). The first one of an id starts the request.
        first: Whether these start requests.
    """

    inputs: list[tuple[str, ProgramInput]]
    first: bool


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End requests without further output."""

    request_ids: list[str]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answered between two steps, by an empty list of outputs."""


ToWorker = Inputs | Abort | Ping

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_outputs = msgspec.msgpack.Decoder(list[ProgramOutput]).decode
"""All outputs of one engine step are one frame."""
