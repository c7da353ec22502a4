# SPDX-License-Identifier: Apache-2.0
"""Record what the authors' package answers on the tiny Qwen3-TTS checkpoints, greedily.

`qwen-tts` 0.1.1 needs transformers 4.57.3, so this runs in an environment of its own; the
checkpoints are written by ours first:

    for kind in base custom_voice voice_design; do
        python -m vllm_omni.testing.tiny qwen3_tts_$kind TINY/qwen3_tts_$kind
    done
    python3.11 -m venv REF && REF/bin/pip install qwen-tts==0.1.1
    REF/bin/pip install --no-deps -e .
    REF/bin/python tests/reference/record_qwen3_tts.py TINY

(Where torchaudio's library does not load, as beside a torch without CUDA, delete its `lib` folder:
only its Python part is used.)

It writes `fixtures/qwen3_tts/`: `frames.json`, with a list of cases per kind, and `sounds.npz`,
with the waveforms of a few of them as int16. A case's `margin` is the least distance of the best
logit from the second best, over all codes: how safe greedy decoding is.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from qwen_tts import Qwen3TTSModel

from vllm_omni.testing.media import sound

OUT = Path(__file__).parent / "fixtures" / "qwen3_tts"
SAMPLE_RATE = 24_000
MAX_NEW_TOKENS = 32
GREEDY = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": MAX_NEW_TOKENS}
HELLO = "Hello, how are you?"
COUNT = "One, two, three."
LONG = "The quick brown fox jumps over the lazy dog near the river bank, slowly."
CHINESE = "你好，世界。今天天气很好。"
CALM = "Speak slowly, with a calm and friendly voice."

# Arguments of the package's `generate_*`; `reference` is a key of REFERENCES.
CASES: dict[str, list[dict[str, Any]]] = {
    "custom_voice": [
        {"text": HELLO, "speaker": "serena", "non_streaming_mode": True},
        {"text": COUNT, "speaker": "vivian", "language": "English", "non_streaming_mode": True},
        {"text": CHINESE, "speaker": "eric", "non_streaming_mode": True},
        {"text": HELLO, "speaker": "Serena", "instruct": CALM, "non_streaming_mode": True},
        {"text": COUNT, "speaker": "serena", "language": "English", "non_streaming_mode": False},
        {"text": LONG, "speaker": "vivian", "instruct": CALM, "non_streaming_mode": False},
        {"text": "A", "speaker": "eric", "language": "German", "non_streaming_mode": False},
    ],
    "voice_design": [
        {"text": HELLO, "instruct": CALM, "non_streaming_mode": True},
        {"text": LONG, "instruct": CALM, "language": "English", "non_streaming_mode": False},
        {"text": COUNT, "instruct": "", "language": "Japanese", "non_streaming_mode": True},
    ],
    "base": [
        {"text": LONG, "reference": "a", "non_streaming_mode": False},
        {"text": HELLO, "reference": "a", "language": "English", "non_streaming_mode": False},
        {"text": HELLO, "reference": "a", "non_streaming_mode": True},
        {"text": HELLO, "reference": "b", "non_streaming_mode": True},
        {"text": HELLO, "reference": "a", "x_vector_only_mode": True, "non_streaming_mode": False},
        {"text": COUNT, "reference": "b", "x_vector_only_mode": True, "non_streaming_mode": True},
    ],
}
# Seconds and seed of `vllm_omni.testing.media.sound`, and what is said in it. `b` is whole frames.
REFERENCES: dict[str, dict[str, Any]] = {
    "a": {"seconds": 1.0, "seed": 1, "text": "Guten Tag."},
    "b": {"seconds": 1.04, "seed": 2, "text": "Listen to the sound."},
}
# Cases whose waveforms are kept, by kind and index.
SOUNDS = {("custom_voice", 5), ("base", 1)}


def recording(name: str) -> np.ndarray:
    """The samples of a reference, float32 [n]."""
    return sound(REFERENCES[name]["seconds"], SAMPLE_RATE, REFERENCES[name]["seed"])


@contextmanager
def recorded(model: Any) -> Iterator[dict[str, Any]]:
    """Keep what `generate` of the model, its talker and its code predictor give."""
    kept: dict[str, Any] = {"margins": []}
    with ExitStack() as stack:

        def wrap(owner: Any, keep: Any, **overrides: Any) -> None:
            inner = owner.generate

            def generate(*args: Any, **kwargs: Any) -> Any:
                result = inner(*args, **{**kwargs, **overrides})
                keep(result)
                return result

            stack.enter_context(mock.patch.object(owner, "generate", generate))

        def margins(result: Any) -> None:
            top = torch.cat(result.scores).float().topk(2, dim=-1).values
            kept["margins"].append(float((top[:, 0] - top[:, 1]).min()))

        wrap(model, lambda result: kept.update(frames=result[0][0]))
        wrap(model.talker, margins, output_scores=True)
        wrap(model.talker.code_predictor, margins, output_scores=True)
        yield kept


def speak(tts: Qwen3TTSModel, kind: str, request: dict[str, Any]) -> tuple[dict, np.ndarray]:
    """One case and its waveform."""
    arguments = dict(request)
    method = {"base": "generate_voice_clone"}.get(kind, f"generate_{kind}")
    name = arguments.pop("reference", None)
    if name is not None:
        arguments["ref_audio"] = (recording(name), SAMPLE_RATE)
        arguments["ref_text"] = REFERENCES[name]["text"]
    with recorded(tts.model) as kept:
        (wave,), rate = getattr(tts, method)(**arguments, **GREEDY)
    assert rate == SAMPLE_RATE
    frames = kept["frames"].tolist()
    case = {
        "request": request,
        "frames": frames,
        "ended": len(frames) < MAX_NEW_TOKENS - 1,
        "margin": round(min(kept["margins"]), 5),
    }
    return case, wave


def encode(tts: Qwen3TTSModel) -> dict[str, Any]:
    """What the base checkpoint makes of the references."""
    encoded = {}
    for name, reference in REFERENCES.items():
        (item,) = tts.create_voice_clone_prompt(
            (recording(name), SAMPLE_RATE), ref_text=reference["text"]
        )
        x_vector = [round(float(value), 7) for value in item.ref_spk_embedding]
        encoded[name] = {**reference, "codes": item.ref_code.tolist(), "x_vector": x_vector}
    return encoded


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiny", type=Path, help="folder of the three checkpoints")
    tiny: Path = parser.parse_args().tiny
    result: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "cases": {}}
    sounds: dict[str, np.ndarray] = {}
    for kind, requests in CASES.items():
        tts = Qwen3TTSModel.from_pretrained(str(tiny / f"qwen3_tts_{kind}"), dtype=torch.float32)
        cases = result["cases"].setdefault(kind, [])
        for index, request in enumerate(requests):
            case, wave = speak(tts, kind, request)
            print(kind, index, len(case["frames"]), case["ended"], case["margin"], flush=True)
            cases.append(case)
            if (kind, index) in SOUNDS:
                sounds[f"{kind}.{index}"] = np.round(wave * 32767).astype(np.int16)
        if kind == "base":
            result["references"] = encode(tts)
    OUT.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (OUT / "frames.json").write_text(text.replace('{"request"', '\n{"request"') + "\n")
    np.savez_compressed(OUT / "sounds.npz", **sounds)


if __name__ == "__main__":
    main()
