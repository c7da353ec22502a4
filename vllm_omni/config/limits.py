# SPDX-License-Identifier: Apache-2.0
"""How much a server takes on, and how long it holds it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Bounds of the front door; those of a single stage are keys of the stage.

    Attributes:
        max_num_queued_reqs: Most requests that run or wait; further ones are refused with 429.
        request_timeout: Seconds from a request's arrival to its end, waiting included.
        slow_client_timeout: Seconds in which a client has to take or send something.
        max_stream_buffer_bytes: Most output that waits for a request's caller to read it.
    """

    max_num_queued_reqs: int = 4096
    request_timeout: float = 3600.0
    slow_client_timeout: float = 60.0
    max_stream_buffer_bytes: int = 32 << 20
