# SPDX-License-Identifier: Apache-2.0
"""What is noted of one request for metrics and traces."""

from dataclasses import dataclass, field

from vllm_omni.handles import TensorHandle
from vllm_omni.metrics.sound import SoundMeter
from vllm_omni.tracing import RequestTrace


@dataclass(slots=True)
class Transfer:
    """What a stage has sent on for one request; moments are `time.monotonic()`."""

    first_put: float
    first_handed: float
    last_handed: float = 0.0
    nbytes: int = 0
    tx_s: float = 0.0
    rx_s: float | None = None

    def add(self, now: float, handle: TensorHandle) -> None:
        """A payload was handed to its receiver."""
        self.last_handed = now
        self.nbytes += handle.nbytes
        self.tx_s += handle.put_s

    def received(self, seconds: float) -> None:
        """The receiver took that long to read."""
        self.rx_s = (self.rx_s or 0.0) + seconds


@dataclass(slots=True)
class Seen:
    """One request.

    Attributes:
        sound: If it wants sound.
        trace: If traces are on.
        transfers: By the stage that sends.
        queues: By stage: when its engine got the request, and when it began with it.
        prompt_tokens: Of the entry stage.
    """

    sound: SoundMeter | None = None
    trace: RequestTrace | None = None
    transfers: dict[str, Transfer] = field(default_factory=dict)
    queues: dict[str, tuple[float, float]] = field(default_factory=dict)
    prompt_tokens: int = 0
