# SPDX-License-Identifier: Apache-2.0
"""A server whose answers and delays are known."""

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RATE = 24_000
HEADER_AFTER_S = 0.1
SOUND_AFTER_S = 0.15
PIECE = b"\1\0" * (RATE // 4)
"""A quarter of a second."""
PIECES = 2
WAV = (
    b"RIFF\xff\xff\xff\xffWAVEfmt "
    + struct.pack("<IHHIIHH", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    + b"data\xff\xff\xff\xff"
)
TEXT = ("Hello", " you", ".")


class FakeServer(ThreadingHTTPServer):
    """Speaks after `HEADER_AFTER_S` and `SOUND_AFTER_S`; what it was asked is kept.

    Attributes:
        bodies: Of all requests.
        most: Requests at a time.
    """

    daemon_threads = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.now = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            self.answer(body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # a client that gave up
        finally:
            with self.server.lock:
                self.server.now -= 1

    def answer(self, body: dict[str, Any]) -> None:
        status = 500 if "fail" in body else 200
        self.send_response(status, "Broken" if status == 500 else None)
        self.end_headers()
        if status == 500:
            self.wfile.write(b"the machine is on fire")
        elif self.path.endswith("/speech"):
            self.speak()
        else:
            self.chat()

    def speak(self) -> None:
        time.sleep(HEADER_AFTER_S)
        self.wfile.write(WAV)
        time.sleep(SOUND_AFTER_S)
        for _ in range(PIECES):
            self.wfile.write(PIECE)

    def chat(self) -> None:
        for text in TEXT:
            self.event(choices=[{"delta": {"content": text}}])
        metadata = {"sample_rate_hz": RATE, "frame_count": RATE // 2}
        delta = {"audio": {"data": "AAAA"}}
        time.sleep(SOUND_AFTER_S)
        self.event(choices=[{"delta": delta, "audio_metadata": metadata}])
        self.event(choices=[], usage={"completion_tokens": 3, "prompt_tokens": 7})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, **fields: Any) -> None:
        self.wfile.write(f"data: {json.dumps(fields)}\n\n".encode())

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """It, in threads that end with the block."""
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
