# SPDX-License-Identifier: Apache-2.0
"""The playground's page in a browser: the API key, voices, errors, keyboard, themes, widths.

Around an engine that makes tones, so that what is heard is known. Real models' tasks are in
`test_playground_chat.py` and in the tests of their routes.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.select import Select

from tests.entrypoints.browser import PHONE, Page
from tests.entrypoints.speech import (
    FAILS_LATE,
    IS_REFUSED,
    NEVER_ENDS,
    RATE,
    SpeechServer,
    ToneEngine,
    recording,
    speech_server,
    spoken,
)
from vllm_omni.entrypoints.playground.assets import read_assets
from vllm_omni.entrypoints.playground.offer import ChatOffer, ComposingOffer, Offer
from vllm_omni.entrypoints.playground.routes import playground_router
from vllm_omni.media.audio_encode import to_int16
from vllm_omni.media.decode import decode_audio

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

KEY = "the-key"
WAV_HEADER = 44
SPEAK, UPLOAD = ".speak", ".upload"
SAVED = "#panel-speech a[download]"
VOICE_OPTIONS = f"{SPEAK} [name=voice] option"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeechServer]:
    with speech_server(tmp_path_factory.mktemp("playground") / "voices") as it:
        yield it


@pytest.fixture
def speech(server: SpeechServer, page: Page) -> Page:
    page.open(server.url)
    page.ready()
    page.wait(lambda: len(page.all(VOICE_OPTIONS)) > 2, "the voices")
    return page


def said(page: Page, text: str, **fields: Any) -> bytes:
    page.fill(SPEAK, input=text, **fields)
    page.send(SPEAK)
    return page.save(SAVED)


# The API key.


def test_the_key_is_asked_for_and_stays_in_the_tab(page: Page, tmp_path: Path) -> None:
    with speech_server(tmp_path / "voices", "--api-key", KEY) as keyed:
        page.open(keyed.url)
        page.expected += ["401 (Unauthorized)"]  # what a browser says of a wrong key
        page.wait(lambda: page.shown("#key-dialog"), "the question")
        page.shot("key")
        page.fill("#key-dialog", key="wrong")
        page.press("#key-dialog button[type=submit]")
        page.wait(page.errors, "the refusal")
        page.use_key(KEY)
        assert decode_audio(said(page, "Hi."))[1] == RATE
        stored = "return [Object.values({...sessionStorage}), Object.values({...localStorage})]"
        assert page.driver.execute_script(stored) == [[KEY], []]
        assert page.driver.get_cookies() == []
        for code in ("#curl", "#python"):
            assert KEY not in page.text(code)
            assert "API_KEY" in page.text(code)
        page.driver.refresh()
        page.ready()
        page.press("#change-key")
        page.press("#key-dialog .forget")
        page.wait(lambda: page.shown("#key-dialog") and not page.shown("[role=tab]"), "forgotten")
        page.use_key(KEY)


# Speaking.


def test_a_text_is_spoken(speech: Page, server: SpeechServer) -> None:
    text = "Hello there."
    file = said(speech, text, voice="Ryan", seed=7)
    assert decode_audio(file)[1] == RATE
    assert file[WAV_HEADER:] == to_int16(spoken(text)).tobytes()
    asked, _, _ = server.engine.asked[-1]
    assert (asked.voice, asked.text) == ("Ryan", text)
    assert [row.text for row in speech.all("#last .stages tbody th")] == ["talker"]
    assert "First sound after" in speech.text("#last .seen")


def test_a_compressed_file(speech: Page) -> None:
    samples, _ = decode_audio(said(speech, "Hello there.", response_format="mp3"))
    assert len(samples) >= len(spoken("Hello there."))


@pytest.mark.parametrize(("word", "console"), [(IS_REFUSED, ["400 (Bad"]), (FAILS_LATE, [])])
def test_errors_are_told(speech: Page, word: str, console: list[str]) -> None:
    speech.expected += console
    speech.fill(SPEAK, input=f"{word} is told")
    speech.press(f"{SPEAK} button[type=submit]")
    speech.wait(speech.errors, "the error")
    assert speech.find(f"{SPEAK} .error").get_attribute("role") == "alert"
    assert decode_audio(said(speech, "And on it goes."))


def test_tags_in_a_text_are_text(speech: Page) -> None:
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    said(speech, text)
    assert text in speech.text("#panel-speech figcaption")
    assert not speech.all("#panel-speech figcaption img, #panel-speech figcaption b")
    assert text in json.loads(speech.text("#curl").split("'JSON'\n")[1][: -len("JSON")])["input"]


def test_behind_a_proxys_folder(page: Page, tmp_path: Path) -> None:
    flags = ("--root-path", "/behind", "--api-key", KEY)
    with speech_server(tmp_path / "voices", *flags) as behind:
        page.open(f"{behind.url}/behind")
        page.use_key(KEY)
        assert said(page, "Hello.")[WAV_HEADER:] == to_int16(spoken("Hello.")).tobytes()
        assert f"{behind.url}/behind/v1/audio/speech" in page.text("#curl")


def test_stopping_frees_the_server(speech: Page, server: SpeechServer) -> None:
    speech.fill(SPEAK, input=f"{NEVER_ENDS} ends")
    speech.press(f"{SPEAK} button[type=submit]")
    speech.wait(lambda: "First sound" in speech.text("#last .seen"), "the first sound")
    speech.press(f"{SPEAK} .stop")
    server.wait_idle()
    speech.wait(lambda: speech.text(f"{SPEAK} .state") == "Stopped.", "the end")


def test_a_server_that_is_gone(page: Page, tmp_path: Path) -> None:
    with speech_server(tmp_path / "voices") as gone:
        page.open(gone.url)
        page.ready()
    page.expected += ["ERR_CONNECTION_REFUSED"]
    page.fill(SPEAK, input="Anybody there?")
    page.press(f"{SPEAK} button[type=submit]")
    page.wait(page.errors, "the error")
    assert page.errors() == ["The server cannot be reached."]


# Voices.


def test_a_voice_is_kept_used_and_forgotten(
    speech: Page, server: SpeechServer, tmp_path: Path
) -> None:
    (tmp_path / "ann.wav").write_bytes(recording(2.0))
    speech.fill(UPLOAD, name="ann", consent="my own", ref_text="What I say.")
    speech.find(f"{UPLOAD} input[type=file]").send_keys(str(tmp_path / "ann.wav"))
    speech.press(f"{UPLOAD} button[type=submit]")
    speech.wait_for(".uploaded li")
    speech.wait(lambda: speech.find(f"{SPEAK} [name=voice]").get_property("value") == "ann", "ann")
    said(speech, "As Ann.")
    (reference,) = server.engine.asked[-1][0].references
    assert len(reference.samples) == 2 * RATE
    speech.shot("speech")
    speech.press(".uploaded button")
    speech.wait(lambda: not speech.all(".uploaded li"), "it to be forgotten")
    assert "ann" not in [option.text for option in speech.all(VOICE_OPTIONS)]


def test_a_voice_from_the_microphone(speech: Page, server: SpeechServer) -> None:
    speech.press(f"{UPLOAD} .attach button")
    speech.wait_for("button[aria-pressed=true]")
    time.sleep(1.3)  # a recording of a voice is at least a second long
    speech.press(f"{UPLOAD} .attach button")
    speech.wait_for(f"{UPLOAD} .attach li")
    speech.fill(UPLOAD, name="me", consent="my own", ref_text="Beep.")
    speech.press(f"{UPLOAD} button[type=submit]")
    speech.wait_for(".uploaded li")
    (voice,) = server.request("GET", "/v1/audio/voices").json()["uploaded_voices"]
    assert (voice["name"], voice["seconds"] > 1) == ("me", True)
    speech.press(".uploaded button")
    speech.wait(lambda: not speech.all(".uploaded li"), "it to be forgotten")


# The page itself.


def test_everything_is_reached_by_keyboard(speech: Page) -> None:
    reached = set()
    script = "const e = document.activeElement; return e.id || e.name || e.textContent.trim()"
    first = None
    for _ in range(60):
        ActionChains(speech.driver).send_keys(Keys.TAB).perform()
        name = speech.driver.execute_script(script)
        first = first or name
        reached.add(name)
    assert first == "Skip to the tasks"
    assert reached >= {"theme", "tab-speech", "input", "voice", "Speak", "consent", "audio_sample"}
    assert reached >= {"Record", "Keep this voice"}
    text = speech.find(f"{SPEAK} [name=input]")
    text.send_keys("By hand.", Keys.CONTROL, Keys.ENTER)
    speech.answered(SPEAK)


def test_tabs_move_by_arrow_keys(page: Page) -> None:
    app = FastAPI()
    chat = ChatOffer(modalities=["text"], inputs={}, voices=[], audio_formats=[])
    tasks = {"chat": chat, "sounds": ComposingOffer(formats=["wav"])}
    offer = Offer(models=["two"], stages=["one"], tasks=[*tasks], **tasks)
    app.include_router(playground_router(read_assets(keyed=False), lambda: offer))
    server = SpeechServer(ToneEngine(), app)
    server.start()
    try:
        page.open(server.url)
        page.ready()
        assert [tab.text for tab in page.all("[role=tab]")] == ["Chat", "Sounds"]
        assert not page.shown("#panel-chat .attach")  # it takes nothing but text
        for key, shown in (
            (Keys.ARROW_RIGHT, "sounds"),
            (Keys.ARROW_RIGHT, "chat"),
            (Keys.END, "sounds"),
        ):
            page.find("[role=tab][tabindex='0']").send_keys(key)
            assert page.driver.switch_to.active_element.get_attribute("id") == f"tab-{shown}"
            assert page.shown(f"#panel-{shown}")
            assert sum(page.shown(f"#panel-{task}") for task in tasks) == 1
    finally:
        server.stop()


def test_light_and_dark(speech: Page) -> None:
    def background() -> str:
        return str(speech.find("body").value_of_css_property("background-color"))

    light = background()
    speech.prefer("dark")
    dark = background()
    assert light != dark
    Select(speech.find("#theme")).select_by_value("light")
    assert background() == light
    speech.driver.refresh()
    speech.ready()
    assert background() == light
    speech.prefer("light")
    Select(speech.find("#theme")).select_by_value("dark")
    assert background() == dark


def test_a_phone_shows_all_of_it(speech: Page) -> None:
    speech.size(*PHONE)
    said(speech, "A sentence.")
    width = speech.driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= PHONE[0]
    for field in speech.all(f"{SPEAK} input, {SPEAK} select, {SPEAK} button"):
        if field.is_displayed():
            assert field.rect["x"] + field.rect["width"] <= PHONE[0]
