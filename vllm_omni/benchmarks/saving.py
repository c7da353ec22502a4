# SPDX-License-Identifier: Apache-2.0
"""Where results are written. What cannot be is known before the measurement that it would cost."""

import argparse
import copy
import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm.benchmarks import serve as vllm_serve

from vllm_omni.benchmarks.options import Load
from vllm_omni.benchmarks.values import refuse

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Lists that vLLM leaves out of a result without --save-detailed."""
DATE = "%Y%m%d-%H%M%S"


def check(args: argparse.Namespace, loads: Iterable[Load]) -> None:
    """Try whether every file can be written; folders for them are made.

    Raises:
        OmniConfigError: One cannot; it names the option.
    """
    if args.plot_load:
        if find_spec("matplotlib") is None:
            refuse("plot_load", "needs matplotlib, of the extra `bench`")
        _try("plot_load", args.plot_load, make_folder=True)
    if not _saves(args):
        return
    if args.result_dir:
        try:
            os.makedirs(args.result_dir, exist_ok=True)
        except OSError as error:
            refuse("result_dir", f"{args.result_dir!r} cannot be made: {error.strerror}")
    given = (name for name in ("result_filename", "result_dir") if vars(args)[name])
    option = next(given, "append_result" if args.append_result else "save_result")
    now = datetime.now().strftime(DATE)
    for load in loads:
        _try(option, _file(args, load, args.model or "model", now), make_folder=False)


def _try(option: str, path: Path, *, make_folder: bool) -> None:
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        existed = os.path.lexists(path)
        if existed and not (path.is_file() or path.is_dir()):
            return  # to open a pipe is to use it
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        refuse(option, f"{str(path)!r} cannot be written: {error.strerror}")


def save(args: argparse.Namespace, load: Load, model_id: str, result: Mapping[str, Any]) -> None:
    """Write a result where vLLM does; of a sweep with a file name of its own, one per load.

    Raises:
        OSError: It cannot be written.
    """
    if not _saves(args):
        return
    left_out = () if args.save_detailed else (*DETAILS, "requests")
    saved = {key: value for key, value in result.items() if key not in left_out}
    file = _file(args, load, model_id, result["date"])
    with file.open("a" if args.append_result else "w", encoding="utf-8") as out:
        if args.append_result and out.tell():
            out.write("\n")
        json.dump(saved, out)
    vllm_serve.save_to_pytorch_benchmark_format(args, saved, str(file))
    print(f"Result: {file}")


def _saves(args: argparse.Namespace) -> bool:
    return bool(args.save_result or args.append_result)


def _file(args: argparse.Namespace, load: Load, model_id: str, date: str) -> Path:
    at = copy.copy(args)
    at.request_rate, at.max_concurrency = load.rate, load.concurrency
    if args.result_filename and not args.append_result:
        at.result_filename = _of_load(args, load)
    name = vllm_serve.compute_result_filename(at, model_id, args.label, date)
    assert name is not None  # it is None only where nothing is to be saved
    return Path(name)


def _of_load(args: argparse.Namespace, load: Load) -> str:
    path = Path(args.result_filename)
    rate = f"-{load.rate:g}qps" if args.sweep_request_rate else ""
    concurrency = f"-concurrency{load.concurrency}" if args.sweep_max_concurrency else ""
    return str(path.with_stem(f"{path.stem}{rate}{concurrency}"))
