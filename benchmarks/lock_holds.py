# SPDX-License-Identifier: Apache-2.0
"""How long each step of taking in media keeps Python's lock from the event loop.

    OMP_NUM_THREADS=1 THP_MEM_ALLOC_ENABLE=1 python benchmarks/lock_holds.py

A thread does the step while another one wakes up all the time and looks at the first one's clock of
processor time: the largest difference between two looks is what it did without letting go. Counted
in processor time it is the same on a busy machine, where `event_loop_lag.py` measures the others.
"""

import base64
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import Report
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO

from vllm_omni.entrypoints.cli.serve import SWITCH_INTERVAL_S
from vllm_omni.entrypoints.openai.large_bodies import Collected, cut_out
from vllm_omni.entrypoints.openai.media_checks import CheckedIO
from vllm_omni.fork_server import fork_server
from vllm_omni.media.decode import decode_audio, decode_video
from vllm_omni.media.hearing import as_heard
from vllm_omni.testing import media

GOAL_MS = 50
REPEAT = 5
LOOK_S = 0.0005
PIECE = 64 << 10


@dataclass
class Hold:
    """What a step costs, in ms of processor time.

    Attributes:
        longest: The most without letting the lock go.
        all: Of the thread, with and without the lock.
        free: To free its result, which is all with the lock.
    """

    longest: float
    all: float
    free: float


def hold(step: Callable[[], Any]) -> Hold:
    """The best of some tries: what disturbs only adds."""
    tries = [_hold(step) for _ in range(REPEAT)]
    return Hold(
        min(each.longest for each in tries),
        min(each.all for each in tries),
        min(each.free for each in tries),
    )


def _hold(step: Callable[[], Any]) -> Hold:
    clock: list[int] = []
    spent: list[float] = []
    known, seen, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        clock.append(time.pthread_getcpuclockid(threading.get_ident()))
        known.set()
        seen.wait()
        began = time.thread_time()
        result = step()
        ended = time.thread_time()
        del result
        spent.extend([ended - began, time.thread_time() - ended])
        done.set()
        seen.clear()
        seen.wait()  # its clock ends with it

    thread = threading.Thread(target=work)
    thread.start()
    known.wait()
    last, longest = time.clock_gettime(clock[0]), 0.0
    seen.set()
    while not done.is_set():
        time.sleep(LOOK_S)
        now = time.clock_gettime(clock[0])
        last, longest = now, max(longest, now - last)
    time.sleep(0.01)
    seen.set()
    thread.join()
    return Hold(1000 * longest, *(1000 * each for each in spent))


def steps() -> dict[str, Callable[[], Any]]:
    """By what they are; those in brackets are not in the server, but were, or are elsewhere."""
    payload = base64.b64encode(os.urandom(48 << 20))
    start = b'{"messages":[{"content":[{"image_url":{"url":"data:image/png;base64,'
    body = start + payload + b'"}}]}]}'
    pieces = [body[at : at + PIECE] for at in range(0, len(body), PIECE)]
    sound = media.encode_audio(media.sound(600))
    film = media.encode_video(media.video(60, 1280, 720))
    picture = media.encode_image(media.image(4000, 3000), "jpeg")
    images = ImageMediaIO()
    videos = VideoMediaIO(images, video_backend="qwen2_vl")

    def collected() -> Any:
        made = Collected()
        made.append(pieces)
        return made.whole()

    def grown() -> bytearray:
        made = bytearray()
        for piece in pieces:
            made += piece
        return made

    whole = collected()
    return {
        "body of 64 MiB: collected": collected,
        "(body of 64 MiB: as a bytearray)": grown,
        "body of 64 MiB: cut": lambda: cut_out(whole),
        "sound of 10 min": lambda: CheckedIO(AudioMediaIO()).load_bytes(sound),
        "(sound of 10 min, in this process)": lambda: as_heard(*decode_audio(sound)),
        "video of 60 frames": lambda: CheckedIO(videos).load_bytes(film),
        "(video of 60 frames, in this process)": lambda: decode_video(film),
        "picture of 12 megapixels": lambda: CheckedIO(images).load_bytes(picture),
        "(picture of 12 megapixels, in this process)": lambda: images.load_bytes(picture),
        "tensor of 664 MB": lambda: torch.ones(166_000_000),
    }


def main() -> None:
    fork_server()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    report = Report("lock_holds")
    for name, step in steps().items():
        found = hold(step)
        goal = None if name.startswith("(") else GOAL_MS
        worst = max(found.longest, found.free)
        note = f"{found.all:.0f} ms in all; {found.free:.1f} ms to free the result"
        report.add(name, round(worst, 1), "ms", goal, note)
        report.raw[name] = vars(found)
        print(report.rows[-1], flush=True)
    report.finish()


if __name__ == "__main__":
    main()
