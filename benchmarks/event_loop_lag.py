# SPDX-License-Identifier: Apache-2.0
"""How long the server's event loop is kept from everything else, by kind of request.

    python benchmarks/event_loop_lag.py

A probe in the server wakes up every 20 ms while requests run and notes how late it was; it is read
from /metrics before and after each kind. Sixteen requests of a kind run at a time, three times
over. Media are of the size that a phone or a camera makes, and the largest bodies are near the
server's limits. The model is tiny, but what is measured (bodies, decoding, rendering, encoding) is
not its work.
"""

import argparse
import asyncio
import base64
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from common import Report, tiny_checkpoint
from servers import MODEL, Server, served

CONCURRENCY = 16
ROUNDS = 3
GOAL_MS = 50
BUCKET = re.compile(r'vllm_omni:event_loop_lag_s_bucket\{le="([^"]+)",loop="api"\} (\S+)')
SPEECH = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}, "stream": True}


def body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 32, **fields}


def picture(width: int, height: int) -> dict[str, Any]:
    from vllm_omni.testing import media

    url = media.data_url(media.encode_image(media.image(width, height), "jpeg"), "jpeg")
    return {"type": "image_url", "image_url": {"url": url}}


def sound(seconds: float) -> dict[str, Any]:
    from vllm_omni.testing import media

    data = base64.b64encode(media.encode_audio(media.sound(seconds))).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def film(frames: int, width: int, height: int) -> dict[str, Any]:
    from vllm_omni.testing import media

    url = media.data_url(media.encode_video(media.video(frames, width, height)), "mp4")
    return {"type": "video_url", "video_url": {"url": url}}


def bytes_of_nothing(size: int) -> dict[str, Any]:
    """A picture that is none: only its way to the decoder costs anything."""
    url = "data:image/png;base64," + base64.b64encode(os.urandom(size * 3 // 4)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "text": lambda: body(max_tokens=200, ignore_eos=True),
    "streamed text": lambda: body(max_tokens=200, ignore_eos=True, stream=True),
    "streamed speech": lambda: body(**SPEECH),
    "picture, 12 megapixels": lambda: body(picture(4000, 3000)),
    "sound, 30 s": lambda: body(sound(30)),
    "sound, 10 min": lambda: body(sound(600)),
    "video, 60 frames of 1280x720": lambda: body(film(60, 1280, 720)),
    "body of 16 MiB": lambda: body(bytes_of_nothing(16 << 20)),
    "body of 64 MiB": lambda: body(bytes_of_nothing(64 << 20)),
}


async def lags(http: httpx.AsyncClient) -> dict[float, float]:
    """How many wake-ups were at most so late (s), cumulative."""
    found = BUCKET.findall((await http.get("/metrics")).text)
    return {float(limit): float(count) for limit, count in found}


async def run_kind(server: Server, content: bytes) -> tuple[dict[float, float], Counter[str]]:
    """Wake-ups by lag while requests of a kind run, and the answers: statuses, what was wrong."""
    answers: Counter[str] = Counter()

    async def client(http: httpx.AsyncClient) -> None:
        for _ in range(ROUNDS):
            headers = {"Content-Type": "application/json"}
            reply = await http.post("/v1/chat/completions", content=content, headers=headers)
            wrong = "" if reply.is_success else f" {reply.json()['error']['message'][:120]}"
            answers[f"{reply.status_code}{wrong}"] += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
        before = await lags(http)
        await asyncio.gather(*(client(http) for _ in range(CONCURRENCY)))
        after = await lags(http)
    return {limit: after[limit] - before.get(limit, 0) for limit in after}, answers


def worst_ms(counts: dict[float, float]) -> float:
    """The upper bound of the bucket that has the longest lag."""
    total = counts[float("inf")]
    return next(1000 * limit for limit, count in sorted(counts.items()) if count == total)


def share_within_goal(counts: dict[float, float]) -> float:
    return 100 * counts[GOAL_MS / 1000] / counts[float("inf")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    arguments = parser.parse_args()

    report = Report("event_loop_lag")
    flags = ("--limit-mm-per-prompt", '{"image": 2, "audio": 2, "video": 1}')
    with served(tiny_checkpoint(), *flags, "--max-model-len", "32768") as server:
        for kind in arguments.kinds:
            content = json.dumps(KINDS[kind]()).encode()
            counts, answers = asyncio.run(run_kind(server, content))
            late = counts[float("inf")] - counts[GOAL_MS / 1000]
            note = (
                f"{len(content) / 2**20:.1f} MiB each; {late:.0f} of {counts[float('inf')]:.0f} "
                f"wake-ups later than {GOAL_MS} ms; answers {dict(answers)}"
            )
            report.add(f"longest lag, {kind}", worst_ms(counts), "ms", GOAL_MS, note)
            report.raw[kind] = {str(limit): count for limit, count in counts.items()}
            print(report.rows[-1])
    report.finish()


if __name__ == "__main__":
    main()
