# SPDX-License-Identifier: Apache-2.0
"""A run's figures about sound, pictures and videos: names and definitions of vLLM-Omni's users.

Each is about completed requests only, and in the result only where some request has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni.benchmarks.outputs import OmniOutput

CONTINUITY_S = 0.1
"""Longest silence for want of sound that still counts as continuous."""


@dataclass(frozen=True)
class Figure:
    """A figure of one request, of which a run has a distribution.

    Attributes:
        name: In `--percentile-metrics`.
        unit: Ending of its fields in the result: `ms`, `s`, or none.
        title: For people.
        of: Its value in that unit; None of a request without it.
    """

    name: str
    unit: str
    title: str
    of: Callable[[OmniOutput], float | None]

    @property
    def field(self) -> str:
        return f"{self.name}_{self.unit}" if self.unit else self.name

    @property
    def label(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def values(self, outputs: Sequence[OmniOutput]) -> list[float]:
        """Of those that have it."""
        return [value for value in map(self.of, outputs) if value is not None]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _per(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def _token_s(output: OmniOutput) -> float | None:
    """Seconds per token after the first; vLLM's would count the sound that follows the text."""
    return output.text_took_s / (output.output_tokens - 1) if output.output_tokens > 1 else None


FIGURES = (
    Figure("tpot", "ms", "Time per Output Token (excl. 1st token)", lambda o: _ms(_token_s(o))),
    Figure(
        "audio_ttfp",
        "ms",
        "Time to First Packet: first byte of sound",
        lambda o: _ms(o.sound.first_byte) if o.sound else None,
    ),
    Figure(
        "audio_playable",
        "ms",
        "Time to First Playable Sound",
        lambda o: _ms(o.sound.playable) if o.sound else None,
    ),
    Figure(
        "audio_rtf",
        "",
        "Real-time Factor of Sound",
        lambda o: _per(o.sound_took_s, o.sound.meter.seconds) if o.sound else None,
    ),
    Figure("audio_duration", "s", "Sound", lambda o: o.sound.meter.seconds if o.sound else None),
    Figure(
        "audio_underrun",
        "s",
        "Longest Gap in Playback",
        lambda o: o.sound.meter.underrun_s if o.sound else None,
    ),
    Figure(
        "image_generation",
        "ms",
        "Image Latency",
        lambda o: _ms(o.latency) if o.images else None,
    ),
    Figure(
        "video_generation",
        "ms",
        "Video Latency",
        lambda o: _ms(o.latency) if o.video_frames else None,
    ),
    Figure("video_rtf", "", "Real-time Factor of Video", lambda o: _per(o.latency, o.video_s)),
    Figure(
        "denoise_step_latency",
        "ms",
        "Latency per Denoising Step",
        lambda o: _ms(o.latency / o.steps) if o.steps else None,
    ),
)
FIGURE_NAMES = tuple(figure.name for figure in FIGURES)


def totals(outputs: Sequence[OmniOutput], duration_s: float) -> dict[str, Any]:
    """Sums and throughputs; what no request has is left out.

    Args:
        outputs: Completed requests.
        duration_s: Of the run.
    """
    made: dict[str, Any] = {}
    if sounds := [output.sound for output in outputs if output.sound]:
        seconds = sum(sound.meter.seconds for sound in sounds)
        continuous = sum(sound.meter.underrun_s <= CONTINUITY_S for sound in sounds)
        made |= {
            "total_audio_duration_s": seconds,
            "total_audio_frames": sum(sound.meter.frames for sound in sounds),
            "audio_throughput": seconds / duration_s,
            "audio_continuity_ok": continuous,
            "audio_continuity_rate": continuous / len(sounds),
        }
    if images := sum(output.images for output in outputs):
        made |= {
            "total_images": images,
            "image_throughput": images / duration_s,
            "average_pixels_per_image": sum(output.pixels for output in outputs) / images,
        }
    if frames := sum(output.video_frames for output in outputs):
        videos = sum(output.video_frames > 0 for output in outputs)
        made |= {
            "total_videos": videos,
            "total_video_frames": frames,
            "total_video_duration_s": sum(output.video_s for output in outputs),
            "video_throughput": videos / duration_s,
        }
    return made


def distribution(
    figure: Figure, values: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    """Mean, median, deviation and percentiles of a figure, by the names of vLLM's fields."""
    field = figure.field
    made = {
        f"mean_{field}": float(np.mean(values)),
        f"median_{field}": float(np.median(values)),
        f"std_{field}": float(np.std(values)),
    }
    return made | {
        f"p{percentile:g}_{field}": float(np.percentile(values, percentile))
        for percentile in percentiles
    }


def single(output: OmniOutput) -> dict[str, float | None]:
    """All figures of one request, for `--save-detailed`."""
    return {figure.field: figure.of(output) for figure in FIGURES}
