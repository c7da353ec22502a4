# SPDX-License-Identifier: Apache-2.0
"""Record what the authors' package answers on the tiny VoxCPM2 checkpoint, with noise of ours.

`voxcpm` 2.0.3 runs beside transformers 5, but brings much that this does not need. So, in our
environment, with what it lacks in a folder apart (`lib` of torchaudio does not load beside a torch
without CUDA, and only its Python part is wanted):

    pip install --no-deps --target REF voxcpm==2.0.3 torchaudio einops librosa lazy_loader \\
        audioread pooch platformdirs soxr numba llvmlite scikit-learn joblib threadpoolctl
    rm -r REF/torchaudio/lib
    python -m vllm_omni.testing.tiny voxcpm2 TINY/voxcpm2
    PYTHONPATH=.:REF python tests/reference/record_voxcpm2.py TINY/voxcpm2

It writes `fixtures/voxcpm2/`: `cases.json`, and `arrays.npz` with each case's latents and sound
(int16), and a batch of frames that the flow made. A case's `margin` is the least distance of the
two logits that say whether speech ends, and `rounding` the least distance of a number that is
rounded from where it would be rounded otherwise: how safe the answer is.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import soundfile
import torch
from voxcpm.model.voxcpm2 import VoxCPM2Model

from vllm_omni.models.noise import Noise
from vllm_omni.testing.media import sound

OUT = Path(__file__).parent / "fixtures" / "voxcpm2"
RECORDING_RATE = 16_000
MAX_FRAMES = 20
BATCH = 5
# Arguments of a request; `recording` is seconds and seed of `vllm_omni.testing.media.sound`, and
# `transcript` its words, if these are known.
CASES: list[dict[str, Any]] = [
    {"text": "Hello, how are you?", "seed": 7},
    {"text": "One, two,\n three.", "seed": 2},
    {"text": "你好，世界。今天天气很好。", "seed": 3},
    {"text": "The quick brown fox.", "seed": 4, "recording": [4.0, 1]},
    {"text": "Hello, how are you?", "seed": 1, "recording": [1.1, 3]},
    {"text": "Yes.", "seed": 5, "instructions": "A calm, friendly voice"},
    {"text": "Good morning.", "seed": 8, "recording": [1.2, 8], "transcript": "One, two,"},
]


@contextmanager
def watched(model: VoxCPM2Model, seed: int) -> Iterator[dict[str, Any]]:
    """Have it draw a request's noise; keep what is made, and how safe it is."""
    kept: dict[str, Any] = {"latents": [], "stops": [], "rounding": []}
    shape = (model.patch_size, model.feat_dim)

    def drawn(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        position = kept["length"] + len(kept["latents"])
        noise = Noise(torch.tensor([seed]), torch.tensor([position]))
        return noise.normal(*shape).transpose(1, 2)

    def note_prompt(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        kept.setdefault("length", kwargs["inputs_embeds"].shape[1])

    def note_latents(_module: Any, _args: Any, made: torch.Tensor) -> None:
        kept["latents"].append(made.transpose(1, 2).flatten(1)[0])

    def note_stop(_module: Any, _args: Any, logits: torch.Tensor) -> None:
        kept["stops"].append(float(logits[0].diff().abs()))

    def note_rounding(_module: Any, _args: Any, made: torch.Tensor) -> None:
        scaled = torch.tanh(made) * model.fsq_layer.scale
        kept["rounding"].append(float((scaled - scaled.floor() - 0.5).abs().min()))

    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.randn", drawn))
        for handle in (
            model.base_lm.register_forward_pre_hook(note_prompt, with_kwargs=True),
            model.feat_decoder.register_forward_hook(note_latents),
            model.stop_head.register_forward_hook(note_stop),
            model.fsq_layer.in_proj.register_forward_hook(note_rounding),
        ):
            stack.callback(handle.remove)
        yield kept


def speak(model: VoxCPM2Model, case: dict[str, Any], folder: Path) -> tuple[dict, dict]:
    """One case, and its arrays."""
    text = " ".join(case["text"].split())
    if "instructions" in case:
        text = f"({case['instructions']}){text}"
    arguments: dict[str, Any] = {"target_text": text, "max_len": MAX_FRAMES}
    if "recording" in case:
        seconds, seed = case["recording"]
        path = folder / "recording.wav"
        samples = sound(seconds, RECORDING_RATE, seed)
        soundfile.write(path, samples, RECORDING_RATE, subtype="FLOAT")
        if "transcript" in case:
            arguments |= {"prompt_wav_path": str(path), "prompt_text": case["transcript"]}
        else:
            arguments["reference_wav_path"] = str(path)
    with watched(model, case["seed"]) as kept:
        wave = model.generate(**arguments)[0]
    said = {
        **case,
        "frames": len(kept["latents"]),
        "margin": min(kept["stops"][3:]),
        "rounding": min(kept["rounding"]),
    }
    latents = torch.stack(kept["latents"]).numpy()
    return said, {"latents": latents, "sound": np.round(wave.numpy() * 32767).astype(np.int16)}


def flow(model: VoxCPM2Model) -> dict[str, np.ndarray]:
    """Frames of a batch, from hidden states that are drawn."""
    generator = torch.Generator().manual_seed(3)
    width = 2 * model.config.dit_config.hidden_dim
    hidden = torch.randn(BATCH, width, generator=generator)
    shape = (BATCH, model.patch_size, model.feat_dim)
    last, noise = torch.randn(2, *shape, generator=generator)
    with mock.patch("torch.randn", lambda *_args, **_kwargs: noise.transpose(1, 2)):
        made = model.feat_decoder(
            mu=hidden,
            patch_size=model.patch_size,
            cond=last.transpose(1, 2).contiguous(),
            n_timesteps=10,
            cfg_value=2.0,
        ).transpose(1, 2)
    arrays = {"hidden": hidden, "last": last, "noise": noise, "made": made}
    return {f"flow.{name}": array.numpy() for name, array in arrays.items()}


def main() -> None:
    """Write the fixtures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    model = VoxCPM2Model.from_local(
        str(parser.parse_args().checkpoint), optimize=False, device="cpu"
    )
    OUT.mkdir(parents=True, exist_ok=True)
    cases, arrays = [], flow(model)
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(CASES):
            said, made = speak(model, case, Path(folder))
            print(said)
            cases.append(said)
            arrays |= {f"{index}.{name}": array for name, array in made.items()}
    written = json.dumps(cases, indent=1, ensure_ascii=False)
    (OUT / "cases.json").write_text(f"{written}\n", encoding="utf-8")
    np.savez_compressed(OUT / "arrays.npz", **arrays)


if __name__ == "__main__":
    main()
