# SPDX-License-Identifier: Apache-2.0
"""The deploy files shown in docs/configuration.md are valid."""

import re
from pathlib import Path

import pytest
import yaml

from vllm_omni.config.schema import DeployConfig

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "configuration.md"


def test_documented_examples_are_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        DeployConfig.parse(yaml.safe_load(block), "docs")
