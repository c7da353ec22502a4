# SPDX-License-Identifier: Apache-2.0
"""What contributors are given works: hooks, template, guide (A-18, A-19, B-53)."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ci.pipelines import ROOT

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

GUIDE = ROOT / "docs" / "contributing" / "README.md"
TEMPLATE = ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"


def hooks() -> dict[str, dict[str, Any]]:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (local,) = config["repos"]
    assert local["repo"] == "local", "hooks are the locked tools, not downloads"
    return {hook["id"]: hook for hook in local["hooks"]}


def test_hooks_run_tools_of_the_environment() -> None:
    tools = Path(sys.executable).parent
    for hook in hooks().values():
        program, *arguments = shlex.split(hook["entry"])
        assert program.startswith(".venv/bin/") and (tools / Path(program).name).is_file()
        for argument in arguments:
            assert not argument.startswith("tests/") or (ROOT / argument).is_dir()


def test_pages_are_written_anew_when_what_they_say_changes() -> None:
    pattern = re.compile(hooks()["pages"]["files"])
    for path in (
        "docs/design/module/media.md",
        "vllm_omni/config/schema.py",
        "vllm_omni/deploy/csm.yaml",
        "vllm_omni/entrypoints/cli/serve.py",
        "vllm_omni/entrypoints/openai/routes/chat.py",
        "vllm_omni/pipelines/registry.py",
    ):
        assert (ROOT / path).is_file() and pattern.search(path)
    assert not pattern.search("vllm_omni/ar/worker.py")


def test_the_template_asks_for_what_was_run() -> None:
    text = TEMPLATE.read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == ["Purpose", "Test Plan", "Test Result"]
    for word in ("**vLLM Version:**", "**vLLM-Omni Commit:**", "CONTRIBUTING.md"):
        assert word in text
    assert "- [ ]" not in text


def test_the_guide_tells_what_each_kind_of_change_has_to_say() -> None:
    text = GUIDE.read_text()
    for kind in ("bug fix", "performance", "new model", "diffusion model", "general"):
        assert f"\n| {kind} |" in text
    assert "An unrun check is not a pass" in text
    targets = re.findall(r"^make ([a-z-]+)", text, re.M)
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(f"\n{target}:" in makefile for target in targets)
