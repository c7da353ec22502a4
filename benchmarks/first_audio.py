# SPDX-License-Identifier: Apache-2.0
"""Time to the first packet of sound, with `async_chunk` and without.

    python benchmarks/first_audio.py

Two deployments that differ in `async_chunk` alone run side by side in one process and get the same
requests in turns: an answer of 200 tokens (the end token is ignored) that is spoken by as many
codec frames. A figure is the median over pairs of neighbouring requests. The deploy file's chunk
sizes hold: the first window is 4 frames.
"""

import argparse
import asyncio
import time
from typing import Any

from common import PROMPT, Report, large_checkpoint, median, spread, tiny_checkpoint

TOKENS = 200
GOAL = 40.0


class Clock:
    """Notes when the first text and the first sound of a request came."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A request begins."""
        self.began = time.perf_counter()
        self.text: float | None = None
        self.audio: float | None = None

    def note(self, output: Any) -> None:
        """An output came."""
        now = time.perf_counter() - self.began
        if output.audio is not None:
            self.audio = self.audio or now
        elif output.outputs:
            self.text = self.text or now

    def seconds(self) -> dict[str, float]:
        """To the first text, to the first sound, to the end."""
        assert self.text is not None and self.audio is not None
        total = time.perf_counter() - self.began
        return {"text": self.text, "audio": self.audio, "total": total}


def measure(large: bool, pairs: int, concurrency: int) -> dict[str, list[dict[str, float]]]:
    """What each request took, with `async_chunk` ("on") and without ("off")."""
    from pipelines import Lengths, OmniPipeline, Stages

    model = large_checkpoint() if large else tiny_checkpoint()
    lengths = Lengths(TOKENS, TOKENS)
    stages = {name: Stages.start(model, async_chunk=name == "on") for name in ("on", "off")}
    omnis = {name: each.omni() for name, each in stages.items()}

    async def ask(name: str) -> dict[str, float]:
        clock = Clock()
        assert await OmniPipeline(omnis[name], lengths, clock.note).ask({"prompt": PROMPT}) > 0
        return clock.seconds()

    async def main() -> dict[str, list[dict[str, float]]]:
        found: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
        for number in range(-1, pairs):
            for name in ("on", "off") if number % 2 == 0 else ("off", "on"):
                answers = await asyncio.gather(*(ask(name) for _ in range(concurrency)))
                if number >= 0:
                    found[name].append(
                        {key: median([each[key] for each in answers]) for key in answers[0]}
                    )
        for omni in omnis.values():
            await asyncio.to_thread(omni.shutdown, 5)
        return found

    return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="pairs of requests")
    parser.add_argument("--concurrency", type=int, default=1, help="equal requests at once")
    parser.add_argument("--large", action="store_true", help="the checkpoint with 20 ms steps")
    arguments = parser.parse_args()

    report = Report("first_audio_large" if arguments.large else "first_audio")
    found = report.raw["seconds"] = measure(arguments.large, arguments.pairs, arguments.concurrency)
    pairs = list(zip(found["on"], found["off"], strict=True))
    shares = [100 * on["audio"] / off["audio"] for on, off in pairs]
    report.add("first sound with async_chunk / without", median(shares), "%", GOAL, spread(shares))
    for name, times in found.items():
        for key in ("text", "audio", "total"):
            values = [1000 * each[key] for each in times]
            label = {"total": "end of the answer"}.get(key, f"first {key}")
            report.add(f"async_chunk {name}: {label}", median(values), "ms", note=spread(values))
    report.finish()


if __name__ == "__main__":
    main()
