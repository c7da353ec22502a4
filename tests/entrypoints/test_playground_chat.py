# SPDX-License-Identifier: Apache-2.0
"""Chatting in the playground with a tiny Qwen3-Omni: media in, text and speech out.

Other models' tasks are in the tests of their routes, where their servers are.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import regex as re

from tests.entrypoints.browser import Page
from tests.entrypoints.conftest import LiveServer
from tests.entrypoints.generation import png
from tests.entrypoints.speech import recording
from vllm_omni.media.decode import decode_audio

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

DOCUMENT = Path(__file__).parents[2] / "docs" / "playground.md"
FORM = "#panel-chat form"
ANSWER = "#panel-chat .log article.assistant"
STAGES = ["thinker", "talker", "code2wav"]


@pytest.fixture
def chat(server: LiveServer, page: Page) -> Page:
    page.open(server.url)
    page.ready()
    page.fill(FORM, max_tokens=6)
    return page


def attach(page: Page, folder: Path) -> None:
    (folder / "a 'cat'.png").write_bytes(png())
    (folder / "noise.wav").write_bytes(recording(0.5))
    for name in ("a 'cat'.png", "noise.wav"):
        page.find(f"{FORM} input[type=file]").send_keys(str(folder / name))
    page.wait(lambda: len(page.all(f"{FORM} .attach li")) == 2, "the files")


def answers(page: Page) -> list[str]:
    return [str(p.get_property("textContent")) for p in page.all(f"{ANSWER} p")]


def test_the_offer_is_as_documented(server: LiveServer) -> None:
    (example,) = re.findall(r"```json\n(.+?)```", DOCUMENT.read_text(), re.DOTALL)
    assert httpx.get(f"{server.url}/playground/offer").json() == json.loads(example)


def test_a_picture_and_the_microphone_in_text_and_speech_out(chat: Page, tmp_path: Path) -> None:
    chat.press(f"{FORM} .attach button")
    chat.wait_for("button[aria-pressed=true]")
    time.sleep(1)
    chat.press(f"{FORM} .attach button")
    chat.wait_for(f"{FORM} .attach audio")
    (tmp_path / "cat.png").write_bytes(png())
    chat.find(f"{FORM} input[type=file]").send_keys(str(tmp_path / "cat.png"))
    chat.wait_for(f"{FORM} .attach img")
    chat.fill(FORM, text="What do you see and hear?")
    chat.find(f"{FORM} [value=audio]").click()
    chat.send(FORM)
    assert answers(chat)[0]
    assert chat.all(f"{ANSWER} audio")
    rows = chat.all("#last .stages tbody th")
    assert [row.text for row in rows] == STAGES
    seen = chat.text("#last .seen")
    assert all(mark in seen for mark in ("First text", "First sound", "All of it"))
    assert not chat.all(f"{FORM} .attach li")  # they are part of the conversation now
    for medium in ("img", "audio"):
        assert chat.all(f"#panel-chat .log .user {medium}")
    chat.shot("chat")


def test_a_conversation_goes_on_until_a_new_one_begins(chat: Page) -> None:
    for turn in ("Hello.", "Go on."):
        chat.fill(FORM, text=turn)
        chat.send(FORM)
    code = chat.text("#python")
    assert [code.index(each) for each in ("Hello.", "assistant", "Go on.")]
    assert len(answers(chat)) == 2
    chat.press(f"{FORM} .clear")
    assert not answers(chat)
    chat.fill(FORM, text="Anew.")
    chat.send(FORM)
    assert "Hello." not in chat.text("#python")


def test_the_code_repeats_the_request(chat: Page, tmp_path: Path) -> None:
    attach(chat, tmp_path)
    chat.fill(FORM, text='A "quoted" $HOME `date` \\ it\'s')
    chat.find(f"{FORM} [value=audio]").click()
    chat.send(FORM)
    (said,) = answers(chat)
    run = [sys.executable, "-c", chat.text("#python")]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip("\n") == said.rstrip("\n")
    samples, _ = decode_audio((tmp_path / "answer.wav").read_bytes())
    assert len(samples)
    shell = ["bash", "-c", chat.text("#curl")]
    reply = subprocess.run(shell, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    message = json.loads(reply.stdout)["choices"][0]["message"]
    assert message["content"] == said


def test_an_answer_can_be_stopped(chat: Page) -> None:
    chat.fill(FORM, text="Talk on.", max_tokens=400)
    chat.press(f"{FORM} button[type=submit]")
    chat.wait(lambda: any(answers(chat)), "the first words")
    chat.press(f"{FORM} .stop")
    chat.wait(lambda: chat.text(f"{FORM} .state") == "Stopped.", "the end")
    assert not chat.errors()
    assert chat.driver.switch_to.active_element.text == "Send"
