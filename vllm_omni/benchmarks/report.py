# SPDX-License-Identifier: Apache-2.0
"""Figures into vLLM's result, and onto the screen in the shape of vLLM's block."""

from collections.abc import Sequence
from typing import Any

from vllm_omni.benchmarks.figures import FIGURES, distribution, single, totals
from vllm_omni.benchmarks.outputs import OmniOutput
from vllm_omni.benchmarks.stages import Stages

WIDTH = 60
TOKENS = (
    "total_output_tokens",
    "output_throughput",
    "total_token_throughput",
    "output_lens",
    "ttfts",
    "itls",
    "generated_texts",
    "max_output_tokens_per_s",
    "rtfx",
)
"""What vLLM counts of text; of an answer without any it would be made up."""
TOTALS = {
    "total_audio_duration_s": "Total sound (s):",
    "audio_throughput": "Sound throughput (s of sound/s):",
    "audio_continuity_rate": "Without a gap above 0.1 s (of 1):",
    "total_images": "Total images:",
    "image_throughput": "Image throughput (images/s):",
    "average_pixels_per_image": "Pixels per image:",
    "total_videos": "Total videos:",
    "total_video_frames": "Total video frames:",
    "video_throughput": "Video throughput (videos/s):",
}


def without_text(result: dict[str, Any]) -> None:
    """Take out of a result what vLLM says of tokens that there are not."""
    for name in TOKENS:
        result.pop(name, None)


def add_figures(
    result: dict[str, Any],
    outputs: Sequence[OmniOutput],
    wanted: Sequence[str],
    percentiles: Sequence[float],
) -> None:
    """Put our figures into vLLM's result."""
    completed = [output for output in outputs if output.success]
    result.update(totals(completed, result["duration"]))
    for figure in FIGURES:
        if figure.name in wanted and (values := figure.values(completed)):
            result.update(distribution(figure, values, percentiles))
    if outputs:
        ordered = sorted(outputs, key=lambda output: output.start_time)
        result["requests"] = [single(output) for output in ordered]


def print_figures(
    result: dict[str, Any], wanted: Sequence[str], percentiles: Sequence[float], stages: Stages
) -> None:
    """What `add_figures` and the stages' metrics found."""
    shown = {label: result[name] for name, label in TOTALS.items() if name in result}
    figures = [f for f in FIGURES if f.name in wanted and f"mean_{f.field}" in result]
    if not (shown or figures or stages):
        return
    print("{s:{c}^{n}}".format(s=" Omni Benchmark Result ", n=WIDTH, c="="))
    for label, value in shown.items():
        print(f"{label:<48} {value:<10.3f}" if isinstance(value, float) else f"{label:<48} {value}")
    for figure in figures:
        print("{s:{c}^{n}}".format(s=figure.title, n=WIDTH, c="-"))
        unit = f" ({figure.unit})" if figure.unit else ""
        for prefix in ("mean", "median", *(f"p{percentile:g}" for percentile in percentiles)):
            label = f"{prefix.capitalize()} {figure.name}{unit}:"
            print(f"{label:<48} {result[f'{prefix}_{figure.field}']:<10.3f}")
    if stages:
        _print_stages(result, stages)
    print("=" * WIDTH)


def _print_stages(result: dict[str, Any], stages: Stages) -> None:
    print("{s:{c}^{n}}".format(s="Stages (s per request)", n=WIDTH, c="-"))
    print(f"{'stage':<20} {'requests':>9} {'mean':>9} {'p50':>9} {'p99':>9}")
    for name in stages:
        times = [result[f"stage_durations_{kind}"][name] for kind in ("mean", "p50", "p99")]
        row = " ".join(f"{value:>9.4f}" for value in times)
        print(f"{name:<20} {result['stage_requests'][name]:>9.0f} {row}")
