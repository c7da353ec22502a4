# SPDX-License-Identifier: Apache-2.0
"""Which page is made by what."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.docs import cli, deploy, http, models

DOCS = Path(__file__).parents[2] / "docs"

PAGES: Mapping[Path, Callable[[], str]] = {
    DOCS / "configuration.md": deploy.render,
    DOCS / "models" / "supported_models.md": models.render,
    DOCS / "reference" / "cli.md": cli.render,
    DOCS / "reference" / "http.md": http.render,
}


def page(path: Path) -> str:
    """The text of a page, as it must be."""
    maker = PAGES[path]
    return f"<!-- Written by python -m tools.docs. Do not edit. -->\n\n{maker().rstrip()}\n"
