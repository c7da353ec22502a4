# SPDX-License-Identifier: Apache-2.0
"""What a realtime client may ask of the server, and the flags that say so."""

import argparse
import time
from dataclasses import dataclass

from vllm_omni.config.flag_types import positive_int, positive_number, positive_seconds


@dataclass(frozen=True, slots=True)
class RealtimeLimits:
    """Limits of `WS /v1/realtime`, and of `WS /v1/audio/speech/stream`.

    Attributes:
        max_sessions: Most sessions at a time.
        max_frame_bytes: Largest message of a client.
        max_session_bytes: Most that a session's conversation and audio buffer may hold.
        events_per_second: Events that a client may send, on average over a second.
        idle_timeout_s: Seconds without an event or a running response after which a session ends.
        send_timeout_s: Seconds that a client may take to read one event.
    """

    max_sessions: int = 64
    max_frame_bytes: int = 4 * 1024 * 1024
    max_session_bytes: int = 64 * 1024 * 1024
    events_per_second: float = 200.0
    idle_timeout_s: float = 300.0
    send_timeout_s: float = 30.0

    @classmethod
    def of(cls, args: argparse.Namespace) -> "RealtimeLimits":
        """From the flags of `add_realtime_args`."""
        return cls(
            max_sessions=args.realtime_max_sessions,
            max_frame_bytes=args.realtime_max_frame_bytes,
            max_session_bytes=args.realtime_max_session_bytes,
            events_per_second=args.realtime_max_events_per_second,
            idle_timeout_s=args.realtime_idle_timeout,
        )


def add_realtime_args(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    default = RealtimeLimits()
    group.add_argument(
        "--realtime-max-sessions",
        type=positive_int,
        default=default.max_sessions,
        help="Most sessions of /v1/realtime, or of /v1/audio/speech/stream, at a time; further "
        "ones are closed with 1013.",
    )
    group.add_argument(
        "--realtime-max-frame-bytes",
        type=positive_int,
        default=default.max_frame_bytes,
        help="Largest message that a WebSocket client may send; a larger one closes it with 1009.",
    )
    group.add_argument(
        "--realtime-max-session-bytes",
        type=positive_int,
        default=default.max_session_bytes,
        help="Most that the conversation and the audio buffer of a realtime session may hold.",
    )
    group.add_argument(
        "--realtime-max-events-per-second",
        type=positive_number,
        default=default.events_per_second,
        help="Events that a realtime client may send per second; more closes it with 1008.",
    )
    group.add_argument(
        "--realtime-idle-timeout",
        type=positive_seconds,
        default=default.idle_timeout_s,
        metavar="SECONDS",
        help="A realtime session without events or a running response is closed with 1001.",
    )


class TokenBucket:
    """Allows `rate` events per second, and as many at once.

    Args:
        rate: Events per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = max(1.0, rate)
        self._filled = time.monotonic()

    def take(self) -> bool:
        """Whether one more event is allowed now."""
        now = time.monotonic()
        full = max(1.0, self._rate)
        self._tokens = min(full, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
