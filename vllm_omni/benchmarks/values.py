# SPDX-License-Identifier: Apache-2.0
"""What the options of `vllm bench serve --omni` may be, each for itself: looked at before anything
is asked of a server, whoever's benchmark runs then."""

import argparse
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import urlsplit

from vllm.utils.network_utils import join_host_port

from vllm_omni.config.problems import did_you_mean
from vllm_omni.errors import OmniConfigError

LARGEST = 10_000_000
"""Of any count or length: each request is an object here before the first is sent."""
LARGEST_OF = {"port": 65_535, "seed": 2**32 - 1}
SMALLEST_RATE = 1e-6
"""Requests per second, one in 12 days."""
RATES = ("request_rate", "sweep_request_rate", "burstiness")
POSITIVE = ("num_prompts", "max_concurrency", "sweep_max_concurrency", "port", *RATES)
SIGNED = ("top_k", "logprobs", "frequency_penalty", "presence_penalty")
ENDLESS = ("request_rate", "sweep_request_rate", "asr_max_audio_len_sec", "omni_request_timeout_s")

GOALS = ("ttft", "tpot", "e2el")
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name (RFC 9110, 5.6.2)."""
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
NOT_IN_URL = re.compile(r"[\s\x00-\x1f\x7f]")

_RESULT_KEYS = """
date endpoint_type backend label model_id tokenizer_id num_prompts
request_rate burstiness max_concurrency ramp_up_strategy ramp_up_start_rps ramp_up_end_rps
rps_change_events duration completed failed request_throughput request_goodput
output_throughput input_sequence_throughput input_lens output_lens ttfts itls latencies
start_times queue_times generated_texts errors max_output_tokens_per_s max_concurrent_requests
rtfx requests stage_requests total_input_tokens total_output_tokens total_token_throughput
total_input_sequences total_audio_duration_s total_audio_frames audio_throughput
audio_continuity_ok audio_continuity_rate total_images image_throughput
average_pixels_per_image total_videos total_video_frames total_video_duration_s video_throughput
"""
RESULT_KEYS = frozenset(_RESULT_KEYS.split())
RESULT_KINDS = re.compile(r"(mean|median|std|p\d+(\.\d+)?|probe|spec_decode|diffusion)_.+")
STAGE_KINDS = re.compile(r"stage_durations_.+")


def refuse(name: str, reason: str) -> NoReturn:
    """Raise `OmniConfigError` that names an option."""
    raise OmniConfigError(f"--{name.replace('_', '-')}: {reason}")


def check(args: argparse.Namespace) -> None:
    """Refuse what no benchmark could use.

    Raises:
        OmniConfigError: It names the option.
    """
    for name, value in vars(args).items():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int | float) and not isinstance(each, bool):
                _check_number(name, each)
    base_url(args)
    if args.endpoint and (args.endpoint[0] != "/" or NOT_IN_URL.search(args.endpoint)):
        refuse("endpoint", f"should be a path like /v1/completions, not {args.endpoint!r}")
    headers(args)
    metadata(args)
    goals(args)
    _check_objects(args)


def _check_number(name: str, value: float) -> None:
    if math.isnan(value) or (math.isinf(value) and name not in ENDLESS):
        refuse(name, f"should be a number, not {value}")
    if value <= 0 and name in POSITIVE:
        refuse(name, f"must be above 0, not {value:g}")
    if value < 0 and name not in SIGNED:
        refuse(name, f"must be 0 or more, not {value:g}")
    if value < SMALLEST_RATE and (name in RATES or (name == "probe_request_rate" and value)):
        refuse(name, f"must be at least {SMALLEST_RATE:g}, not {value:g}")
    most = LARGEST_OF.get(name, LARGEST)
    if isinstance(value, int) and abs(value) > most:
        refuse(name, f"must be at most {most}, not {value}")


def _check_objects(args: argparse.Namespace) -> None:
    body = args.extra_body
    if not isinstance(body, dict | None):
        refuse("extra_body", f"should be a JSON object, not {json.dumps(body)[:80]}")
    try:
        json.dumps(body, allow_nan=False)
    except ValueError:
        refuse("extra_body", "has a number that is none in JSON (NaN or Infinity)")
    limits = args.random_mm_limit_mm_per_prompt
    if not isinstance(limits, dict) or not all(_is_count(each) for each in limits.values()):
        refuse("random_mm_limit_mm_per_prompt", f"should be counts by modality, not {limits}")
    buckets = args.random_mm_bucket_config
    for key, share in buckets.items():
        if not (isinstance(key, tuple) and len(key) == 3 and all(map(_is_count, key))):
            refuse("random_mm_bucket_config", f"{key!r} should be (height, width, frames)")
        if isinstance(share, bool) or not isinstance(share, int | float):
            refuse("random_mm_bucket_config", f"{key!r}: {share!r} should be a share")
        if not 0 <= share < math.inf:
            refuse("random_mm_bucket_config", f"{key!r}: {share!r} should be a share of 0 or more")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def base_url(args: argparse.Namespace) -> str:
    """The server's address, without a path of an endpoint.

    Raises:
        OmniConfigError: It is none.
    """
    name = "host" if args.base_url is None else "base_url"
    given = args.host if args.base_url is None else args.base_url
    url: str = args.base_url or f"http://{join_host_port(args.host, args.port)}"
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not close
        whole = False
    alone = args.base_url is not None or not set("/?#@") & set(args.host)
    if not whole or not alone or parts.query or parts.fragment or NOT_IN_URL.search(url):
        like = "127.0.0.1" if name == "host" else "http://127.0.0.1:8000"
        refuse(name, f"should be like {like}, not {given!r}")
    return url


def headers(args: argparse.Namespace) -> dict[str, str]:
    """Of each request.

    Raises:
        OmniConfigError: One cannot be sent.
    """
    made = _pairs(args, "header")
    for key, value in made.items():
        if not TOKEN.fullmatch(key):
            refuse("header", f"{key!r} is no name of a header")
        if CONTROL.search(value):
            refuse("header", f"{key}: {value!r} has characters that no header may have")
    return made


def metadata(args: argparse.Namespace) -> dict[str, str]:
    """What the user says of the run, for its result.

    Raises:
        OmniConfigError: A result has such a key of its own.
    """
    made = _pairs(args, "metadata")
    for key in made:
        if key in RESULT_KEYS or RESULT_KINDS.fullmatch(key) or STAGE_KINDS.fullmatch(key):
            refuse("metadata", f"{key!r} is a key of the result itself; take another name")
    return made


def _pairs(args: argparse.Namespace, name: str) -> dict[str, str]:
    made: dict[str, str] = {}
    for item in vars(args)[name] or ():
        key, equals, value = item.partition("=")
        if not (equals and key.strip()):
            refuse(name, f"{item!r} should be KEY=VALUE")
        if key.strip() in made:
            refuse(name, f"{key.strip()!r} is given twice")
        # Of a header's value, a break at its end is no less one than in its middle.
        made[key.strip()] = value.strip(" \t")
    return made


def goals(args: argparse.Namespace) -> Mapping[str, float]:
    """Milliseconds of `--goodput`, by what they are of.

    Raises:
        OmniConfigError: One is unknown, or no time.
    """
    made: dict[str, float] = {}
    for item in args.goodput or ():
        name, _, text = item.partition(":")
        if name not in GOALS:
            hint = did_you_mean(name, GOALS)
            refuse("goodput", f"{item!r}: there are {', '.join(GOALS)}, no {name!r}{hint}")
        if name in made:
            refuse("goodput", f"{name} is given twice")
        try:
            made[name] = float(text)
        except ValueError:
            made[name] = math.nan
        if not 0 <= made[name] < math.inf:
            refuse("goodput", f"{item!r} should be {name}:MILLISECONDS, 0 or more")
    return made
