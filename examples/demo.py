# SPDX-License-Identifier: Apache-2.0
"""`make demo`: from nothing to a model that hears, sees, writes and speaks.

Makes a tiny random Qwen3-Omni checkpoint, serves it with `vllm serve --omni`, sends one chat that
holds text, a picture and a sound, prints the text as it streams, writes the spoken answer to a WAV
file and stops the server. The weights are random, so the text is gibberish and the voice is noise;
everything else is what a real checkpoint does.
"""

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

WORK = Path(os.environ.get("VLLM_OMNI_DEMO_DIR", Path(__file__).parents[1] / ".work" / "demo"))
FAMILY = "qwen3_omni_moe"
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 20
SAMPLE_RATE = 24_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_checkpoint() -> Path:
    from vllm_omni.testing.tiny import build

    return build(FAMILY, WORK / FAMILY)


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """`vllm serve MODEL --omni`, ready; yields its base URL and stops it cleanly afterwards."""
    port = free_port()
    log_path = WORK / "server.log"
    command = [Path(sys.executable).with_name("vllm"), "serve", model, "--omni"]
    options = ["--host", "127.0.0.1", "--port", port, "--served-model-name", "demo"]
    with log_path.open("w") as log:
        server = subprocess.Popen(
            [str(part) for part in command + options], stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, server, log_path)
        yield url
        server.send_signal(signal.SIGINT)
        code = server.wait(STOP_TIMEOUT_S)
        if code != 0:
            raise SystemExit(f"the server ended with code {code}; see {log_path}")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            tail = "\n".join(log.read_text().splitlines()[-20:])
            raise SystemExit(f"the server did not start (code {server.returncode}):\n{tail}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/health", timeout=2)
            return
        time.sleep(0.2)
    raise SystemExit(f"the server was not healthy after {START_TIMEOUT_S} s; see {log}")


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


def ask(url: str) -> tuple[bytes, dict[str, object]]:
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
        extra_body={"return_stage_metrics": True},
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
    began = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    model = make_checkpoint()
    print(f"checkpoint: {model} ({time.monotonic() - began:.1f} s)")
    began = time.monotonic()
    with served(model) as url:
        print(f"server: {url} ready after {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        sound, metrics = ask(url)
        took = time.monotonic() - began
        path = WORK / "answer.wav"
        length = write_wav(sound, path)
        print(f"sound: {path}, {length:.2f} s long, asked and answered in {took:.2f} s")
        for stage in metrics.get("stages", ()):
            print(f"stage: {stage}")
    print("server: stopped cleanly")


if __name__ == "__main__":
    main()
