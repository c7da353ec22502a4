# SPDX-License-Identifier: Apache-2.0
"""`make demo`: from nothing to a model that hears, sees, writes and speaks.

Makes a tiny random Qwen3-Omni checkpoint, serves it with `vllm serve --omni`, sends one chat that
holds text, a picture and a sound, prints the text as it streams, writes the spoken answer to a WAV
file and stops the server. The weights are random, so the text is gibberish and the voice is noise;
everything else is what a real checkpoint does.
"""

import base64
import os
import time
from pathlib import Path
from typing import Any

WORK = Path(os.environ.get("VLLM_OMNI_DEMO_DIR", Path(__file__).parents[1] / ".work" / "demo"))
FAMILY = "qwen3_omni_moe"
SAMPLE_RATE = 24_000


def make_checkpoint() -> Path:
    from vllm_omni.testing.tiny import build

    return build(FAMILY, WORK / FAMILY)


def question() -> list[dict[str, object]]:
    """One chat message of text, a picture and a sound."""
    from vllm_omni.testing import media

    picture = media.data_url(media.encode_image(media.image(96, 64, seed=1)), "png")
    sound = base64.b64encode(media.encode_audio(media.sound(1.5, seed=2))).decode()
    content = [
        {"type": "text", "text": "Describe what you see and hear."},
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    ]
    return [{"role": "user", "content": content}]


def ask(url: str) -> tuple[bytes, dict[str, Any]]:
    """Stream the answer: prints its text, returns its sound (s16le) and the stages' timing."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="demo",
        messages=question(),
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"},
        stream=True,
        max_tokens=48,
        extra_body={
            "return_stage_metrics": True,
            # One entry per stage. A random talker may fall silent at once: it must speak a little.
            "sampling_params_list": [None, {"min_tokens": 25, "max_tokens": 60}, None],
        },
    )
    sound, metrics = bytearray(), {}
    print("answer: ", end="", flush=True)
    for chunk in stream:
        metrics = (chunk.model_extra or {}).get("metrics") or metrics
        for choice in chunk.choices:
            audio = choice.delta.audio if "audio" in choice.delta.model_fields_set else None
            if audio is None:
                print(choice.delta.content or "", end="", flush=True)
                continue
            print(audio.transcript or "", end="", flush=True)
            sound += base64.b64decode(audio.data or "")
    print()
    return bytes(sound), metrics


def write_wav(sound: bytes, path: Path) -> float:
    """Write s16le mono samples; returns the length in seconds."""
    import numpy as np
    import soundfile

    samples = np.frombuffer(sound, dtype="<i2")
    soundfile.write(path, samples, SAMPLE_RATE)
    return len(samples) / SAMPLE_RATE


def main() -> None:
    from vllm_omni.testing.server import OmniServer

    began = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    model = make_checkpoint()
    print(f"checkpoint: {model} ({time.monotonic() - began:.1f} s)", flush=True)
    server = OmniServer(model, ["--served-model-name", "demo"], log=WORK / "server.log").start()
    try:
        print(f"server: {server.url} ready after {server.start_seconds:.1f} s", flush=True)
        began = time.monotonic()
        sound, metrics = ask(server.url)
        took = time.monotonic() - began
        path = WORK / "answer.wav"
        length = write_wav(sound, path)
        print(f"sound: {path}, {length:.2f} s long, asked and answered in {took:.2f} s")
        for stage in metrics.get("stages", ()):
            made = f"{stage['tokens']} tokens" if stage["tokens"] else f"{stage['outputs']} pieces"
            print(
                f"stage {stage['stage']}: {made}, first after {stage['first_output_s']:.3f} s, "
                f"ended after {stage['finished_s']:.3f} s"
            )
    finally:
        code = server.stop()
    if code != 0:
        raise SystemExit(f"the server ended with code {code}; see {server.log}")
    print("server: stopped cleanly")


if __name__ == "__main__":
    main()
