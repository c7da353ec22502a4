# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub on this machine: what `snapshot_download` asks of the real one, no more."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

COMMIT = "c0ffee" * 6 + "c0ff"

Fault = Callable[[str], tuple[int, Mapping[str, str]] | None]
"""Given a path, the status and headers to fail it with; None to answer."""


class FakeHub:
    """Repositories and what was asked for.

    Attributes:
        repos: By name, the content of each file.
        fault: Fails requests.
        requests: `GET /path` and `HEAD /path`, in order.
        slow: Downloads of the file of that name wait until `go` is set.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repos = repos
        self.fault: Fault = lambda path: None
        self.requests: list[str] = []
        self.slow = ""
        self.go = threading.Event()
        self.url = ""

    @property
    def downloads(self) -> list[str]:
        """Names of the files that were downloaded, sorted."""
        return sorted(
            request.split(f"/resolve/{COMMIT}/")[1]
            for request in self.requests
            if request.startswith("GET") and "/resolve/" in request
        )

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        """Serve."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.go.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        path = http.path.split("?")[0]
        self.requests.append(f"{http.command} {path}")
        if (failed := self.fault(path)) is not None:
            return _send(http, *failed, b"")
        body = self._body(path)
        if body is None:
            code = "EntryNotFound" if "/resolve/" in path else "RepoNotFound"
            return _send(http, HTTPStatus.NOT_FOUND, {"X-Error-Code": code}, b"")
        if http.command == "GET" and path.split("/")[-1] == self.slow:
            self.go.wait()
        etag = _digest(path.removeprefix("/").encode(), body)
        return _send(http, HTTPStatus.OK, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def _body(self, path: str) -> bytes | None:
        for repo, files in self.repos.items():
            if path in (f"/api/models/{repo}/revision/main", f"/api/models/{repo}"):
                siblings = [{"rfilename": name} for name in files]
                return json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
            if path in (f"/api/models/{repo}/tree/{COMMIT}", f"/api/models/{repo}/tree/main"):
                return json.dumps([_entry(name, body) for name, body in files.items()]).encode()
            for revision in (COMMIT, "main"):
                if path.startswith(start := f"/{repo}/resolve/{revision}/"):
                    return files.get(path.removeprefix(start))
        return None


def use(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the hub of this process, which reads the environment only once."""
    constants = huggingface_hub.constants
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder, for `FakeHub.repos`."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def _entry(name: str, body: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(body), "oid": _digest(body)}


def _digest(*parts: bytes) -> str:
    return hashlib.sha1(b"\0".join(parts), usedforsecurity=False).hexdigest()


def _send(
    http: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str], body: bytes
) -> None:
    http.send_response(status)
    for name, value in headers.items():
        http.send_header(name, value)
    http.send_header("Content-Length", str(len(body)))
    http.end_headers()
    if http.command == "GET":
        http.wfile.write(body)
