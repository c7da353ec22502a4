# SPDX-License-Identifier: Apache-2.0
"""The playground over HTTP: its files, what browsers are told to keep to, and the API key.

`test_playground_browser.py` uses the page.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import regex as re

from tests.entrypoints.speech import MODEL, RATE, SpeechServer, speech_server
from vllm_omni.entrypoints.playground import assets

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

STATIC = Path(assets.__file__).with_name("static")
FILES = sorted(path.name for path in STATIC.iterdir() if path.name != assets.INDEX)
KEY = {"Authorization": "Bearer secret"}
NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("playground")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SpeechServer]:
    with speech_server(folder / "open") as it:
        yield it


@pytest.fixture(scope="module")
def keyed(folder: Path) -> Iterator[SpeechServer]:
    with speech_server(folder / "keyed", "--api-key", "secret") as it:
        yield it


def test_the_page_and_its_files(server: SpeechServer) -> None:
    page = server.request("GET", "/playground")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name in re.findall(r'(?:href|src)="playground/([^"]+)"', page.text):
        assert name in FILES
    for name in FILES:
        file = server.request("GET", f"/playground/{name}")
        assert file.content == (STATIC / name).read_bytes()
        if name.endswith(".js"):
            assert file.headers["content-type"].startswith("text/javascript")
    slash = server.request("GET", "/playground/")
    assert (slash.status_code, slash.headers["location"]) == (307, "../playground")


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "index.html", "..%2froutes.py", "../assets.py", "%2e%2e/offer.py"],
)
def test_nothing_else_is_sent(server: SpeechServer, name: str) -> None:
    assert server.request("GET", f"/playground/{name}").status_code == 404


def test_browsers_are_told_to_run_and_ask_nothing_else(server: SpeechServer) -> None:
    for path in ("/playground", "/playground/app.js"):
        headers = server.request("GET", path).headers
        rules = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert {rules[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
        assert rules["frame-ancestors"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", [assets.INDEX, *FILES])
def test_no_file_names_another_host_or_has_what_the_rules_forbid(name: str) -> None:
    text = (STATIC / name).read_text().replace(NAMESPACE, "")
    assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.", text)
    assert not re.search(r"innerHTML|\beval\(|new Function|document\.write", text)
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=", text)


def test_the_offer(server: SpeechServer) -> None:
    offer = server.request("GET", "/playground/offer").json()
    assert (offer["models"], offer["tasks"], offer["stages"]) == (
        [MODEL],
        ["speech"],
        ["talker", "codec"],
    )
    assert offer["speech"] == {
        "sample_rate": RATE,
        "languages": ["English", "Chinese"],
        "tasks": ["Base", "CustomVoice", "VoiceDesign"],
        "instructions": True,
        "max_references": 2,
        "needs_reference": False,
        "needs_transcript": True,
        "formats": ["wav", "mp3", "flac", "opus", "aac", "pcm"],
    }
    assert [offer[task] for task in ("chat", "images", "videos", "sounds")] == [None] * 4
    assert "/playground/offer" in server.request("GET", "/openapi.json").json()["paths"]


def test_the_page_comes_without_a_key_and_what_the_model_offers_does_not(
    keyed: SpeechServer, server: SpeechServer
) -> None:
    assert 'data-key="needed"' in keyed.request("GET", "/playground").text
    assert 'data-key="none"' in server.request("GET", "/playground").text
    for path in ("/playground/", *(f"/playground/{name}" for name in FILES)):
        assert keyed.request("GET", path).status_code in (200, 307), path
    for path in ("/playground/offer", "/playground/index.html", "/playground/offer/", "/v1/models"):
        assert keyed.request("GET", path).status_code == 401, path
    assert keyed.request("GET", "/playground/offer", headers=KEY).json()["tasks"] == ["speech"]


def test_it_can_be_left_out(folder: Path) -> None:
    with speech_server(folder / "bare", "--disable-playground", "--api-key", "secret") as bare:
        for path in ("/playground", "/playground/app.js", "/playground/offer"):
            assert bare.request("GET", path).status_code == 401
            assert bare.request("GET", path, headers=KEY).status_code == 404
