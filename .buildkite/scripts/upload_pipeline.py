#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Upload a Buildkite pipeline without the steps that a change cannot affect.

Usage: upload_pipeline.py [--upload] FILE

Without `--upload` the pipeline is printed. A step or group may have the key
`source_file_dependencies`, a list of files and folders: it is kept if one of them has changed. The
key is for this script alone and is always removed. Where it is not known what has changed, every
step is kept.

A pipeline with `if: __IMAGE_BUILD_IF__` is the first one of a build: in it the three conditions
below are filled in, and a change of nothing but documentation builds and uploads no more than the
nightly tests ask for.

Needs Python 3.9 and PyYAML, which is all that an agent of the first step has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPENDENCIES = "source_file_dependencies"
IMAGE_IF, READY_IF, MERGE_IF = "__IMAGE_BUILD_IF__", "__UPLOAD_READY_IF__", "__UPLOAD_MERGE_IF__"
MAIN = "main"
FETCH_DEPTH = 200

NEVER = "false"
ALWAYS = "true"
NIGHTLY = (
    'build.pull_request.labels includes "nightly-test" || '
    '(build.branch == "main" && build.env("NIGHTLY") == "1")'
)
READY = 'build.branch != "main" && build.pull_request.labels includes "ready"'
MERGE = (
    '(build.branch == "main" && build.env("NIGHTLY") != "1" && build.env("WEEKLY") != "1") || '
    '(build.branch != "main" && build.pull_request.labels includes "merge-test")'
)


@dataclass(frozen=True)
class Build:
    """What Buildkite says of the build.

    Attributes:
        commit: Its commit.
        branch: Its branch.
        base: The branch that its pull request is for; None if it is of none.
    """

    commit: str
    branch: str
    base: str | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Build:
        """The build that an agent's environment describes."""
        of_pull_request = environment.get("BUILDKITE_PULL_REQUEST", "false") != "false"
        base = environment.get("BUILDKITE_PULL_REQUEST_BASE_BRANCH") if of_pull_request else None
        return cls(
            commit=environment.get("BUILDKITE_COMMIT", ""),
            branch=environment.get("BUILDKITE_BRANCH", ""),
            base=base or None,
        )


def changed_files(build: Build) -> list[str] | None:
    """Paths that the build's commits change, old and new names of what they move.

    None if it is not known: a branch without a pull request, or one whose base cannot be had.
    """
    if not build.commit:
        return None
    if build.base is not None:
        return _difference_to(build.base, build.commit)
    if build.branch == MAIN:
        return _difference(f"{build.commit}^..{build.commit}")
    return None


def _difference_to(base: str, commit: str) -> list[str] | None:
    revisions = f"origin/{base}...{commit}"
    known = _difference(revisions)
    if known is None:
        where = f"+refs/heads/{base}:refs/remotes/origin/{base}"
        _git("fetch", f"--depth={FETCH_DEPTH}", "origin", where)
        known = _difference(revisions)
    return known


def _difference(revisions: str) -> list[str] | None:
    output = _git("diff", "--name-only", "--no-renames", "-z", revisions)
    return None if output is None else [path for path in output.split("\0") if path]


def _git(*arguments: str) -> str | None:
    """What git prints, or None if it fails; why it does is told."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        _tell(f"git {arguments[0]}: {done.stderr.strip()}")
        return None
    return done.stdout


def only_documentation(changed: Sequence[str] | None) -> bool:
    """Whether all that has changed is text; False if nothing is known."""
    return bool(changed) and all(
        path.startswith("docs/") or path.endswith(".md") or path == "mkdocs.yml" for path in changed
    )


def selected(steps: Iterable[Any], changed: Sequence[str] | None) -> list[Any]:
    """The steps that a change can affect, without `source_file_dependencies`.

    Args:
        steps: Of a pipeline or a group; those that are no mappings (`wait`) are kept.
        changed: Paths, or None to keep every step.

    Raises:
        ValueError: `source_file_dependencies` is no list of paths.
    """
    kept = []
    for step in steps:
        if not isinstance(step, dict):
            kept.append(step)
            continue
        plain = {key: value for key, value in step.items() if key != DEPENDENCIES}
        paths = _paths(step)
        if changed is not None and paths is not None and not _any_in(changed, paths):
            _tell(f"skip '{_label(step)}' (no changes under {paths})")
            continue
        if "group" in step:
            plain["steps"] = selected(step.get("steps") or [], changed)
            if not plain["steps"]:
                _tell(f"skip '{_label(step)}' (none of its steps is left)")
                continue
        kept.append(plain)
    return kept


def _paths(step: Mapping[str, Any]) -> list[str] | None:
    if DEPENDENCIES not in step:
        return None
    paths = step[DEPENDENCIES]
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(
            f"'{_label(step)}': {DEPENDENCIES} should be a list of paths, not {paths!r}"
        )
    return paths


def _any_in(changed: Iterable[str], paths: Iterable[str]) -> bool:
    places = [path.rstrip("/") for path in paths]
    return any(
        path == place or path.startswith(f"{place}/") for path in changed for place in places
    )


def _label(step: Mapping[str, Any]) -> str:
    return str(step.get("group") or step.get("label") or step.get("key") or "step")


def conditions(changed: Sequence[str] | None) -> dict[str, str]:
    """What stands for the conditions of a build's first pipeline."""
    if only_documentation(changed):
        _tell("only documentation has changed: no image, and no tests that need one")
        return {IMAGE_IF: NIGHTLY, READY_IF: NEVER, MERGE_IF: NEVER}
    return {IMAGE_IF: ALWAYS, READY_IF: READY, MERGE_IF: MERGE}


def _with_conditions(steps: Iterable[Any], values: Mapping[str, str]) -> list[Any]:
    return [
        {**step, "if": values.get(step["if"], step["if"])}
        if isinstance(step, dict) and "if" in step
        else step
        for step in steps
    ]


def rendered(text: str, changed: Sequence[str] | None) -> dict[str, Any]:
    """The pipeline to upload.

    Args:
        text: Of the file.
        changed: Paths, or None if it is not known what has changed.

    Raises:
        ValueError: It is no pipeline.
    """
    pipeline = yaml.safe_load(text)
    if not isinstance(pipeline, dict) or not isinstance(pipeline.get("steps"), list):
        raise ValueError("a pipeline is a mapping with a list of `steps`")
    steps = selected(pipeline["steps"], changed)
    if IMAGE_IF in text:
        steps = _with_conditions(steps, conditions(changed))
    return {**pipeline, "steps": steps}


class _Plain(yaml.SafeDumper):
    """Writes what is shared at every place where it is."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Print or upload; 1 if the file is missing or wrong, else what the agent says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--upload", action="store_true", help="give it to `buildkite-agent`")
    parser.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    if not args.file.is_file():
        _tell(f"{args.file}: no such file")
        return 1
    changed = changed_files(Build.of(os.environ))
    if changed is None:
        _tell("it is not known what has changed: every step is kept")
    try:
        pipeline = rendered(args.file.read_text(encoding="utf-8"), changed)
    except (ValueError, yaml.YAMLError) as error:
        _tell(f"{args.file}: {error}")
        return 1
    text = yaml.dump(pipeline, Dumper=_Plain, sort_keys=False, allow_unicode=True)
    if not args.upload:
        print(text, end="")
        return 0
    if not pipeline["steps"]:
        _tell("no step is left: nothing is uploaded")
        return 0
    agent = ["buildkite-agent", "pipeline", "upload"]
    return subprocess.run(agent, input=text, text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
