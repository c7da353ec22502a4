# SPDX-License-Identifier: Apache-2.0
"""A browser without a screen, and what the playground's tests ask of its page."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from axe_core_python.selenium import Axe
from selenium.webdriver import Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
SHOTS = Path(__file__).parents[2] / "build" / "playground"
"""Where screenshots are kept, to be looked at."""
WAIT_S = 60
DESKTOP, PHONE = (1280, 1000), (390, 844)
LOOKS = (("desk", DESKTOP, "light"), ("dark", DESKTOP, "dark"), ("phone", PHONE, "dark"))
SERIOUS = ("serious", "critical")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),  # a microphone
    "--mute-audio",
)

WATCH = """
const [selector, data] = arguments;
window.watched = [];
new MutationObserver(() => {
  const element = document.querySelector(selector);
  if (!element) return;
  const value = data ? element.dataset[data] ?? null : element.textContent;
  if (!watched.length || watched.at(-1) !== value) watched.push(value);
}).observe(document.body, { childList: true, subtree: true, attributes: true });
"""
SIZE_OF = """
const [element] = arguments;
return [element.naturalWidth ?? element.videoWidth, element.naturalHeight ?? element.videoHeight];
"""
PAINTED = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"

T = TypeVar("T")


class Page:
    """The playground of one server, in one tab.

    Attributes:
        origin: The server's URL.
        expected: Parts of what the console may tell of in this test.
    """

    def __init__(self, driver: Chrome, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads
        self.origin = ""
        self.expected: list[str] = []

    def open(self, url: str) -> None:
        """Load the page of a server, as a user would who has never been there."""
        self.origin = url
        self.driver.get(f"{url}/playground")
        self.driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.problems()  # of pages before
        self.driver.get(f"{url}/playground")

    def find(self, selector: str) -> WebElement:
        """The first element that fits."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """Every element that fits."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Of the first element that fits, whether it can be seen or not."""
        return str(self.find(selector).get_property("textContent"))

    def shown(self, selector: str) -> bool:
        """Whether such an element can be seen."""
        return any(each.is_displayed() for each in self.all(selector))

    def wait(self, condition: Callable[[], T], what: str) -> T:
        """Wait until something is true."""
        deadline = time.monotonic() + WAIT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what}; errors: {self.errors()}"
            time.sleep(0.05)
        return value

    def wait_for(self, selector: str) -> WebElement:
        """Wait until there is such an element."""
        return self.wait(lambda: self.all(selector), selector)[0]

    def ready(self) -> None:
        """Wait until the tabs are there."""
        self.wait(lambda: self.shown("[role=tab]"), "the tabs")

    def fill(self, form: str, **fields: Any) -> None:
        """Fill a form's fields in."""
        for name, value in fields.items():
            field = self.find(f"{form} [name={name}]")
            details = self.driver.execute_script("return arguments[0].closest('details')", field)
            if details is not None:
                self.driver.execute_script("arguments[0].open = true", details)
            if field.tag_name == "select":
                Select(field).select_by_value(str(value))
            else:
                field.clear()
                field.send_keys(str(value))

    def use_key(self, key: str) -> None:
        """Give the API key that the page asks for."""
        self.wait(lambda: self.shown("#key-dialog"), "the question")
        self.fill("#key-dialog", key=key)
        self.press("#key-dialog button[type=submit]")
        self.ready()

    def watch(self, selector: str, data: str | None) -> None:
        """Note, whenever the page changes, what the first such element says: its text, or one of
        its `data-` attributes."""
        self.driver.execute_script(WATCH, selector, data)

    def watched(self) -> list[Any]:
        """What was noted, without what only came again."""
        return list(self.driver.execute_script("return window.watched"))

    def size_of(self, selector: str) -> tuple[int, int]:
        """Width and height of a picture or a video, once it has some."""
        width, height = self.driver.execute_script(SIZE_OF, self.find(selector))
        return width, height

    def save(self, selector: str) -> bytes:
        """Follow a link that saves a file; what is in it."""
        link = self.find(selector)
        file = self.downloads / str(link.get_attribute("download"))
        file.unlink(missing_ok=True)
        link.click()
        # Chromium reserves the name with an empty file, which the whole one then replaces.
        self.wait(lambda: file.exists() and file.stat().st_size, file.name)
        return file.read_bytes()

    def press(self, selector: str) -> None:
        """Press a button with the keyboard."""
        self.find(selector).send_keys(Keys.ENTER)

    def send(self, form: str) -> None:
        """Send a form and wait until it is answered."""
        self.press(f"{form} button[type=submit]")
        self.answered(form)

    def answered(self, form: str) -> None:
        """Wait until a form's request is over; it must have gone well."""
        self.wait(lambda: self.text(f"{form} .state") == "Done." or self.errors(), f"{form} to end")
        assert not self.errors()

    def errors(self) -> list[str]:
        """What the page says went wrong."""
        return [e.text for e in self.all(".error") if e.text]

    def problems(self) -> tuple[list[str], list[str]]:
        """The console's errors, and requests to other hosts, since this was last asked."""
        console = [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        asked = [
            each["params"]["request"]["url"]
            for each in messages
            if each["method"] == "Network.requestWillBeSent"
        ]
        return console, [url for url in asked if not self._is_own(url)]

    def _is_own(self, url: str) -> bool:
        return url.startswith(("blob:", "data:")) or urlsplit(url).netloc == self.host

    @property
    def host(self) -> str:
        """The server's host and port."""
        return urlsplit(self.origin).netloc

    def assert_clean(self) -> None:
        """Nothing went wrong unseen: no error in the console, no request to anybody else, and
        nothing on the page that keeps people out."""
        console, foreign = self.problems()
        assert [line for line in console if not any(e in line for e in self.expected)] == []
        assert foreign == []
        assert self.faults() == []

    def faults(self) -> list[str]:
        """What axe-core finds that keeps people out."""
        found = Axe().run(self.driver)["violations"]
        return [
            f"{fault['id']}: {[node['target'] for node in fault['nodes']]}"
            for fault in found
            if fault["impact"] in SERIOUS
        ]

    def size(self, width: int, height: int) -> None:
        """What the page has room for, as a phone would have it or a desk."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer(self, scheme: str) -> None:
        """Light or dark, as the system would say."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def shot(self, name: str) -> None:
        """Keep a picture of the whole page: as it is, dark, and as a phone has it."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        for kind, (width, height), scheme in LOOKS:
            self.size(width, height)
            self.prefer(scheme)
            script = "return [innerWidth, document.documentElement.scrollHeight]"
            inner, whole = self.driver.execute_script(script)
            assert inner == width, f"{name}: the page is wider than a {kind}"
            self.size(width, whole)
            self.driver.execute_async_script(PAINTED)
            self.driver.save_screenshot(str(SHOTS / f"{name}-{kind}.png"))
            assert self.faults() == [], f"{name}, {kind}"
        self.size(*DESKTOP)
        self.prefer("light")


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A new browser that nobody has used."""
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, Service(DRIVER))
    try:
        downloads = folder / "downloads"
        allow = {"behavior": "allow", "downloadPath": str(downloads)}
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
        page = Page(driver, downloads)
        page.size(*DESKTOP)
        yield page
    finally:
        driver.quit()
