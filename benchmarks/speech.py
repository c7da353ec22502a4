# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS: time to the first packet and real-time factor, against the authors' own package.

    python benchmarks/speech.py --reference-python REF/bin/python

The package (`qwen-tts`) needs an older transformers, so its interpreter is named; how to make such
an environment is said in tests/reference/record_qwen3_tts.py. Both sides get the same random
checkpoint (some 35 million parameters, 16 codes per frame as the released ones) on the same cores,
one after the other, and make the same frames greedily: the package one request at a time, which is
how it is used, and as a batch; this project 1, 4 and 16 requests at a time, streamed.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from common import WORK, Report

FRAMES = 64
"""Codec frames that every request makes: 5.1 s of sound."""
TEXT = "The quick brown fox jumps over the lazy dog near the river bank."
VOICE = "serena"
CONCURRENCY = (1, 4, 16)
ROUNDS = 3
GROUPS = 16

REFERENCE = f"""
import json, sys, time, torch
from qwen_tts import Qwen3TTSModel
model = Qwen3TTSModel.from_pretrained(sys.argv[1], dtype=torch.float32)
options = dict(do_sample=False, subtalker_dosample=False, max_new_tokens={FRAMES})
def say(count):
    began = time.perf_counter()
    waves, rate = model.generate_custom_voice(
        [{TEXT!r}] * count, speaker=[{VOICE!r}] * count, **options
    )
    return [time.perf_counter() - began, sum(len(wave) for wave in waves) / rate]
say(1)
print(json.dumps({{
    "alone": [say(1) for _ in range({ROUNDS})],
    "batch of 16": [say(16)],
    "threads": torch.get_num_threads(),
}}))
"""


def checkpoint() -> Path:
    """The benchmark's checkpoint."""
    from vllm_omni.testing.tiny import qwen3_tts as recipe

    out = WORK / "qwen3_tts_small"
    if (out / "complete").exists():
        return out

    def config(ids: dict[str, int]) -> dict[str, Any]:
        made = recipe.config("custom_voice", ids)
        talker = made["talker_config"]
        talker.update(hidden_size=384, intermediate_size=1024, num_hidden_layers=6)
        talker.update(num_attention_heads=6, num_code_groups=GROUPS, text_hidden_size=384)
        talker["code_predictor_config"].update(
            hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=8
        )
        talker["code_predictor_config"].update(
            layer_types=["full_attention"] * 3, num_code_groups=GROUPS
        )
        return made

    codec = recipe.codec_config()
    codec["encoder_valid_num_quantizers"] = GROUPS
    codec["encoder_config"]["num_quantizers"] = GROUPS
    codec["decoder_config"].update(num_quantizers=GROUPS, hidden_size=128, latent_dim=128)
    codec["decoder_config"].update(decoder_dim=128, intermediate_size=256, codebook_dim=64)
    out.mkdir(parents=True, exist_ok=True)
    recipe.write_of_sizes(out, 0, config, codec, stop=0.0)
    (out / "complete").touch()
    return out


def parameters(model: Path) -> int:
    """How many there are, the codec's included."""
    from safetensors import safe_open

    total = 0
    for file in model.rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                total += len(tensors.get_tensor(name).flatten())
    return total


def reference(python: str, model: Path) -> dict[str, Any]:
    """What the package takes: (seconds, seconds of sound) per call."""
    command = [python, "-c", REFERENCE, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def ours(model: Path) -> dict[int, list[dict[str, Any]]]:
    """By concurrency: for each round its wall time, and of each request packet, end and sound."""
    from vllm_omni import AsyncOmni
    from vllm_omni.config.build import build_plan
    from vllm_omni.speech.request import SpeechRequest

    omni = AsyncOmni.from_plan(build_plan(str(model)))
    request = SpeechRequest(text=TEXT, voice=VOICE)
    params = [{"temperature": 0, "max_tokens": FRAMES, "min_tokens": FRAMES}, None]

    async def say() -> dict[str, float]:
        began = time.perf_counter()
        first, sound = None, 0.0
        async for output in omni.generate(request, sampling_params_list=params):
            if output.audio is not None:
                first = first or time.perf_counter() - began
                sound += len(output.audio.samples) / output.audio.sample_rate
        assert first is not None
        return {"first": first, "end": time.perf_counter() - began, "sound": sound}

    async def main() -> dict[int, list[dict[str, Any]]]:
        found: dict[int, list[dict[str, Any]]] = {}
        await asyncio.gather(*(say() for _ in range(CONCURRENCY[-1])))  # warm
        for concurrency in CONCURRENCY:
            for _ in range(ROUNDS):
                began = time.perf_counter()
                requests = await asyncio.gather(*(say() for _ in range(concurrency)))
                wall = time.perf_counter() - began
                found.setdefault(concurrency, []).append({"wall": wall, "requests": requests})
        await asyncio.to_thread(omni.shutdown, 5)
        return found

    return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference-python", required=True, help="interpreter with qwen-tts")
    args = parser.parse_args()
    report = Report("speech")
    model = checkpoint()
    report.raw["parameters"] = parameters(model)
    theirs = report.raw["reference"] = reference(args.reference_python, model)
    found = ours(model)
    report.raw["ours"] = found
    alone_s = statistics.median(seconds for seconds, _ in theirs["alone"])
    alone = statistics.median(sound / seconds for seconds, sound in theirs["alone"])
    ((batch_s, batch_sound),) = theirs["batch of 16"]
    note = f"qwen-tts alone: {alone_s * 1e3:.0f} ms, {alone:.2f} s of sound per second"
    for concurrency, rounds in found.items():
        requests = [request for each in rounds for request in each["requests"]]
        first = statistics.median(request["first"] for request in requests)
        factor = statistics.median(request["end"] / request["sound"] for request in requests)
        speed = statistics.median(
            sum(request["sound"] for request in each["requests"]) / each["wall"] for each in rounds
        )
        report.add(
            f"first packet at {concurrency}, over the package's whole latency",
            first / alone_s,
            "x",
            0.2 if concurrency == 1 else None,
            f"{first * 1e3:.0f} ms; {note}",
        )
        report.add(f"real-time factor at {concurrency}", factor, "x")
        report.add(
            f"time per second of sound at {concurrency}, over the package's alone",
            alone / speed,
            "x",
            0.25 if concurrency == 16 else None,
            f"{speed:.2f} s of sound per second; package's batch of 16: "
            f"{batch_sound / batch_s:.2f}",
        )
    report.finish()


if __name__ == "__main__":
    main()
