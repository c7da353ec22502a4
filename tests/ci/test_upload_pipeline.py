# SPDX-License-Identifier: Apache-2.0
"""The uploader keeps the steps that a change can affect (A-01, A-02)."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ci.pipelines import UPLOADER, uploader

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

module = uploader()
KEY = "source_file_dependencies"
PIPELINE = f"""
env: {{A: "1"}}
steps:
  - {{label: always, command: "true"}}
  - wait
  - {{label: flux, command: "true", {KEY}: [src/flux, src/flux.py]}}
  - group: speech
    {KEY}: [src/speech/]
    steps:
      - {{label: dia, command: "true", {KEY}: [src/speech/dia.py]}}
      - {{label: csm, command: "true"}}
  - group: films
    steps:
      - {{label: wan, command: "true", {KEY}: [src/wan.py]}}
"""
FIRST = """
steps:
  - {label: lint, command: "true"}
  - {label: image, if: __IMAGE_BUILD_IF__, command: "true"}
  - {label: ready, if: __UPLOAD_READY_IF__, command: "true"}
  - {label: merge, if: __UPLOAD_MERGE_IF__, command: "true"}
  - {label: other, if: build.branch == "x", command: "true"}
"""


def labels(pipeline: dict[str, Any]) -> list[str]:
    """Labels of what is left, those in a group after the group's."""
    found = []
    for step in pipeline["steps"]:
        if isinstance(step, str):
            found.append(step)
            continue
        found.append(step.get("group") or step["label"])
        found += [inner["label"] for inner in step.get("steps", ())]
    return found


ALL = ["always", "wait", "flux", "speech", "dia", "csm", "films", "wan"]


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        (None, ALL),
        ([], ["always", "wait"]),
        (["src/other.py"], ["always", "wait"]),
        (["src/flux/a/b.py"], ["always", "wait", "flux"]),
        (["src/flux.py"], ["always", "wait", "flux"]),
        (["src/flux"], ["always", "wait", "flux"]),
        (["src/flux.pyc", "src/fluxes/a.py", "other/src/flux.py"], ["always", "wait"]),
        (["src/speech/dia.py"], ["always", "wait", "speech", "dia", "csm"]),
        (["src/speech/csm.py"], ["always", "wait", "speech", "csm"]),
        (["src/wan.py"], ["always", "wait", "films", "wan"]),
    ],
)
def test_what_a_change_leaves(changed: list[str] | None, left: list[str]) -> None:
    pipeline = module.rendered(PIPELINE, changed)
    assert labels(pipeline) == left
    assert KEY not in yaml.safe_dump(pipeline)
    assert pipeline["env"] == {"A": "1"}


def test_what_is_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    module.rendered(PIPELINE, ["src/other.py"])
    told = capsys.readouterr()
    assert "skip 'flux' (no changes under ['src/flux', 'src/flux.py'])" in told.err
    assert "skip 'speech' (no changes under ['src/speech/'])" in told.err
    assert "skip 'wan' (no changes under ['src/wan.py'])" in told.err
    assert not told.out


@pytest.mark.parametrize("paths", ["src/flux", {"src": 1}, 3, None, [1], [["src"]]])
def test_what_is_no_list_of_paths_is_an_error(paths: object) -> None:
    text = yaml.safe_dump({"steps": [{"label": "flux", KEY: paths}]})
    for changed in (None, ["src/flux"]):
        with pytest.raises(ValueError, match="'flux': source_file_dependencies should be a list"):
            module.rendered(text, changed)


@pytest.mark.parametrize(
    ("changed", "text_alone"),
    [
        (["docs/a.md", "docs/assets/b.svg", "README.md", "vllm_omni/x.md", "mkdocs.yml"], True),
        (["docs/a.md", "vllm_omni/x.py"], False),
        (["src/mkdocs.yml"], False),
        (["docs.py"], False),
        ([], False),
        (None, False),
    ],
)
def test_a_change_of_documentation_builds_no_image(
    changed: list[str] | None, text_alone: bool
) -> None:
    steps = module.rendered(FIRST, changed)["steps"]
    image, ready, merge = (step["if"] for step in steps[1:4])
    assert "if" not in steps[0] and steps[4]["if"] == 'build.branch == "x"'
    if text_alone:
        assert (ready, merge) == ("false", "false")
        assert '"nightly-test"' in image and 'build.env("NIGHTLY") == "1"' in image
    else:
        assert image == "true"
        assert '"ready"' in ready and 'build.branch != "main"' in ready
        assert '"merge-test"' in merge and 'build.env("NIGHTLY") != "1"' in merge


def test_conditions_are_filled_in_in_the_first_pipeline_alone() -> None:
    text = "steps: [{label: a, if: __UPLOAD_READY_IF__}]"
    assert module.rendered(text, None)["steps"][0]["if"] == "__UPLOAD_READY_IF__"


@dataclass(frozen=True)
class Checkout:
    """An agent's clone, whose `origin` is another folder, and where its calls of the agent go."""

    origin: Path
    clone: Path
    uploaded: Path

    def git(self, *arguments: str, where: Path | None = None) -> str:
        user = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", *user, *arguments],
            cwd=where or self.clone,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def commit(self, *paths: str, where: Path | None = None) -> str:
        """Write some files, commit them, and return the commit."""
        folder = where or self.clone
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(f"{path} {len(list(folder.rglob('*')))}")
        self.git("add", "--all", where=folder)
        self.git("commit", "--quiet", "--message", "x", where=folder)
        return self.git("rev-parse", "HEAD", where=folder)

    def upload(self, *flags: str, **build: str) -> subprocess.CompletedProcess[str]:
        (self.clone / "pipeline.yml").write_text(PIPELINE)
        env = {name: value for name, value in os.environ.items() if "BUILDKITE" not in name}
        env |= {f"BUILDKITE_{name.upper()}": value for name, value in build.items()}
        env["PATH"] = f"{self.uploaded.parent}:{env['PATH']}"
        return subprocess.run(
            [sys.executable, str(UPLOADER), *flags, "pipeline.yml"],
            cwd=self.clone,
            env=env,
            capture_output=True,
            text=True,
        )

    def left(self, **build: str) -> list[str]:
        """Labels that are printed."""
        done = self.upload(**build)
        assert done.returncode == 0, done.stderr
        return labels(yaml.safe_load(done.stdout))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    agent = tmp_path / "bin" / "buildkite-agent"
    agent.parent.mkdir()
    agent.write_text('#!/bin/sh\n{ echo "$@"; cat; } > "$(dirname "$0")/uploaded"\nexit 3\n')
    agent.chmod(0o755)
    it = Checkout(tmp_path / "origin", tmp_path / "clone", agent.parent / "uploaded")
    it.origin.mkdir()
    it.git("init", "--quiet", "--initial-branch", "main", where=it.origin)
    it.commit("src/flux.py", "src/wan.py", where=it.origin)
    it.git("clone", "--quiet", str(it.origin), str(it.clone), where=tmp_path)
    return it


def pull_request(commit: str, base: str = "main") -> dict[str, str]:
    """What an agent is told of a pull request's build."""
    return {
        "commit": commit,
        "branch": "topic",
        "pull_request": "7",
        "pull_request_base_branch": base,
    }


def test_a_pull_request_is_compared_with_where_it_left_its_base(checkout: Checkout) -> None:
    checkout.git("checkout", "--quiet", "-b", "topic")
    checkout.commit("src/wan.py")
    commit = checkout.commit("README.md")
    checkout.commit("src/flux.py", where=checkout.origin)  # not the pull request's
    checkout.git("fetch", "--quiet")
    assert checkout.left(**pull_request(commit)) == ["always", "wait", "films", "wan"]


def test_a_base_that_the_clone_lacks_is_fetched(checkout: Checkout) -> None:
    checkout.git("branch", "release", where=checkout.origin)
    commit = checkout.commit("src/flux.py")
    assert checkout.left(**pull_request(commit, "release")) == ["always", "wait", "flux"]


def test_without_its_base_every_step_is_kept(checkout: Checkout) -> None:
    commit = checkout.commit("src/flux.py")
    done = checkout.upload(**pull_request(commit, "gone"))
    assert labels(yaml.safe_load(done.stdout)) == ALL
    assert "every step is kept" in done.stderr


def test_a_file_that_moves_counts_where_it_was_and_where_it_is(checkout: Checkout) -> None:
    checkout.git("mv", "src/flux.py", "src/wan2.py")
    checkout.git("mv", "src/wan.py", "src/speech.py")
    commit = checkout.commit()
    assert checkout.left(**pull_request(commit)) == ["always", "wait", "flux", "films", "wan"]


def test_a_push_to_main_is_compared_with_the_commit_before(checkout: Checkout) -> None:
    checkout.commit("src/wan.py")
    commit = checkout.commit("src/flux.py")
    push = {"commit": commit, "branch": "main", "pull_request": "false"}
    assert checkout.left(**push) == ["always", "wait", "flux"]


@pytest.mark.parametrize("build", [{}, {"branch": "topic", "pull_request": "false"}])
def test_of_another_build_every_step_is_kept(checkout: Checkout, build: dict[str, str]) -> None:
    assert checkout.left(commit=checkout.commit("a.py"), **build) == ALL
    assert checkout.left() == ALL


def test_upload_hands_the_pipeline_to_the_agent(checkout: Checkout) -> None:
    done = checkout.upload("--upload", **pull_request(checkout.commit("src/flux.py")))
    assert (done.returncode, done.stdout) == (3, ""), "the agent's exit code"
    command, text = checkout.uploaded.read_text().split("\n", 1)
    assert command == "pipeline upload"
    assert labels(yaml.safe_load(text)) == ["always", "wait", "flux"]


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "no such file"), ("steps: 3", "steps"), ("a: [", "pipeline.yml"), ("[]", "steps")],
)
def test_a_missing_or_wrong_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    file = tmp_path / "pipeline.yml"
    if text is not None:
        file.write_text(text)
    assert module.main([str(file)]) == 1
    told = capsys.readouterr()
    assert says in told.err and not told.out


def test_nothing_is_uploaded_if_no_step_is_left(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = checkout.commit("a.py")
    file = tmp_path / "one.yml"
    file.write_text(yaml.safe_dump({"steps": [{"label": "flux", KEY: ["src/flux.py"]}]}))
    monkeypatch.chdir(checkout.clone)
    monkeypatch.setenv("PATH", f"{checkout.uploaded.parent}:{os.environ['PATH']}")
    for name, value in pull_request(commit).items():
        monkeypatch.setenv(f"BUILDKITE_{name.upper()}", value)
    run: Callable[[list[str]], int] = module.main
    assert run(["--upload", str(file)]) == 0
    assert not checkout.uploaded.exists()
