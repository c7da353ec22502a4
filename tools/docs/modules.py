# SPDX-License-Identifier: Apache-2.0
"""Who owns what: .github/CODEOWNERS and the table of modules, from docs/design/module."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, StringConstraints

from tools.docs.tables import table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "design" / "module"
INDEX = "index"
EVERYONE = "@vllm-omni/maintainers"
FENCE = "---\n"
INTRO = """\
# Modules

What each part does, does not, and holds. The front matter of these pages says who owns what;
`.github/CODEOWNERS` is written from it. Teams are placeholders until there are some.
"""

Team = Annotated[str, StringConstraints(pattern=r"^@[\w-]+/[\w-]+$")]
RepositoryPath = Annotated[str, StringConstraints(pattern=r"^[\w.][\w./-]*[\w]$")]


class FrontMatter(BaseModel):
    """What stands above the text of a module's document (row B-62).

    Attributes:
        kind: What the document is about.
        status: Whether its public surface may still change.
        owners: Who reviews changes of its code.
        primary_code_paths: Files and folders that are this module's alone.
        primary_code_path_owners: Those below them that others review.
        related_code_paths: Files and folders that a change of it is likely to touch.
        depends_on: Modules that it knows of.
        architecture_state: Whether all that the text says is there.
        document_stewards: Who keeps the text true.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["module"]
    status: Literal["stable", "changing"]
    owners: tuple[Team, ...]
    primary_code_paths: tuple[RepositoryPath, ...]
    primary_code_path_owners: Mapping[RepositoryPath, tuple[Team, ...]] = {}
    related_code_paths: tuple[RepositoryPath, ...] = ()
    depends_on: tuple[str, ...]
    architecture_state: Literal["implemented", "partial"]
    document_stewards: tuple[Team, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A document and what stands above its text."""

    name: str
    title: str
    about: FrontMatter


def modules() -> list[Module]:
    """All of them, by name.

    Raises:
        ValueError: A document has no front matter, or a wrong one.
    """
    paths = sorted(path for path in FOLDER.glob("*.md") if path.stem != INDEX)
    return [_read(path) for path in paths]


def _read(path: Path) -> Module:
    before, _, rest = path.read_text("utf-8").partition(FENCE)
    matter, fence, text = rest.partition(FENCE)
    if before or not fence:
        raise ValueError(f"{path}: does not begin with front matter between two lines of ---")
    title = text.lstrip().partition("\n")[0].removeprefix("# ")
    return Module(path.stem, title, FrontMatter.model_validate(yaml.safe_load(matter)))


def render_codeowners() -> str:
    """.github/CODEOWNERS: the last rule that matches counts, so what lies deeper comes later."""
    rules: dict[str, tuple[str, ...]] = {}
    for module in modules():
        rules |= dict.fromkeys(module.about.primary_code_paths, module.about.owners)
    for module in modules():
        rules |= module.about.primary_code_path_owners
    lines = [f"* {EVERYONE}"]
    for path in sorted(rules, key=lambda path: (path.count("/"), path)):
        folder = "/" if (ROOT / path).is_dir() else ""
        lines.append(f"/{path}{folder} {' '.join(rules[path])}")
    return "\n".join(lines)


def render_index() -> str:
    """docs/design/module/index.md."""
    rows = [
        (
            f"[{module.title}]({module.name}.md)",
            ", ".join(f"`{path}`" for path in module.about.primary_code_paths),
            ", ".join(f"`{team}`" for team in module.about.owners),
            ", ".join(module.about.depends_on),
            f"{module.about.status}, {module.about.architecture_state}",
        )
        for module in modules()
    ]
    return f"{INTRO}\n{table(('module', 'code', 'owners', 'knows of', 'state'), rows)}"
