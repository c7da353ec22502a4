# SPDX-License-Identifier: Apache-2.0
"""Which file is made by what."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.docs import cli, deploy, http, models, modules

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTICE = "Written by python -m tools.docs. Do not edit."

PAGES: Mapping[Path, Callable[[], str]] = {
    ROOT / ".github" / "CODEOWNERS": modules.render_codeowners,
    DOCS / "configuration.md": deploy.render,
    DOCS / "design" / "module" / "index.md": modules.render_index,
    DOCS / "models" / "supported_models.md": models.render,
    DOCS / "reference" / "cli.md": cli.render,
    DOCS / "reference" / "http.md": http.render,
}


def page(path: Path) -> str:
    """The text of a file, as it must be."""
    notice = f"<!-- {NOTICE} -->" if path.suffix == ".md" else f"# {NOTICE}"
    return f"{notice}\n\n{PAGES[path]().rstrip()}\n"
