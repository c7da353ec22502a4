# SPDX-License-Identifier: Apache-2.0
"""The model's name in a header, whatever it is."""

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.entrypoints.openai.generation.service import model_header

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_name_is_ascii_and_can_be_read_back(name: str) -> None:
    told = model_header(name)["X-Model"]
    assert told.isascii() and "\r" not in told and "\n" not in told
    assert unquote(told) == name


def test_a_usual_name_is_itself() -> None:
    assert model_header("Qwen/Qwen-Image_2.0") == {"X-Model": "Qwen/Qwen-Image_2.0"}
