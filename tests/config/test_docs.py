# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md is what the schema says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_omni.config.schema import DeployConfig

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "configuration.md"


def test_the_document_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "gen_config_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


def test_documented_examples_are_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        DeployConfig.parse(yaml.safe_load(block), "docs")
