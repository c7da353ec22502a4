# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every type over HTTP: no 5xx, no hang, no leak.

`VLLM_OMNI_FUZZ_CASES=2000` makes it that many cases; a push runs 100.
"""

import collections
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import pytest

from tests.entrypoints.bad_requests import data_url, part, said
from tests.entrypoints.conftest import MODEL, LiveServer
from tests.entrypoints.mutations import frame_list, mutate, samples

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

CASES = int(os.environ.get("VLLM_OMNI_FUZZ_CASES", "100"))
WARM_UP = 240
CLIENTS = 4
SLOWEST_S = 20.0
# The 50 MB of vLLM's cache of processed media, and what the allocators of several processes take
# (measured: 148 MB after 2,000 cases, 194 to 214 MB after 6,000). Features kept of each case
# would be about 1 MB a case.
MOST_GROWTH_BYTES = (64 << 20) + 50_000 * CASES
REPRS = ("array(", "<PIL", "tensor(", " at 0x", "Traceback", "/site-packages")


class Reply(NamedTuple):
    name: str
    status: int
    seconds: float
    error: dict[str, Any]


def request(number: int) -> tuple[str, dict[str, Any]]:
    """A case's file type and body; always the same for a number."""
    rng = np.random.default_rng(number)
    files = samples_once()
    names = [*files, "frames"]
    name, other = names[number % len(names)], files[list(files)[rng.integers(len(files))]]
    options: dict[str, Any] = {}
    if name == "frames":
        picture = files["jpeg"].data
        pictures = [picture, mutate(picture, other.data, rng), picture]
        content = part("video", frame_list(pictures))
    else:
        kind, mime, data = files[name]
        damaged = mutate(data, other.data, rng)
        content = part(kind, data_url(damaged, mime))
        if name == "mp4" and rng.random() < 0.3:
            options["mm_processor_kwargs"] = {"use_audio_in_video": True}
    return name, {"model": MODEL, "messages": said(content), "max_tokens": 1, **options}


_SAMPLES = {}


def samples_once() -> dict[str, Any]:
    if not _SAMPLES:
        _SAMPLES.update(samples())
    return _SAMPLES


def resources(server: LiveServer) -> tuple[int, int]:
    """Resident bytes and open files of the server's processes."""
    root = psutil.Process(server.process.pid)
    family = [root, *root.children(recursive=True)]
    return sum(p.memory_info().rss for p in family), sum(p.num_fds() for p in family)


def run(http: httpx.Client, numbers: range) -> list[Reply]:
    def ask(number: int) -> Reply:
        name, body = request(number)
        began = time.monotonic()
        reply = http.post("/v1/chat/completions", json=body)
        error = reply.json().get("error", {}) if reply.status_code != 200 else {}
        return Reply(f"{name} #{number}", reply.status_code, time.monotonic() - began, error)

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, numbers))


def test_whole_files_are_taken(server: LiveServer) -> None:
    for name, (kind, mime, data) in samples_once().items():
        body = {"model": MODEL, "messages": said(part(kind, data_url(data, mime))), "max_tokens": 1}
        assert server.chat(body).status_code == 200, name


def test_damaged_files(server: LiveServer, record_property: Any) -> None:
    limits = httpx.Limits(max_connections=CLIENTS)
    with httpx.Client(base_url=server.url, timeout=60, limits=limits) as http:
        replies = run(http, range(WARM_UP))
        memory, files = resources(server)
        replies += run(http, range(WARM_UP, WARM_UP + CASES))
        time.sleep(0.5)
        memory_after, files_after = resources(server)
    statuses = collections.Counter(reply.status for reply in replies)
    slowest = max(replies, key=lambda reply: reply.seconds)
    summary = {
        "statuses": dict(statuses),
        "slowest": (slowest.name, round(slowest.seconds, 2)),
        "memory_growth_mb": round((memory_after - memory) / 1e6, 1),
        "more_files": files_after - files,
    }
    print(summary)
    record_property("summary", summary)
    server.assert_answers()
    assert statuses.keys() <= {200, 400, 422}, [r for r in replies if r.status >= 500]
    assert statuses[400] > CASES / 4, "the mutations damage too little"
    assert statuses[200] > CASES / 20, "the mutations damage too much"
    for reply in replies:
        if reply.status != 200:
            assert reply.error["param"] == "messages", reply
            assert not any(text in reply.error["message"] for text in REPRS), reply
    assert slowest.seconds < SLOWEST_S, slowest
    assert memory_after - memory < MOST_GROWTH_BYTES, summary
    assert files_after - files <= CLIENTS, summary
