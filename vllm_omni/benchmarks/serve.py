# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmark: vLLM's `benchmark` once for each load, and what its outputs tell beside text.

vLLM's own command line is run unchanged where nothing of ours is asked for. Otherwise its public
parts are put together as its `main` does, so options, printed block and result file are the same.
"""

import argparse
import asyncio
import copy
import os
import random
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import aiohttp
import numpy as np
from vllm.benchmarks import serve as vllm_serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    OPENAI_COMPATIBLE_BACKENDS,
    RequestFuncInput,
)
from vllm.benchmarks.lib.ready_checker import wait_for_endpoint
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.utils.gc_utils import freeze_gc_heap

from vllm_omni.benchmarks import options, saving, stages, values
from vllm_omni.benchmarks.backends import BACKENDS
from vllm_omni.benchmarks.datasets import SENTENCES, requests_of
from vllm_omni.benchmarks.options import Load
from vllm_omni.benchmarks.outputs import RUN, Run
from vllm_omni.benchmarks.plot import Level, draw, level_of
from vllm_omni.benchmarks.report import add_figures, print_figures, without_text
from vllm_omni.errors import OmniConfigError

SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "temperature",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


class BenchmarkFailedError(RuntimeError):
    """There is nothing to report."""


@dataclass(frozen=True)
class Target:
    """The server and how it is asked.

    Attributes:
        base_url: Without a path.
        model_id: Where the tokenizer comes from.
        model_name: How the server calls it.
        headers: With each request.
        ssl_context: As aiohttp takes it.
        body: What each request's body has beside its own.
    """

    base_url: str
    model_id: str
    model_name: str | None
    headers: dict[str, str]
    ssl_context: ssl.SSLContext | bool | None
    body: dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What of a run is reported.

    Attributes:
        of_vllm: Names of vLLM's metrics.
        of_ours: Names of our figures.
        percentiles: Of each.
        goodput: Milliseconds that a good answer takes at most, by what they are of.
    """

    of_vllm: list[str]
    of_ours: list[str]
    percentiles: list[float]
    goodput: dict[str, float]


def main(args: argparse.Namespace) -> None:
    """Run what a parsed command line asks for.

    Raises:
        OmniConfigError: An option is wrong.
        BenchmarkFailedError: No request succeeded, or a result could not be written.
    """
    values.check(args)
    wanted = Wanted(*options.metrics(args), options.percentiles(args), _goodput(args))
    ours = options.is_ours(args)
    if ours:
        options.settle(args)
    loads = options.loads(args)
    saving.check(args, loads)
    if ours:
        asyncio.run(_main(args, wanted, loads))
        return
    args.endpoint = args.endpoint or options.VLLM_ENDPOINT
    try:
        vllm_serve.main(args)
    except (OSError, ValueError) as error:  # how vLLM tells of options, the server and the disk
        raise BenchmarkFailedError(str(error)) from error


async def _main(args: argparse.Namespace, wanted: Wanted, loads: Sequence[Load]) -> None:
    random.seed(args.seed)
    np.random.seed(args.seed)
    target = await _target(args)
    tokenizer = _tokenizer(args, target.model_id)
    requests = _requests(args, tokenizer)
    backend = BACKENDS.get(args.backend)
    if backend is not None and not backend.has_text:
        tokenizer = None  # of what has no tokens, none are counted
    freeze_gc_heap()
    levels, failed, unwritten = [], [], []
    RUN.set(Run(args.omni_request_timeout_s))
    await _prepare(args, target, requests)
    for load in loads:
        at = copy.copy(args)
        at.request_rate, at.max_concurrency = load.rate, load.concurrency
        result, level = await _measure(at, load, target, tokenizer, requests, wanted)
        try:
            saving.save(args, load, target.model_id, {**_setup(at, target), **result})
        except OSError as error:  # what was measured has been printed, and other loads follow
            unwritten.append(str(error))
        levels.append(level)
        failed.append(result["completed"] == 0 and next(iter(result["errors"]), "no answer"))
    if args.plot_load:
        try:
            draw(levels, args.plot_load, f"{target.model_name or target.model_id}: {args.backend}")
            print(f"Plot: {args.plot_load}")
        except OSError as error:
            unwritten.append(str(error))
    if all(failed):
        raise BenchmarkFailedError(f"every request failed: {failed[0]}")
    if unwritten:
        raise BenchmarkFailedError(f"measured, but not written: {'; '.join(unwritten)}")


async def _target(args: argparse.Namespace) -> Target:
    base_url, headers = values.base_url(args), values.headers(args)
    ssl_context = False if args.insecure else True if "https://" in base_url else None
    model_id, model_name = args.model, args.served_model_name
    if model_id is None:
        asked = dict(headers)
        if key := os.environ.get("OPENAI_API_KEY"):
            asked.setdefault("Authorization", f"Bearer {key}")
        try:
            model_name, model_id = await vllm_serve.get_first_model_from_server(
                base_url, asked, ssl_context
            )
        except (RuntimeError, ValueError) as error:
            raise BenchmarkFailedError(str(error)) from error
    return Target(base_url, model_id, model_name, headers, ssl_context, _body(args))


def _body(args: argparse.Namespace) -> dict[str, Any]:
    sampling = {name: value for name in SAMPLING if (value := vars(args)[name]) is not None}
    if args.image_edits_bot_task:
        sampling["bot_task"] = args.image_edits_bot_task
    return {**sampling, **(args.extra_body or {})}


def _tokenizer(args: argparse.Namespace, model_id: str) -> TokenizerLike | None:
    backend = BACKENDS.get(args.backend)
    has_text = backend is None or backend.has_text
    needed = has_text or args.dataset_name not in SENTENCES or args.tokenizer
    if args.skip_tokenizer_init or not needed:
        return None
    name = args.tokenizer or model_id
    try:
        return get_tokenizer(
            name, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise OmniConfigError(
            f"--tokenizer: none at {name!r} ({str(error).splitlines()[0]}); name another, or take "
            "--dataset-name sentences with --skip-tokenizer-init"
        ) from error


def _requests(args: argparse.Namespace, tokenizer: TokenizerLike | None) -> list[SampleRequest]:
    if args.dataset_name in ("random", "random-mm") and args.backend in (
        *OPENAI_COMPATIBLE_BACKENDS,
        "openai-chat-omni",
    ):
        args.ignore_eos = True
    try:
        return requests_of(args, tokenizer, tuple(BACKENDS))
    except OmniConfigError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise OmniConfigError(f"--dataset-name {args.dataset_name}: {error}") from error


def _goodput(args: argparse.Namespace) -> dict[str, float]:
    goals = dict(values.goals(args))
    backend = BACKENDS.get(args.backend)
    known = ("ttft", "e2el") if backend is None or backend.has_text else ("e2el",)
    for name in goals:
        if backend is not None and name not in known:
            raise OmniConfigError(f"--goodput: {args.backend} has {' and '.join(known)}, no {name}")
    return goals


async def _prepare(args: argparse.Namespace, target: Target, requests: list[SampleRequest]) -> None:
    """Wait for the server if asked to, and warm it up; so the runs themselves have neither."""
    ask = ASYNC_REQUEST_FUNCS[args.backend]
    first = requests[0]
    asked = RequestFuncInput(
        model=target.model_id,
        model_name=target.model_name,
        prompt=first.prompt,
        api_url=target.base_url + args.endpoint,
        prompt_len=first.prompt_len,
        output_len=first.expected_output_len,
        multi_modal_content=first.multi_modal_data,
        ignore_eos=args.ignore_eos,
        extra_headers=target.headers,
        extra_body={**target.body, **(first.request_overrides or {})},
        chat_messages=first.chat_messages,
    )
    async with _session(target) as session:
        if args.ready_check_timeout_sec > 0:
            output = await wait_for_endpoint(
                ask, asked, session, timeout_seconds=args.ready_check_timeout_sec
            )
            if not output.success:
                raise BenchmarkFailedError(f"the first request failed: {output.error}")
        if args.num_warmups > 0:
            print(f"Warming up with {args.num_warmups} requests...")
            limit = asyncio.Semaphore(args.max_concurrency or args.num_warmups)

            async def warm_up() -> None:
                async with limit:
                    await ask(asked, session)

            await asyncio.gather(*(warm_up() for _ in range(args.num_warmups)))


def _session(target: Target) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=0, ssl=True if target.ssl_context is None else target.ssl_context
    )
    return aiohttp.ClientSession(connector=connector, trust_env=True)


async def _measure(
    args: argparse.Namespace,
    load: Load,
    target: Target,
    tokenizer: TokenizerLike | None,
    requests: list[SampleRequest],
    wanted: Wanted,
) -> tuple[dict[str, Any], Level]:
    run = Run(args.omni_request_timeout_s)
    RUN.set(run)
    before = await _stages(args, target)
    began = time.perf_counter()
    try:
        result = await _benchmark(args, load, target, tokenizer, requests, wanted)
    except asyncio.CancelledError:
        _print_interrupted(run, wanted, len(requests), time.perf_counter() - began)
        # vLLM leaves its session to the collector, which has aiohttp complain.
        asyncio.get_running_loop().set_exception_handler(_say_nothing)
        raise
    backend = BACKENDS.get(args.backend)
    if backend is not None and not backend.has_text:
        without_text(result)
    add_figures(result, run.outputs, wanted.of_ours, wanted.percentiles)
    spent = await _spent(args, target, before)
    result |= stages.fields(spent) if spent else {}
    print_figures(result, wanted.of_ours, wanted.percentiles, spent)
    return result, level_of(load, result, run.outputs)


def _say_nothing(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's handler for what no task can be told."""


def _print_interrupted(run: Run, wanted: Wanted, count: int, duration_s: float) -> None:
    """What had been measured when the user ended it."""
    completed = sum(output.success for output in run.outputs)
    print(f"\nInterrupted after {duration_s:.2f} s: {completed} of {count} requests completed")
    if completed:
        result: dict[str, Any] = {"duration": duration_s}
        add_figures(result, run.outputs, wanted.of_ours, wanted.percentiles)
        print_figures(result, wanted.of_ours, wanted.percentiles, {})


async def _benchmark(
    args: argparse.Namespace,
    load: Load,
    target: Target,
    tokenizer: TokenizerLike | None,
    requests: list[SampleRequest],
    wanted: Wanted,
) -> dict[str, Any]:
    result: dict[str, Any] = await vllm_serve.benchmark(
        task_type=vllm_serve.TaskType.GENERATION,
        endpoint_type=args.backend,
        api_url=target.base_url + args.endpoint,
        base_url=target.base_url,
        model_id=target.model_id,
        model_name=target.model_name,
        tokenizer=tokenizer,
        input_requests=requests,
        logprobs=args.logprobs,
        request_rate=load.rate,
        burstiness=args.burstiness,
        disable_tqdm=args.disable_tqdm,
        num_warmups=0,
        profile=args.profile,
        selected_percentile_metrics=wanted.of_vllm,
        selected_percentiles=wanted.percentiles,
        ignore_eos=args.ignore_eos,
        goodput_config_dict=wanted.goodput,
        max_concurrency=load.concurrency,
        lora_modules=args.lora_modules,
        lora_assignment=args.lora_assignment,
        extra_headers=target.headers,
        extra_body=target.body,
        ramp_up_strategy=args.ramp_up_strategy,
        ramp_up_start_rps=args.ramp_up_start_rps,
        ramp_up_end_rps=args.ramp_up_end_rps,
        ready_check_timeout_sec=0,
        ssl_context=target.ssl_context,
        self_timed=False,
        probe_request_rate=args.probe_request_rate,
    )
    return result


async def _stages(args: argparse.Namespace, target: Target) -> stages.Stages | None:
    if not args.print_stage:
        return None
    try:
        async with _session(target) as session:
            return await stages.look(session, target.base_url)
    except (aiohttp.ClientError, OSError, ValueError):  # it is gone, or says something else
        return None


async def _spent(
    args: argparse.Namespace, target: Target, before: stages.Stages | None
) -> stages.Stages:
    after = await _stages(args, target)
    spent = {} if before is None or after is None else stages.between(before, after)
    if args.print_stage and not spent:
        print(f"--print-stage: {target.base_url}/metrics tells no stage's time")
    return spent


def _setup(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """What vLLM's result says of the run itself."""
    made = {
        "date": datetime.now().strftime(saving.DATE),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model_id,
        "tokenizer_id": args.tokenizer or target.model_id,
        "num_prompts": args.num_prompts,
        **values.metadata(args),
        "request_rate": args.request_rate if args.request_rate < float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        made |= {name: vars(args)[name] for name in names}
    return made
