# SPDX-License-Identifier: Apache-2.0
"""What the benchmark notes of one request, and of the run that it belongs to."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

from vllm_omni.metrics.sound import SoundMeter

PLAYABLE_S = 0.02
"""Sound that a player needs before it can begin: one buffer of 20 ms, as of Opus and WebRTC."""


@dataclass
class Sound:
    """One answer's sound; times are seconds since the request was sent.

    Attributes:
        meter: Follows its pieces, as the server's own does, from the first that can be played on.
        rate: Hz.
        first_byte: When the first byte of the sound's file came, be it of a header.
        playable: When the first `PLAYABLE_S` of sound were there, or all of a shorter one.
        last: When its last sample came.
        waiting: Samples that are too few to begin with.
    """

    meter: SoundMeter
    rate: int = 0
    first_byte: float | None = None
    playable: float | None = None
    last: float = 0.0
    waiting: int = 0

    def byte(self, now: float) -> None:
        """Bytes of the file came; `now` is `time.perf_counter()`."""
        if self.first_byte is None:
            self.first_byte = now - self.meter.arrival

    def add(self, now: float, frames: int, rate: int) -> None:
        """So many samples (per channel) came at `now`, of `rate` Hz."""
        if frames == 0:
            return
        self.byte(now)
        self.rate, self.last = rate, now - self.meter.arrival
        self.waiting += frames
        if self.playable is not None or self.waiting >= PLAYABLE_S * rate:
            self._play(now)

    def end(self) -> None:
        """Nothing follows: what is too short to have begun is played."""
        if self.waiting:
            self._play(self.meter.arrival + self.last)

    def _play(self, now: float) -> None:
        if self.playable is None:
            self.playable = now - self.meter.arrival
        self.meter.add(now, self.waiting, self.rate)
        self.waiting = 0


@dataclass
class OmniOutput(RequestFuncOutput):
    """vLLM's record of a request, and what came beside text.

    Attributes:
        sound: Of answers with sound.
        text_took_s: From the first text to the last.
        sound_took_s: What the real-time factor counts: all of a speech request, a chat up to its
            last piece of sound.
        images: Pictures in the answer.
        pixels: Of all of them.
        video_frames: Frames in the answer.
        video_s: How long they play.
        steps: Denoising steps, where the request says how many.
    """

    sound: Sound | None = None
    text_took_s: float = 0.0
    sound_took_s: float = 0.0
    images: int = 0
    pixels: int = 0
    video_frames: int = 0
    video_s: float = 0.0
    steps: int | None = None

    def ended(self) -> None:
        """The answer is complete, now."""
        self.latency = time.perf_counter() - self.start_time

    def read(self, now: float, text: str) -> None:
        """A piece of text came."""
        if not self.generated_text:
            self.ttft = now - self.start_time
        else:
            self.itl.append(now - self.start_time - self.ttft - self.text_took_s)
            self.text_took_s += self.itl[-1]
        self.generated_text += text

    def hear(self) -> Sound:
        """Its sound, of which nothing has come yet."""
        self.sound = Sound(SoundMeter(arrival=self.start_time))
        return self.sound

    def heard(self) -> bool:
        """Its sound is complete; whether there was any."""
        assert self.sound is not None
        self.sound.end()
        return self.sound.playable is not None


@dataclass(frozen=True)
class Run:
    """What the requests of a run have in common.

    vLLM's `benchmark` hands a request function nothing but the request, and keeps what it returns
    to itself; so the run comes, and the records go, by a context variable.

    Attributes:
        timeout_s: Longest time of one request.
        outputs: Filled with the records of measured requests, in the order of their ends.
    """

    timeout_s: float
    outputs: list[OmniOutput] = field(default_factory=list)


RUN: ContextVar[Run] = ContextVar("vllm_omni_bench_run")
