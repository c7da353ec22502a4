# SPDX-License-Identifier: Apache-2.0
"""The diffusion engine on a GPU: is it exact there, how fast is it, where does it wait?

    python benchmarks/diffusion_gpu.py [--device cuda] [--parts offline,exact,waits,speed,guidance]

- offline: two pictures by `Omni(model=...)`, which starts a process for the stage;
- exact: tiny checkpoints against diffusers on the same device, in float32 without TF32; aborts and
  the memory that they leave; previews;
- waits: the places at which the host waits for the device (`torch.cuda.set_sync_debug_mode`);
- speed: a FLUX transformer of 1 B random parameters in bfloat16 at several sizes: mixed requests
  against diffusers alone and in static batches, what the scheduler learned of forwards, and the
  latency of a short request among long ones;
- guidance: the same with a Qwen-Image transformer, one guided request alone;
- profile, kernels (only if asked for): where the host's and the device's time goes, printed.

Parts that failed are told at the end; the others' figures are written all the same.
"""

import argparse
import platform
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import vllm  # noqa: F401 - before diffusers, which looks for CUDA so that no process can be forked
from common import ROOT, Report

sys.path.insert(0, str(ROOT))

import gpu_exactness
import gpu_speed
import gpu_waits
from gpu_models import Model, large_folder, tiny_folder

PARTS = ("offline", "exact", "waits", "speed", "guidance")
"""In this order: who forks must not have used CUDA."""
SIZES = (256, 512, 1024)


def describe(device: torch.device) -> dict[str, Any]:
    """The device and the libraries."""
    names = ("torch", "diffusers", "transformers", "vllm", "greenlet")
    found: dict[str, Any] = {"python": platform.python_version()}
    found |= {name: version(name) for name in names if name != "vllm" or device.type == "cuda"}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found


def speed(model: Model, sizes: list[int], report: Report) -> None:
    """Of FLUX."""
    parameters = sum(p.numel() for p in model.denoiser.parameters())
    report.raw["parameters"] = parameters
    gpu_speed.overhead(model.device, report)
    for model.size in sizes:
        gpu_speed.throughput(model, report)
        gpu_speed.latency(model, report)
        report.finish()  # so that it is there, whatever comes next
    gpu_speed.out_of_memory(model, report)


def profile(model: Callable[[str], Model], sizes: list[int]) -> None:
    """Of FLUX where the host is the limit, of Qwen-Image where the device is."""
    for family, size, together in (
        ("flux", min(sizes), (1, gpu_speed.CONCURRENCY)),
        ("qwen_image", max(sizes), (1,)),
    ):
        made = model(family)
        made.size = size
        gpu_speed.profile(made, together)


def kernels(model: Model, size: int) -> None:
    """Of Qwen-Image."""
    model.size = size
    gpu_speed.kernels(model)


def guidance(model: Model, sizes: list[int], report: Report) -> None:
    """Of Qwen-Image."""
    for model.size in sizes:
        gpu_speed.guidance(model, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of the large models")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--families", nargs="+", default=gpu_exactness.FAMILIES)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="pixels")
    parser.add_argument("--tiny", action="store_true", help="no large models; to try this script")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), vars(torch)[args.dtype]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    report = Report("diffusion_gpu")

    def model(family: str) -> Model:
        folder = (tiny_folder if args.tiny else large_folder)(family)
        return Model(family, folder, device, dtype)

    run = {
        "exact": lambda: gpu_exactness.measure(device, args.families, report),
        "waits": lambda: gpu_waits.measure(device, args.families, report),
        "speed": lambda: speed(model("flux"), args.sizes, report),
        "profile": lambda: profile(model, args.sizes),
        "kernels": lambda: kernels(model("qwen_image"), max(args.sizes)),
        "guidance": lambda: guidance(model("qwen_image"), args.sizes, report),
        "offline": lambda: gpu_exactness.offline(tiny_folder("flux"), "float32", report),
    }
    failed = []
    for part in args.parts.split(","):
        began = time.perf_counter()
        try:
            run[part]()
        except Exception:
            # The device is lent: what else can be measured is measured, and the failure told.
            traceback.print_exc()
            failed.append(part)
        report.raw[f"seconds of {part}"] = time.perf_counter() - began
    report.raw["versions"] = describe(device)
    report.finish()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
