# SPDX-License-Identifier: Apache-2.0
"""A speech server around an engine that makes tones: the contract of `AsyncOmni`, without a model.

Every character is heard for `CHARACTER_S`, at a pitch of its own, so that what is spoken, and in
which order, can be read off the sound.
"""

import asyncio
import io
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import soundfile
import uvicorn

from vllm_omni.config.limits import ServingLimits
from vllm_omni.entrypoints.admission import Admission
from vllm_omni.entrypoints.cli.parser import OmniArgumentParser
from vllm_omni.entrypoints.cli.serve import OmniServeSubcommand
from vllm_omni.entrypoints.openai.app import build_speech_app
from vllm_omni.entrypoints.speech_checks import checked
from vllm_omni.errors import OmniClientError, OmniGenerateError
from vllm_omni.outputs import AudioOutput, OmniRequestOutput, StageMetrics
from vllm_omni.speech.family import SpeechOffer
from vllm_omni.speech.request import SpeechRequest

MODEL = "tones"
RATE = 24_000
CHARACTER_S = 0.02


def no_rage(request: SpeechRequest) -> None:
    """What this family knows of its own option."""
    if request.extra.get("emotion") == "rage":
        raise OmniClientError("extra.emotion: is not for this voice", param="extra.emotion")


OFFER = SpeechOffer(
    sample_rate=RATE,
    voices=("Vivian", "Ryan"),
    languages=("English", "Chinese"),
    tasks=("Base", "CustomVoice", "VoiceDesign"),
    instructions=True,
    max_references=2,
    needs_transcript=True,
    extra=frozenset({"emotion"}),
    check=no_rage,
)
FAILS_EARLY, FAILS_LATE, IS_REFUSED, NEVER_ENDS = "EARLY", "LATE", "REFUSED", "NEVER"
"""Words in a text, and what happens when it is spoken."""


@dataclass
class ToneEngine:
    """Speaks in tones.

    Attributes:
        asked: Every request, its sampling parameters, and its id.
        open: Ids of requests that run.
    """

    speech: SpeechOffer = OFFER
    asked: list[tuple[SpeechRequest, Any, str]] = field(default_factory=list)
    open: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.admission = Admission(64, ServingLimits())
        self.pipeline = SimpleNamespace(
            entry=SimpleNamespace(name="talker"),
            stages=(SimpleNamespace(name="talker"), SimpleNamespace(name="codec")),
        )

    async def generate(
        self,
        prompt: SpeechRequest,
        *,
        sampling_params_list: Any = None,
        output_modalities: Any,
        request_id: str,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """As `AsyncOmni.generate`."""
        assert output_modalities == ["audio"]
        prompt = checked(prompt, self.speech)
        self.asked.append((prompt, sampling_params_list, request_id))
        self.open.add(request_id)
        try:
            async with self.admission.working(None):
                async for output in self._outputs(prompt, request_id):
                    yield output
        finally:
            self.open.remove(request_id)

    async def _outputs(
        self, prompt: SpeechRequest, request_id: str
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        if IS_REFUSED in prompt.text:
            raise OmniClientError("`task` does not go with this voice", param="task")
        if FAILS_EARLY in prompt.text:
            raise OmniGenerateError("the codec broke")
        characters = list(prompt.text)
        for number, character in enumerate(characters):
            await asyncio.sleep(0)
            yield self._output(request_id, tone(character), number + 1)
            if FAILS_LATE in prompt.text and number == 2:
                raise OmniGenerateError("the codec broke")
            while NEVER_ENDS in prompt.text and number == 2:
                await asyncio.sleep(0.01)
                yield self._output(request_id, tone(character), number + 1)
        yield self._output(request_id, None, len(characters), finished=True)

    def _output(
        self, request_id: str, samples: np.ndarray | None, tokens: int, finished: bool = False
    ) -> OmniRequestOutput:
        metrics = (
            (StageMetrics("talker", 0, 0.0, tokens=tokens, prompt_tokens=5),) if finished else ()
        )
        return OmniRequestOutput(
            request_id,
            final_output_type="audio",
            finished=finished,
            audio=None if samples is None else AudioOutput(samples, RATE),
            stage_metrics=metrics,
        )


def tone(character: str) -> np.ndarray:
    """What a character sounds like."""
    hertz = 200 + 20 * (ord(character) % 64)
    count = int(CHARACTER_S * RATE)
    return (np.sin(2 * np.pi * hertz * np.arange(count) / RATE) / 2).astype(np.float32)


def spoken(text: str) -> np.ndarray:
    """What a text sounds like."""
    return np.concatenate([tone(character) for character in text])


def recording(seconds: float, rate: int = RATE, channels: int = 1, format: str = "WAV") -> bytes:
    """A file with somebody's voice in it."""
    wave = np.sin(2 * np.pi * 300 * np.arange(int(seconds * rate)) / rate).astype(np.float32) / 2
    file = io.BytesIO()
    soundfile.write(file, np.repeat(wave[:, None], channels, axis=1), rate, format=format)
    return file.getvalue()


class SpeechServer:
    """A running server."""

    def __init__(self, engine: ToneEngine, app: Any) -> None:
        self.engine = engine
        config = uvicorn.Config(app, port=0, log_level="warning", ws_max_size=1 << 23)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def address(self) -> str:
        """Host and port."""
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return f"http://{self.address}"

    def openai(self) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(
            base_url=f"http://{self.address}/v1", api_key="none", max_retries=0, timeout=30
        )

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """A raw request."""
        return httpx.request(method, f"http://{self.address}{path}", timeout=30, **kwargs)

    def speak(self, text: str = "Hello.", **fields: Any) -> httpx.Response:
        """Have a text spoken."""
        return self.request("POST", "/v1/audio/speech", json={"input": text, **fields})

    def assert_blames(self, reply: httpx.Response, param: str | None, status: int = 400) -> str:
        """An error of OpenAI's shape that names the field; its message."""
        assert reply.status_code == status, reply.text
        error = reply.json()["error"]
        assert error["param"] == param, error
        return str(error["message"])

    def wait_idle(self) -> None:
        """Wait until nothing is spoken."""
        deadline = time.monotonic() + 20
        while self.engine.open:
            assert time.monotonic() < deadline, f"never ended: {self.engine.open}"
            time.sleep(0.01)


@contextmanager
def speech_server(voices: Path, *flags: str, offer: SpeechOffer = OFFER) -> Iterator[SpeechServer]:
    """A server, stopped afterwards."""
    parser = OmniArgumentParser()
    OmniServeSubcommand().subparser_init(parser.add_subparsers())
    command = ["serve", MODEL, "--omni", "--served-model-name", MODEL]
    args = parser.parse_args([*command, "--custom-voice-dir", str(voices), *flags])
    args.model = MODEL
    engine = ToneEngine(offer)
    server = SpeechServer(engine, build_speech_app(engine, offer, args))
    server.start()
    try:
        yield server
    finally:
        server.stop()
