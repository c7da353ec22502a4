# SPDX-License-Identifier: Apache-2.0
"""The documentation site is built without a warning, and asks no other host for anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ROOT = Path(__file__).parents[2]
TASKS = (
    "image_to_image",
    "image_to_video",
    "speech_to_video",
    "text_to_audio",
    "text_to_image",
    "text_to_speech",
    "text_to_video",
    "x_to_text",
    "x_to_video_audio",
)
"""Row B-51: pages of examples are about tasks that models share."""
NO_MODEL_YET = {"speech_to_video"}
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//([^"'/ >]+)""")
LINKED = re.compile(
    r"""<link[^>]*rel=["']?(?:stylesheet|preload|icon|preconnect)[^>]*href=["']?"""
    r"""(?:https?:)?//([^"'/ >]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a link that leads nowhere, or a page that no menu has, fails here (`strict`)."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(TASKS)
    hosts = {
        (page.name, host)
        for page in pages
        for pattern in (LOADED, LINKED)
        for host in pattern.findall(page.read_text())
    }
    assert not hosts
    drawn = [page.name for page in pages if 'class="mermaid"' in page.read_text()]
    assert not drawn, "the theme loads what draws these from another host: commit an SVG"
    sheets = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert not re.findall(r"url\(\s*[\"']?(?:https?:)?//", sheets)


def test_a_page_for_each_task_that_models_share_and_no_other(site: Path) -> None:
    pages = {page.stem for page in (site / "tasks").glob("*.html")} - {"index"}
    assert pages == set(TASKS)
    for slug in TASKS:
        text = (site / "tasks" / f"{slug}.html").read_text()
        for category in ("online_serving", "offline_inference"):
            files = [path.suffix for path in (ROOT / "examples" / category).glob(f"{slug}.*")]
            assert bool(files) != (slug in NO_MODEL_YET)
            for suffix in files:
                assert f"examples/{category}/{slug}{suffix}" in text


def test_tasks_are_in_the_order_of_their_names(site: Path) -> None:
    menu = (site / "tasks" / "index.html").read_text()
    places = [menu.index(f'href="{slug}.html"') for slug in TASKS]
    assert places == sorted(places)


def test_the_reference_of_python_has_what_is_exported(site: Path) -> None:
    import vllm_omni

    text = (site / "reference" / "python.html").read_text()
    names = [name for name in vllm_omni.__all__ if not name.startswith("__")]
    assert [name for name in names if f'.{name}"' not in text] == []
