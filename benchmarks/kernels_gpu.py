# SPDX-License-Identifier: Apache-2.0
"""What a frame's completion and a packet's decoding take on a GPU, from graphs and without.

    python benchmarks/kernels_gpu.py [--profile]

Qwen3-TTS-1.7B's code predictor (15 codes per frame) and its codec decoder, random weights in
bfloat16; Higgs-Audio's codec decoder in float32. Milliseconds on the device, medians.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import WORK, Report
from gpu_checkpoints import qwen3_tts
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_omni.ar.cuda.frame_graphs import FrameGraphs
from vllm_omni.config.hf.qwen3_tts import Qwen3TTSConfig
from vllm_omni.diffusion.programs import qwen3_tts as program
from vllm_omni.diffusion.programs.higgs_audio_v3 import published_config
from vllm_omni.diffusion.programs.twosided import sound_rules
from vllm_omni.diffusion.replay import Replay
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.models.higgs_audio_codec import CodecDecoder
from vllm_omni.models.interfaces import Frames, FrameSampling
from vllm_omni.models.noise import Noise
from vllm_omni.models.qwen3_tts_talker import Qwen3TTSCodePredictor

DEVICE = torch.device("cuda")
ROUNDS = 30


def milliseconds(work: Callable[[], Any]) -> float:
    """From the first kernel's launch to the last one's end."""
    for _ in range(3):
        work()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def sampling(batch: int) -> FrameSampling:
    """As the published generation config draws."""
    numbers = torch.arange(batch, device=DEVICE)
    return FrameSampling(
        temperature=torch.full((batch,), 0.9, device=DEVICE),
        top_k=torch.full((batch,), 50, device=DEVICE),
        top_p=torch.ones(batch, device=DEVICE),
        noise=Noise(numbers, numbers),
        all_greedy=False,
        memory=torch.zeros(batch, 0, dtype=torch.int64, device=DEVICE),
    )


def frames(report: Report, config: Qwen3TTSConfig, profile: bool) -> None:
    """The code predictor's."""
    talker = config.talker_config
    width = talker.hidden_size
    torch.set_default_dtype(torch.bfloat16)
    vllm_config = VllmConfig()
    vllm_config.kernel_config.ir_op_priority.set_default()  # as vLLM's workers do
    with set_current_vllm_config(vllm_config), DEVICE:
        predictor = Qwen3TTSCodePredictor(talker.code_predictor_config, width)
    torch.set_default_dtype(torch.float32)

    def complete(hidden: torch.Tensor, tokens: torch.Tensor, drawn: FrameSampling) -> Frames:
        codes, embeds = predictor.predict(hidden, hidden, drawn)
        return Frames(codes, embeds.sum(dim=1))

    graphs = FrameGraphs(complete)
    graphs.capture(64, width, 0, DEVICE, torch.bfloat16)
    for batch in (1, 16, 64):
        hidden = torch.randn(batch, width, device=DEVICE, dtype=torch.bfloat16)
        given = (hidden, torch.zeros(batch, dtype=torch.int64, device=DEVICE), sampling(batch))
        report.add(f"frame of {batch}, graph", milliseconds(lambda g=given: graphs(*g)), "ms")
        if batch == 1 and profile:
            kernels(lambda g=given: graphs(*g))
        report.add(f"frame of {batch}, eager", milliseconds(lambda g=given: complete(*g)), "ms")


def kernels(work: Callable[[], Any]) -> None:
    """Print which kernels some work consists of."""
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    table = profiler.key_averages()
    print(f"{sum(each.count for each in table)} kernels")
    print(table.table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=70))


def packets(report: Report) -> None:
    """The codec decoder's."""
    loaded = program.load(LoadContext(str(WORK / "qwen3_tts_1b7"), DEVICE, torch.bfloat16))
    part = loaded.components["decoder"]
    for name in ("latents", "samples"):
        rules, method = part.methods[name], getattr(part.module, name)
        sizes = [(1, 1), (1, 4), (1, 25), (16, 8), (64, 25)]
        decoding(report, name, method, rules, sizes + [(64, 600)] * (name == "latents"))


def pieces(report: Report) -> None:
    """Higgs-Audio's codec decoder's, which are looked around: first and later ones of a stream."""
    decoder = CodecDecoder(published_config()).to(DEVICE).eval()
    rules = sound_rules(decoder.config.num_quantizers, decoder.config.hop_length)
    sizes = [(1, 11), (1, 45), (4, 45), (5, 45), (8, 16), (1, 236), (32, 45)]
    decoding(report, "Higgs-Audio", decoder, rules, sizes)


def decoding(
    report: Report,
    name: str,
    method: Callable[..., Any],
    rules: CallRules,
    sizes: list[tuple[int, int]],
) -> None:
    """A method, for some rows and frames."""
    replay = Replay(method, name, rules, DEVICE)
    for size in sizes:
        given = tuple(each.to(DEVICE) for each in rules.graphs.example(*size))
        what = "{} of {} x {} frames".format(name, *size)
        report.add(f"{what}, graph", milliseconds(lambda g=given: replay(*g)), "ms")
        report.add(f"{what}, eager", milliseconds(lambda g=given: method(*g)), "ms")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true", help="print the kernels of a frame")
    args = parser.parse_args()
    report = Report("kernels_gpu")
    model = qwen3_tts(WORK / "qwen3_tts_1b7")
    frames(report, Qwen3TTSConfig.from_pretrained(model), args.profile)
    packets(report)
    pieces(report)
    report.finish()


if __name__ == "__main__":
    main()
