# SPDX-License-Identifier: Apache-2.0
"""Every part of the code has a document and owners (B-61, B-62)."""

from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools.docs import modules
from tools.docs.modules import EVERYONE, ROOT, Module

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

CODEOWNERS = ROOT / ".github" / "CODEOWNERS"


@pytest.fixture(scope="module")
def known() -> dict[str, Module]:
    return {module.name: module for module in modules.modules()}


def owners(path: str) -> list[str]:
    """Who reviews a file, as GitHub reads the rules: the last one that matches."""
    found: list[str] = []
    for line in CODEOWNERS.read_text().splitlines():
        pattern, *teams = line.split() or ["#"]
        if pattern == "#":
            continue
        anchored = pattern.removeprefix("/")
        if fnmatch(path, anchored) or (anchored.endswith("/") and path.startswith(anchored)):
            found = teams
    return found


def test_every_entry_of_the_package_belongs_to_one_module(known: dict[str, Module]) -> None:
    package = ROOT / "vllm_omni"
    entries = {
        path.relative_to(ROOT).as_posix()
        for path in package.iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    }
    claims = [path for module in known.values() for path in module.about.primary_code_paths]
    assert len(claims) == len(set(claims))
    assert sorted(entries - set(claims)) == [], "name it in a document of docs/design/module"


def test_the_paths_and_modules_that_are_named_exist(known: dict[str, Module]) -> None:
    for module in known.values():
        about = module.about
        inner = list(about.primary_code_path_owners)
        for path in (*about.primary_code_paths, *inner, *about.related_code_paths):
            assert (ROOT / path).exists(), f"{module.name}: {path}"
        for path in inner:
            assert any(path.startswith(f"{own}/") for own in about.primary_code_paths)
        assert set(about.depends_on) <= set(known)


def test_modules_know_of_one_another_in_one_direction(known: dict[str, Module]) -> None:
    graph = {module.name: module.about.depends_on for module in known.values()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(known)


@pytest.mark.parametrize(
    ("path", "team"),
    [
        ("README.md", EVERYONE),
        ("vllm_omni/ar/cuda/model_runner.py", "@vllm-omni/ar"),
        ("vllm_omni/pipelines/csm.py", "@vllm-omni/models"),
        ("vllm_omni/pipelines/qwen3_omni_moe.py", "@vllm-omni/omni-models"),
        ("vllm_omni/pipelines/hunyuan_image3/prompt.py", "@vllm-omni/diffusion"),
        ("vllm_omni/platforms/graphs.py", "@vllm-omni/platforms"),
        ("vllm_omni/platforms/cuda/mps.py", "@vllm-omni/platform-cuda"),
        ("docs/index.md", "@vllm-omni/quality"),
    ],
)
def test_the_most_particular_rule_counts(path: str, team: str) -> None:
    assert owners(path) == [team]


def test_a_document_without_front_matter_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "FOLDER", tmp_path)
    document = tmp_path / "a.md"
    document.write_text("# A\n")
    with pytest.raises(ValueError, match="front matter"):
        modules.modules()
    document.write_text("---\nkind: module\nowner: [x]\n---\n# A\n")
    with pytest.raises(ValueError, match="owner"):
        modules.modules()
