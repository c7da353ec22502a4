# SPDX-License-Identifier: Apache-2.0
"""In which order calls run, where they cannot all run at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Shortest remaining work first, with ageing.

    Lower priorities go first. Within a priority, requests are ordered by their remaining seconds
    plus `ageing` times the second at which they came, so a request is only ever overtaken by those
    that come within `remaining / ageing` seconds after it. A component that others keep waiting
    gets turns of its own (text encoding and decoding between denoising steps), and so does whatever
    has waited for too long, whatever its priority. Short requests neither wait for much longer ones
    nor share forwards with them where that makes them slow, as far as device time is lent for it
    (see `express.py`).

    Attributes:
        ageing: Seconds of remaining work that a second of age makes up for.
        turn: A component's turn comes when others have run for so many of its own forwards; of
            more, if its next one would not fill the device.
        patience_s: How long a call may wait before it gets a turn out of order.
        overdue_every: One in so many forwards may be such a turn.
        much: A job is much longer than another if it takes so many times as long, as a whole.
        company: How many times as long a forward may get by calls of much longer jobs.
        express_share: Device time lent to short requests, at the cost of longer ones, for each
            second of other forwards.
        express_burst_s: The most that is lent at once.
    """

    ageing: float = 0.2
    turn: float = 2.0
    patience_s: float = 10.0
    overdue_every: int = 4
    much: float = 4.0
    company: float = 1.3
    express_share: float = 0.2
    express_burst_s: float = 2.0

    def urgency(self, priority: int, remaining_s: float, since_s: float) -> tuple[int, float]:
        """A call's place in the order: lower goes first."""
        return priority, remaining_s + self.ageing * since_s

    def turns(self, waited_s: float, forward_s: float, efficiency: float) -> float:
        """How many turns a component has missed; from 1 on, it is next.

        Args:
            waited_s: How long others have run while it waited.
            forward_s: How long its next forward takes.
            efficiency: That forward's speed as a share of the best.
        """
        return waited_s * efficiency / (self.turn * forward_s)
