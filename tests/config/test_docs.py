# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md is what the schema says."""

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml

from tools.gen_config_docs import render
from vllm_omni.config.cli import add_omni_args
from vllm_omni.config.schema import DeployConfig
from vllm_omni.entrypoints.cli.serve import add_frontend_args

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "configuration.md"


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text("utf-8") == render(), "run python tools/gen_config_docs.py"


def test_every_flag_is_documented() -> None:
    parser = ArgumentParser(add_help=False)
    add_omni_args(parser)
    add_frontend_args(parser)
    flags, rest = DOCUMENT.read_text().split("## Top level", 1)
    without_effect = rest.split("## Accepted without effect", 1)[1]
    missing = [
        option
        for action in parser._actions
        for option in action.option_strings
        if f"`{option}`" not in flags and f"`{action.dest}`" not in without_effect
    ]
    assert not missing
    assert "`--async-chunk`" in flags, "a stage key of that name has no effect; the flag has"


def test_documented_examples_are_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        DeployConfig.parse(yaml.safe_load(block), "docs")
