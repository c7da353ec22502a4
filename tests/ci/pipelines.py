# SPDX-License-Identifier: Apache-2.0
"""The project's Buildkite pipelines, read as the uploader reads them."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".buildkite"
UPLOADER = FOLDER / "scripts" / "upload_pipeline.py"


def uploader() -> ModuleType:
    """The uploader, which is a script beside the pipelines and in no package."""
    spec = importlib.util.spec_from_file_location("upload_pipeline", UPLOADER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def jobs(name: str) -> Iterator[dict[str, Any]]:
    """Every job of a pipeline, those of groups too."""
    for step in yaml.safe_load((FOLDER / name).read_text())["steps"]:
        yield from step.get("steps", [step])


def commands(job: dict[str, Any]) -> list[str]:
    """Its command lines."""
    return [*job.get("commands", []), *([job["command"]] if "command" in job else [])]
