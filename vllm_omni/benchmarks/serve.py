# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmark: vLLM's `benchmark` once for each load, and what its outputs tell beside text.

vLLM's own command line is run unchanged where nothing of ours is asked for. Otherwise its public
parts are put together as its `main` does, so options, printed block and result file are the same.
"""

import argparse
import asyncio
import copy
import json
import os
import random
import ssl
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
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
from vllm.utils.network_utils import join_host_port

from vllm_omni.benchmarks import options, stages
from vllm_omni.benchmarks.backends import BACKENDS
from vllm_omni.benchmarks.datasets import SENTENCES, requests_of
from vllm_omni.benchmarks.options import Load
from vllm_omni.benchmarks.outputs import RUN, Run
from vllm_omni.benchmarks.plot import Level, draw, level_of
from vllm_omni.benchmarks.report import add_figures, print_figures, without_text
from vllm_omni.errors import OmniConfigError

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Lists that vLLM leaves out of a result without --save-detailed."""
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


def main(args: argparse.Namespace) -> None:
    """Run what a parsed command line asks for.

    Raises:
        OmniConfigError: An option is wrong.
        BenchmarkFailedError: No request succeeded.
    """
    if options.is_ours(args):
        asyncio.run(_main(args))
    else:
        args.endpoint = args.endpoint or options.VLLM_ENDPOINT
        vllm_serve.main(args)


async def _main(args: argparse.Namespace) -> None:
    options.settle(args)
    wanted, percentiles = options.metrics(args), options.percentiles(args)
    metadata = options.pairs(args, "metadata")
    random.seed(args.seed)
    np.random.seed(args.seed)
    target = await _target(args)
    tokenizer = _tokenizer(args, target.model_id)
    requests = _requests(args, tokenizer)
    goodput = _goodput(args)
    backend = BACKENDS.get(args.backend)
    if backend is not None and not backend.has_text:
        tokenizer = None  # of what has no tokens, none are counted
    freeze_gc_heap()
    levels, failed = [], []
    RUN.set(Run(args.omni_request_timeout_s))
    await _prepare(args, target, requests)
    for load in options.loads(args):
        at = copy.copy(args)
        at.request_rate, at.max_concurrency = load.rate, load.concurrency
        result, level = await _measure(
            at, load, target, tokenizer, requests, wanted, percentiles, goodput
        )
        _save(at, load, target, {**_setup(at, target, metadata), **result})
        levels.append(level)
        failed.append(result["completed"] == 0 and next(iter(result["errors"]), "no answer"))
    if args.plot_load:
        draw(levels, args.plot_load, f"{target.model_name or target.model_id}: {args.backend}")
        print(f"Plot: {args.plot_load}")
    if all(failed):
        raise BenchmarkFailedError(f"every request failed: {failed[0]}")


async def _target(args: argparse.Namespace) -> Target:
    base_url = args.base_url or f"http://{join_host_port(args.host, args.port)}"
    headers = options.pairs(args, "header")
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
    try:
        goals: dict[str, float] = vllm_serve.check_goodput_args(args)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise OmniConfigError(f"--goodput: {error}") from error
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
    wanted: tuple[list[str], list[str]],
    percentiles: list[float],
    goodput: dict[str, float],
) -> tuple[dict[str, Any], Level]:
    run = Run(args.omni_request_timeout_s)
    RUN.set(run)
    before = await _stages(args, target)
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
        selected_percentile_metrics=wanted[0],
        selected_percentiles=percentiles,
        ignore_eos=args.ignore_eos,
        goodput_config_dict=goodput,
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
    backend = BACKENDS.get(args.backend)
    if backend is not None and not backend.has_text:
        without_text(result)
    add_figures(result, run.outputs, wanted[1], percentiles)
    spent = await _spent(args, target, before)
    result |= stages.fields(spent) if spent else {}
    print_figures(result, wanted[1], percentiles, spent)
    return result, level_of(load, result, run.outputs)


async def _stages(args: argparse.Namespace, target: Target) -> stages.Stages | None:
    if not args.print_stage:
        return None
    async with _session(target) as session:
        return await stages.look(session, target.base_url)


async def _spent(
    args: argparse.Namespace, target: Target, before: stages.Stages | None
) -> stages.Stages:
    after = await _stages(args, target)
    spent = {} if before is None or after is None else stages.between(before, after)
    if args.print_stage and not spent:
        print(f"--print-stage: {target.base_url}/metrics tells no stage's time")
    return spent


def _setup(args: argparse.Namespace, target: Target, metadata: dict[str, str]) -> dict[str, Any]:
    """What vLLM's result says of the run itself."""
    made = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model_id,
        "tokenizer_id": args.tokenizer or target.model_id,
        "num_prompts": args.num_prompts,
        **metadata,
        "request_rate": args.request_rate if args.request_rate < float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        made |= {name: vars(args)[name] for name in names}
    return made


def _save(args: argparse.Namespace, load: Load, target: Target, result: dict[str, Any]) -> None:
    """Write the result where vLLM does; of a sweep with a file name of its own, one per load."""
    saved = result if args.save_detailed else {k: v for k, v in result.items() if k not in DETAILS}
    if not args.save_detailed:
        saved.pop("requests", None)
    if not (args.save_result or args.append_result):
        return
    if args.result_filename and not args.append_result:
        args.result_filename = _name_of(args, load)
    name = vllm_serve.compute_result_filename(args, target.model_id, args.label, result["date"])
    assert name is not None  # it is None only where nothing is to be saved
    with Path(name).open("a" if args.append_result else "w", encoding="utf-8") as file:
        if args.append_result and file.tell():
            file.write("\n")
        json.dump(saved, file)
    vllm_serve.save_to_pytorch_benchmark_format(args, saved, name)
    print(f"Result: {name}")


def _name_of(args: argparse.Namespace, load: Load) -> str:
    path = Path(args.result_filename)
    rate = f"-{load.rate:g}qps" if args.sweep_request_rate else ""
    concurrency = f"-concurrency{load.concurrency}" if args.sweep_max_concurrency else ""
    return str(path.with_stem(f"{path.stem}{rate}{concurrency}"))
