# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic on a server whose replicas are killed one after the other, and what came of it."""

import base64
import io
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil
import soundfile

from tests.dfx.reliability.harness import Live
from tests.processes import command_line

DEADLINE_S = 60.0
SAMPLE_TOLERANCE = 2e-3
"""Of 16-bit sound: windows are batched with whatever is there, which rounds differently (1e-4), and
the two roundings to 16 bits may fall to either side."""
LOST = ("has ended", "has given no sign of life", "no live replica", "EngineCore encountered")
"""What a request is told that was bound to a dead replica."""


@dataclass(frozen=True)
class Question:
    """A request whose answer is known."""

    words: str
    max_tokens: int
    text: str = ""
    sound: bytes = b""


@dataclass
class Tally:
    """What came of all requests."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, seconds: float) -> None:
        with self.lock:
            self.counts[outcome] += 1
            self.slowest = max(self.slowest, seconds)

    def wrong_answer(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what[:500])

    @property
    def asked(self) -> int:
        return sum(self.counts.values())

    @property
    def lost(self) -> int:
        return self.counts["lost"]


class Chaos:
    """Clients that ask, hang up, read slowly and send rubbish; and somebody who kills.

    Args:
        live: The server; each of its stages has two replicas.
        seed: Of every choice.
    """

    def __init__(self, live: Live, seed: int) -> None:
        self.live = live
        self.tally = Tally()
        self.killed: list[str] = []
        self._random = random.Random(seed)
        self._url = f"{live.server.url}/v1/chat/completions"
        self._questions: list[Question] = []
        self._end = 0.0
        self._actions: list[tuple[int, Callable[[httpx.Client, random.Random], str]]] = [
            (8, self._chat),
            (5, self._speech),
            (2, self._streamed),
            (2, self._hang_up),
            (1, self._read_slowly),
            (3, self._rubbish),
        ]

    def learn(self) -> None:
        """Ask everything once, alone, for the answers to compare with."""
        with httpx.Client(timeout=DEADLINE_S) as client:
            for words, tokens in (("hello", 8), ("a b c " * 20, 16), ("what is that?", 24)):
                question = Question(words, tokens)
                message = self._message(client, question, "text", "audio")
                sound = base64.b64decode(message["audio"]["data"])
                text = self._message(client, question, "text")["content"]
                self._questions.append(Question(words, tokens, text, sound))

    def run(self, seconds: float, clients: int, kill_every: float) -> None:
        """Let it go on for a while."""
        self._end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._client, args=(self._random.random(),))
            for _ in range(clients)
        ]
        for thread in threads:
            thread.start()
        next_kill = time.monotonic() + kill_every / 2
        while next_kill < self._end - kill_every / 2:
            time.sleep(next_kill - time.monotonic())
            self._kill()
            next_kill += kill_every
        for thread in threads:
            thread.join(self._end - time.monotonic() + 2 * DEADLINE_S)
            assert not thread.is_alive(), "a request hangs"

    def _kill(self) -> None:
        victims = [*self.live.workers("EngineCore"), *self.live.workers("OmniDiffusion")]
        victim = self._random.choice(victims)
        parent = victim.parent()
        titled = parent if "EngineCore" in command_line(victim) and parent else victim
        self.killed.append(command_line(titled).split(" ")[0].removeprefix("VLLM::"))
        victim.kill()

    def _client(self, seed: float) -> None:
        choice = random.Random(seed)
        weights, actions = zip(*self._actions, strict=True)
        with httpx.Client(timeout=DEADLINE_S) as client:
            while time.monotonic() < self._end:
                (action,) = choice.choices(actions, weights)
                began = time.monotonic()
                try:
                    outcome = action(client, choice)
                except _Lost as error:
                    outcome = "lost"
                    assert any(part in str(error) for part in LOST), error
                except (AssertionError, httpx.HTTPError) as error:
                    outcome = "wrong"
                    self.tally.wrong_answer(f"{action.__name__}: {error!r}")
                self.tally.add(outcome, time.monotonic() - began)

    # What clients do.

    def _chat(self, client: httpx.Client, choice: random.Random) -> str:
        question = choice.choice(self._questions)
        text = self._message(client, question, "text")["content"]
        assert text == question.text, f"{text!r} instead of {question.text!r}"
        return "chat"

    def _speech(self, client: httpx.Client, choice: random.Random) -> str:
        question = choice.choice(self._questions)
        message = self._message(client, question, "text", "audio")
        assert_same_sound(base64.b64decode(message["audio"]["data"]), question.sound)
        return "speech"

    def _streamed(self, client: httpx.Client, choice: random.Random) -> str:
        question = choice.choice(self._questions)
        text = "".join(self._deltas(client, question, "text"))
        assert text == question.text, f"{text!r} instead of {question.text!r}"
        return "streamed"

    def _hang_up(self, client: httpx.Client, choice: random.Random) -> str:
        question = choice.choice(self._questions)
        for number, _ in enumerate(self._deltas(client, question, "text", "audio")):
            if number >= choice.randrange(6):
                break
        return "hung up"

    def _read_slowly(self, client: httpx.Client, choice: random.Random) -> str:
        question = choice.choice(self._questions)
        text = ""
        for delta in self._deltas(client, question, "text"):
            text += delta
            time.sleep(0.1)
        assert text == question.text
        return "read slowly"

    def _rubbish(self, client: httpx.Client, choice: random.Random) -> str:
        fields: list[dict[str, Any]] = [
            {"messages": []},
            {"max_tokens": -1},
            {"temperature": "hot"},
            {"modalities": ["smell"]},
            {"audio": {"voice": "nobody", "format": "wav"}, "modalities": ["text", "audio"]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 3}]}]},
        ]
        body = self._body(self._questions[0], "text") | choice.choice(fields)
        status = client.post(self._url, json=body).status_code
        assert 400 <= status < 500, status
        return "rubbish"

    # How they do it.

    def _body(self, question: Question, *modalities: str, stream: bool = False) -> dict[str, Any]:
        return {
            "model": self.live.model,
            "messages": [{"role": "user", "content": question.words}],
            "modalities": list(modalities),
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "stream": stream,
            "sampling_params_list": [
                None,
                {"temperature": 0, "max_tokens": 12, "min_tokens": 12},
                None,
            ],
        }

    def _message(
        self, client: httpx.Client, question: Question, *modalities: str
    ) -> dict[str, Any]:
        response = client.post(self._url, json=self._body(question, *modalities))
        if response.status_code >= 500:
            raise _Lost(response.text)
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        assert isinstance(message, dict)
        return message

    def _deltas(self, client: httpx.Client, question: Question, *modalities: str) -> Any:
        body = self._body(question, *modalities, stream=True)
        with client.stream("POST", self._url, json=body) as response:
            if response.status_code >= 500:
                raise _Lost(response.read().decode())
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise _Lost(event["error"]["message"])
                for each in event["choices"]:
                    yield each["delta"].get("content") or ""


class _Lost(Exception):
    """A request failed through no fault of its own."""


def assert_same_sound(encoded: bytes, expected: bytes) -> None:
    """Both hold the same samples, but for rounding."""
    sound, rate = soundfile.read(io.BytesIO(encoded))
    wanted, wanted_rate = soundfile.read(io.BytesIO(expected))
    assert (rate, sound.shape) == (wanted_rate, wanted.shape), f"{sound.shape} {wanted.shape}"
    difference = float(np.abs(sound - wanted).max())
    assert difference <= SAMPLE_TOLERANCE, f"samples differ by {difference}"


@dataclass(frozen=True)
class Held:
    """What the server process holds at one moment."""

    rss: int
    descriptors: int
    segments: int

    @classmethod
    def now(cls, root: psutil.Process) -> "Held":
        names = [n for n in os.listdir("/dev/shm") if n.startswith(f"vllm-omni-{root.pid}-")]
        return cls(root.memory_info().rss, root.num_fds(), len(names))
