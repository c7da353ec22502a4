# SPDX-License-Identifier: Apache-2.0
"""Pipelines of AR stages on a GPU: are they exact there, and how fast?

    python benchmarks/ar_gpu.py record           # on a CPU host: what tiny checkpoints answer
    python benchmarks/ar_gpu.py exact            # on the GPU: the same answers, alone and together

The checkpoint (`.work/gpu/FAMILY`; another
version of transformers may draw other weights) and what is recorded (`FAMILY.npz` beside it) have
to be carried to the GPU. All is float32 and greedy:
frames and tokens must be the same, sounds the same but for rounding. Then sixteen requests with
seeds must be the same alone and together.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import ROOT, Report

# Of GPU kernels, before any library reads them: float32 is to mean float32.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
os.environ["TRITON_F32_DEFAULT"] = "ieee"

FOLDER = ROOT / ".work" / "gpu"
REQUESTS = 16
FRAMES = 32
SOUND_BOUND = 1e-3
"""Of samples in [-1, 1]: GPU kernels sum in another order, through some forty layers."""
STAGE = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 1024,
    "max_num_seqs": REQUESTS,
    "gpu_memory_utilization": 0.2,
}
AR_STAGES = {"qwen3_tts": 1, "csm": 1, "higgs_audio_v2": 1, "qwen3_omni_moe": 2, "qwen2_5_omni": 2}
"""Of each family; the codec is the stage after them."""
VOICES = {"qwen3_tts": ("serena", "vivian"), "csm": (), "higgs_audio_v2": ()}
WORDS = "the quick brown fox jumps over a lazy dog near some old river bank while rain falls"


def requests(family: str) -> list[Any]:
    """Sixteen of different lengths."""
    from vllm_omni.speech.request import SpeechRequest

    texts = [" ".join((WORDS.split() * 2)[i : i + 3 + i % 7]) for i in range(REQUESTS)]
    if "omni" in family:
        chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        return [chat.format(text) for text in texts]
    voices = VOICES[family] or (None,)
    return [SpeechRequest(text=text, voice=voices[i % len(voices)]) for i, text in enumerate(texts)]


EAGER, GRAPHS, COMPILED = "eager", "graphs", "compiled"
MODES: dict[str, dict[str, Any]] = {
    EAGER: {"enforce_eager": True},
    # Without torch.compile an engine is there in seconds.
    GRAPHS: {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "kernel_config": {"enable_jit_warmup": False},
    },
    COMPILED: {},
}


def config(family: str, mode: str) -> dict[str, Any]:
    """The family's own deployment, smaller, on the first device or the processor."""
    from vllm_omni.platforms import current_host

    device = "cpu" if current_host().platform == "cpu" else "0"
    count = AR_STAGES[family]
    stage = {**STAGE, "devices": device, **MODES[mode]}
    if device == "0":
        stage["attention_backend"] = "TRITON_ATTN"  # FlashAttention has no float32
    stages: list[dict[str, Any]] = [{"stage_id": i, **stage} for i in range(count)]
    stages.append(
        {
            "stage_id": count,
            "devices": device,
            "max_num_seqs": REQUESTS,
            "gpu_memory_utilization": 0.2,
        }
    )
    return {"base_config": f"{family}.yaml", "platforms": {}, "stages": stages}


class Answers:
    """What a deployment answers.

    Args:
        family: Of its checkpoint.
        mode: One of `MODES`.
    """

    def __init__(self, family: str, mode: str) -> None:
        from vllm_omni import AsyncOmni
        from vllm_omni.config.build import build_plan

        model = FOLDER / family
        name = {"qwen3_tts": "qwen3_tts_custom_voice"}.get(family, family)
        # In a process of its own: who forks stages must not have looked for CUDA.
        make = [sys.executable, "-m", "vllm_omni.testing.tiny", name, str(model)]
        if not model.exists():
            subprocess.run(make, check=True, cwd=ROOT)
        plan = build_plan(str(model), deploy_config=config(family, mode), async_chunk=True)
        began = time.perf_counter()
        self.omni = AsyncOmni.from_plan(plan)
        self.start_s = time.perf_counter() - began
        self._family = family

    def params(self, index: int, greedy: bool) -> list[dict[str, Any] | None]:
        """Of all stages."""
        drawn: dict[str, Any] = {"max_tokens": FRAMES, "ignore_eos": True}
        drawn |= {"temperature": 0} if greedy else {"temperature": 0.9, "top_k": 20, "seed": index}
        return [drawn] * AR_STAGES[self._family] + [None]

    async def one(self, index: int, request: Any, greedy: bool) -> tuple[list[int], np.ndarray]:
        """Token ids of text, if there is any, and the sound."""
        tokens: list[int] = []
        sound: list[np.ndarray] = []
        params = self.params(index, greedy)
        heard: dict[str, Any] = {}
        if "omni" in self._family:
            heard["output_modalities"] = ("text", "audio")
        async for output in self.omni.generate(request, sampling_params_list=params, **heard):
            if output.audio is not None:
                sound.append(np.asarray(output.audio.samples))
            elif output.outputs:
                tokens = list(output.outputs[0].token_ids)  # all of them so far
        return tokens, np.concatenate(sound) if sound else np.zeros(0, np.float32)

    async def all(self, *, together: bool, greedy: bool) -> list[tuple[list[int], np.ndarray]]:
        """Of every request."""
        asked = list(enumerate(requests(self._family)))
        if together:
            return await asyncio.gather(*(self.one(i, each, greedy) for i, each in asked))
        return [await self.one(i, each, greedy) for i, each in asked]


def run(family: str, mode: str, work: Callable[[Answers], Any]) -> Any:
    """Start, work, stop."""

    async def inside() -> Any:
        try:
            return await work(answers)
        finally:
            await asyncio.to_thread(answers.omni.shutdown, 5)

    answers = Answers(family, mode)
    return asyncio.run(inside())


def record(families: Sequence[str]) -> None:
    """Note what tiny checkpoints answer."""
    for family in families:
        answers = run(family, EAGER, lambda each: each.all(together=True, greedy=True))
        saved: dict[str, np.ndarray] = {}
        for i, (tokens, sound) in enumerate(answers):
            saved[f"tokens{i}"], saved[f"sound{i}"] = np.array(tokens), sound
        np.savez_compressed(FOLDER / f"{family}.npz", **saved)
        print(family, [len(sound) for _, sound in answers])


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest, infinite if the lengths differ."""
    if a.shape != b.shape:
        return float("inf")
    return float(np.abs(a - b).max(initial=0))


def compare(family: str, mode: str, report: Report) -> None:
    """With what was recorded, and with itself."""

    async def work(answers: Answers) -> dict[str, Any]:
        return {
            "start": answers.start_s,
            "together": await answers.all(together=True, greedy=True),
            "alone": await answers.all(together=False, greedy=True),
            "drawn together": await answers.all(together=True, greedy=False),
            "drawn alone": await answers.all(together=False, greedy=False),
        }

    found = run(family, mode, work)
    kept = np.load(FOLDER / f"{family}.npz")
    recorded = [(kept[f"tokens{i}"].tolist(), kept[f"sound{i}"]) for i in range(REQUESTS)]
    report.raw[f"{family}, {mode}"] = {"start_s": found["start"]}
    for name, mine, theirs in (
        ("together, to CPU", found["together"], recorded),
        ("alone, to CPU", found["alone"], recorded),
        ("drawn, together to alone", found["drawn together"], found["drawn alone"]),
    ):
        sounds = [difference(a[1], b[1]) for a, b in zip(mine, theirs, strict=True)]
        texts = sum(a[0] == b[0] for a, b in zip(mine, theirs, strict=True))
        report.raw[f"{family}, {mode}"][name] = sounds
        same = sum(each <= SOUND_BOUND for each in sounds)
        note = f"{same} of {REQUESTS} sounds the same, {texts} texts"
        report.add(f"{family}, {mode}: {name}", max(sounds), "", SOUND_BOUND, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "exact"))
    parser.add_argument("--families", default="qwen3_tts,qwen3_omni_moe")
    parser.add_argument("--modes", default="eager,graphs,compiled")
    parser.add_argument("--name", default="ar_gpu_exact", help="of the result file")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    families = args.families.split(",")
    if args.what == "record":
        record(families)
        return
    report = Report(args.name)
    for family in families:
        for mode in args.modes.split(","):
            compare(family, mode, report)
            report.finish()


if __name__ == "__main__":
    main()
