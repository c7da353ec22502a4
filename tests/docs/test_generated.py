# SPDX-License-Identifier: Apache-2.0
"""Pages that are written from the code say what the code says."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from tools.docs.pages import DOCS, PAGES, page
from vllm_omni.benchmarks.options import add_options
from vllm_omni.config.cli import add_omni_args
from vllm_omni.entrypoints.cli.serve import add_frontend_args
from vllm_omni.pipelines.registry import BUILTINS
from vllm_omni.testing.diffusers_tiny import FAMILIES

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ROOT = DOCS.parent


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_up_to_date(path: Path) -> None:
    assert path.read_text("utf-8") == page(path), "run python -m tools.docs"


def test_every_flag_is_documented() -> None:
    parser = ArgumentParser(add_help=False)
    for add in (add_omni_args, add_frontend_args, add_options):
        add(parser)
    flags = (DOCS / "reference" / "cli.md").read_text()
    without_effect = (DOCS / "configuration.md").read_text().split("## Accepted without effect")[1]
    missing = [
        option
        for action in parser._actions
        for option in action.option_strings
        if f"`{option}`" not in flags and f"`{action.dest}`" not in without_effect
    ]
    assert not missing
    assert "`--async-chunk`" in flags, "a stage key of that name has no effect; the flag has"


def test_every_family_is_listed_with_a_test_that_exists() -> None:
    text = (DOCS / "models" / "supported_models.md").read_text()
    for family in BUILTINS:
        assert all(f"`{name}`" in text for name in family.architectures)
    assert all(f"`{name}`" in text for name in FAMILIES)
    tests = {word.strip("`;:.") for word in text.split() if word.startswith("`tests/")}
    assert len(tests) > 2
    assert [test for test in tests if not (ROOT / test).is_file()] == []
