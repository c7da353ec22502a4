# SPDX-License-Identifier: Apache-2.0
"""Options that `--omni` adds to `vllm bench serve`, and what they must be."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vllm.benchmarks.lib.endpoint_request_func import POOLING_BACKENDS

from vllm_omni.benchmarks.backends import BACKENDS
from vllm_omni.benchmarks.backends.pcm import FORMATS
from vllm_omni.benchmarks.datasets import LIMITS, SENTENCES, has_sounds
from vllm_omni.benchmarks.figures import FIGURE_NAMES
from vllm_omni.benchmarks.values import refuse
from vllm_omni.config.flag_types import positive_int, positive_number, positive_seconds
from vllm_omni.config.problems import nearest

VLLM_ENDPOINT = "/v1/completions"
TIMEOUT_S = 600.0
VLLM_METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
TEXT_ONLY = ("plot_timeline", "plot_dataset_stats", "self_timed", "use_beam_search")
"""Options of vLLM's that draw or replay tokens."""

SPEECH = ("openai-audio-speech", "openai-realtime-tts")

Value = TypeVar("Value", int, float)


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        rate: Requests per second, in a Poisson process (or as --burstiness has it); inf: at once.
        concurrency: Most requests at a time; None for any number.
    """

    rate: float
    concurrency: int | None

    def __str__(self) -> str:
        parts = [] if math.isinf(self.rate) else [f"{self.rate:g} requests/s"]
        parts += [] if self.concurrency is None else [f"{self.concurrency} at a time"]
        return ", ".join(parts) or "all at once"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser that has vLLM's and resolves conflicts in favour of the latter."""
    parser.set_defaults(endpoint=None, random_mm_limit_mm_per_prompt=LIMITS)
    parser.add_argument(
        "--dataset-name",
        default="random",
        help="vLLM's datasets (random, random-mm, sharegpt, hf, custom, ...), or "
        f"{' or '.join(SENTENCES)}: sentences that come with vLLM-Omni, alone or with the random "
        "media of --random-mm-*, for which (0, SECONDS, CHANNELS) is a bucket of sounds.",
    )
    group = parser.add_argument_group("omni", "Sounds, pictures and videos.")
    group.add_argument(
        "--omni-request-timeout-s",
        type=positive_seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="A request without a complete answer by then has failed. Of the backends "
        f"{', '.join(BACKENDS)}.",
    )
    group.add_argument(
        "--print-stage",
        action="store_true",
        help="A table of the time in each of the pipeline's stages, by the server's /metrics.",
    )
    group.add_argument(
        "--image-edits-bot-task",
        metavar="TASK",
        help="`bot_task` of each request to /v1/images/edits.",
    )
    group.add_argument(
        "--sweep-request-rate",
        type=_several(positive_number),
        metavar="RATE,...",
        help="One run for each of these instead of --request-rate.",
    )
    group.add_argument(
        "--sweep-max-concurrency",
        type=_several(positive_int),
        metavar="COUNT,...",
        help="One run for each of these instead of --max-concurrency.",
    )
    group.add_argument(
        "--plot-load",
        type=Path,
        metavar="FILE.png",
        help="Draw latency and throughput over the load of --sweep-*.",
    )


def _several(each: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    def numbers(text: str) -> tuple[Value, ...]:
        values = tuple(each(part) for part in text.split(","))
        # Results are named after their load, in six digits.
        if len({f"{value:g}" for value in values}) < len(values):
            raise argparse.ArgumentTypeError(f"each load once (in six digits): {text}")
        return values

    return numbers


def is_ours(args: argparse.Namespace) -> bool:
    """Whether there is something that vLLM's own benchmark does not do."""
    return bool(
        args.backend in BACKENDS
        or args.dataset_name in SENTENCES
        or (args.dataset_name == "random-mm" and has_sounds(args.random_mm_bucket_config))
        or args.print_stage
        or args.plot_load
        or args.sweep_request_rate
        or args.sweep_max_concurrency
    )


def settle(args: argparse.Namespace) -> None:
    """Fill in what depends on other options, and refuse what does not fit.

    Raises:
        OmniConfigError: It names the option.
    """
    backend = BACKENDS.get(args.backend)
    args.endpoint = args.endpoint or (backend.endpoint if backend else VLLM_ENDPOINT)
    for name in ("input_len", "output_len"):
        if (length := getattr(args, name)) is not None:
            setattr(args, f"random_{name}", length)
    for name in TEXT_ONLY:
        if getattr(args, name):
            refuse(name, "only vLLM's own backends and datasets, without --sweep-*, have it")
    if args.backend in POOLING_BACKENDS:
        refuse(
            "backend", f"{args.backend} makes vectors; datasets and options of ours are not for it"
        )
    if args.image_edits_bot_task and args.backend != "openai-image-edits-omni":
        refuse("image_edits_bot_task", "is of the backend openai-image-edits-omni")
    if args.sweep_request_rate and args.ramp_up_strategy:
        refuse("sweep_request_rate", "a ramp-up has rates of its own (--ramp-up-strategy)")
    if args.sweep_request_rate and not math.isinf(args.request_rate):
        refuse("sweep_request_rate", "give either it or --request-rate")
    if args.sweep_max_concurrency and args.max_concurrency is not None:
        refuse("sweep_max_concurrency", "give either it or --max-concurrency")
    if args.plot_load and args.plot_load.suffix != ".png":
        refuse("plot_load", f"{args.plot_load} should end in .png")
    _check_endpoint(args)
    _check_speech(args)
    _check_ramp(args)


def _check_endpoint(args: argparse.Namespace) -> None:
    backend = BACKENDS.get(args.backend)
    if backend is None:
        return
    ends = (backend.endpoint, backend.endpoint.removesuffix("/sync"))
    if not args.endpoint.endswith(ends):
        refuse("endpoint", f"{args.backend} is for {backend.endpoint}, not {args.endpoint}")
    if backend.needs_image and args.dataset_name in ("random", "sentences"):
        refuse("dataset_name", f"{args.backend} needs pictures; take sentences-mm or random-mm")


def _check_speech(args: argparse.Namespace) -> None:
    if args.backend not in SPEECH:
        return
    body = args.extra_body or {}
    format = body.get("response_format", FORMATS[0])
    if format not in FORMATS:
        readable = " and ".join(FORMATS)
        refuse("extra_body", f"response_format {format!r}: samples are counted in {readable}")
    if body.get("stream_format", "audio") != "audio":
        refuse("extra_body", "stream_format: sound is read as bare bytes, `audio`")


def _check_ramp(args: argparse.Namespace) -> None:
    if args.ramp_up_strategy is None:
        return
    low, high = args.ramp_up_start_rps, args.ramp_up_end_rps
    if low is None or high is None or not 0 < low <= high:
        refuse("ramp_up_strategy", "needs 0 < --ramp-up-start-rps <= --ramp-up-end-rps")
    if not math.isinf(args.request_rate):
        refuse("ramp_up_strategy", "the ramp sets the rate; leave --request-rate out")


def loads(args: argparse.Namespace) -> list[Load]:
    """The runs to make, lightest first as they were given."""
    rates = args.sweep_request_rate or (args.request_rate,)
    concurrencies: Sequence[int | None] = args.sweep_max_concurrency or (args.max_concurrency,)
    return [Load(rate, concurrency) for rate in rates for concurrency in concurrencies]


def metrics(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Which of vLLM's and of our figures are wanted; without --percentile-metrics, all that apply.

    Raises:
        OmniConfigError: One is not known.
    """
    backend = BACKENDS.get(args.backend)
    of_vllm = VLLM_METRICS if backend is None else tuple(set(VLLM_METRICS) - set(FIGURE_NAMES))
    if args.percentile_metrics is None:
        has_text = backend is None or backend.has_text
        default = ("ttft", "tpot", "itl", "e2el") if has_text else ("e2el",)
        return [name for name in default if name in of_vllm], [*FIGURE_NAMES]
    wanted = args.percentile_metrics.split(",")
    known = tuple(dict.fromkeys((*VLLM_METRICS, *FIGURE_NAMES)))
    for name in wanted:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
            refuse("percentile_metrics", f"unknown metric {name!r}; {hint}")
    ours = FIGURE_NAMES if backend else ()
    return [n for n in wanted if n in of_vllm], [n for n in wanted if n in ours]


def percentiles(args: argparse.Namespace) -> list[float]:
    """Those of --metric-percentiles.

    Raises:
        OmniConfigError: One is no percentage.
    """
    try:
        values = [float(part) for part in args.metric_percentiles.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        refuse("metric_percentiles", f"should be numbers from 0 to 100: {args.metric_percentiles}")
    return values
