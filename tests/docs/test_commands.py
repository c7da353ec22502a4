# SPDX-License-Identifier: Apache-2.0
"""Commands in the documents name flags, routes, fields, checkpoints and files that there are."""

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tools.docs.http import SERVERS
from tools.docs.pages import DOCS, ROOT
from vllm_omni.entrypoints.cli.parser import OmniArgumentParser
from vllm_omni.entrypoints.cli.serve import OmniServeSubcommand
from vllm_omni.testing import diffusers_tiny, tiny

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ANY_SERVER = {"/health", "/metrics", "/version", "/v1/models"}
CHECKPOINTS = {
    "vllm_omni.testing.tiny": tiny.RECIPES,
    "vllm_omni.testing.diffusers_tiny": diffusers_tiny.FAMILIES,
}
Command = tuple[str, list[str]]


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("examples/*/*.md"))]


@cache
def commands() -> list[Command]:
    """Every command of a block of `bash`: its document, and its words."""
    return [
        (path.relative_to(ROOT).as_posix(), words)
        for path in documents()
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
        for words in _split(block)
    ]


def _split(block: str) -> Iterator[list[str]]:
    text = ""
    for line in block.replace("\\\n", " ").splitlines():
        text += f"{line}\n"
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation goes on in the next line
            continue
        text = ""
        if words:
            yield words
    assert not text.strip(), f"a quotation does not end: {text}"


def run_by(program: str) -> list[Command]:
    """Commands of a program, wherever that lies, without its name."""
    return [
        (where, words[1:]) for where, words in commands() if words[0].rpartition("/")[2] == program
    ]


def test_servers_are_started_with_flags_that_there_are() -> None:
    parser = OmniArgumentParser()
    OmniServeSubcommand().subparser_init(parser.add_subparsers())
    started = [(where, words) for where, words in run_by("vllm") if words[0] == "serve"]
    assert len(started) > 10
    for where, words in started:
        try:
            parser.parse_args([word for word in words if word != "&"])
        except SystemExit:
            pytest.fail(f"{where}: vllm {' '.join(words)}")


@pytest.mark.parametrize("module", CHECKPOINTS)
def test_tiny_checkpoints_have_the_names_that_are_told(module: str) -> None:
    made = [(where, words) for where, words in run_by("python") if words[:2] == ["-m", module]]
    assert made
    for where, words in made:
        assert words[2] in CHECKPOINTS[module], f"{where}: {words}"


def test_programs_that_are_run_exist() -> None:
    for where, words in commands():
        for word in words:
            if re.match(r"(examples|benchmarks|tools|tests|recipes)/.*\.(py|sh|yaml)$", word):
                assert (ROOT / word).is_file(), f"{where}: {word}"


@cache
def schemas() -> list[dict[str, Any]]:
    """OpenAPI's documents of each kind of server."""
    found = []
    for _, _, routers in SERVERS:
        app = FastAPI()
        for router in routers:
            app.include_router(router)
        found.append(app.openapi())
    return found


def paths() -> set[str]:
    """Those of all servers."""
    return ANY_SERVER.union(*(schema["paths"] for schema in schemas()))


def fields(path: str) -> set[str]:
    """Names of what a route reads, on any server that has it."""
    names: set[str] = set()
    for document in schemas():
        if path in document["paths"]:
            (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
            schema = content["schema"]
            if name := schema.get("$ref", "").rpartition("/")[2]:
                schema = document["components"]["schemas"][name]
            names |= set(schema["properties"])
    return names


def test_requests_are_sent_to_routes_with_fields_that_there_are() -> None:
    asked = run_by("curl")
    assert len(asked) > 10
    for where, words in asked:
        (url,) = (word for word in words if "localhost" in word)
        path = "/" + url.split("localhost:8000/", 1)[1].partition("?")[0]
        given = []
        for flag, value in pairwise(words):
            if flag in ("-F", "--form"):
                given.append(value.partition("=")[0])
            elif flag in ("-d", "--data"):
                given += json.loads(value)
        assert path in paths(), f"{where}: {path}"
        if given:
            assert set(given) <= fields(path), f"{where}: {set(given) - fields(path)}"


def test_programs_in_documents_are_python_and_import_what_there_is() -> None:
    blocks = [
        (path, block)
        for path in documents()
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
        if "--8<--" not in block
    ]
    assert len(blocks) > 5
    for path, block in blocks:
        for node in ast.walk(ast.parse(block, filename=str(path))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_omni"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{path}: {node.module}.{alias.name}"
