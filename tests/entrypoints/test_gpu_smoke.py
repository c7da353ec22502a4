# SPDX-License-Identifier: Apache-2.0
"""The server on a GPU, as far as a tiny checkpoint shows it: what CI's job on H100s runs (A-05)."""

import sys
from pathlib import Path

import pytest

from tests.entrypoints.conftest import LiveServer
from tests.entrypoints.test_examples import EXAMPLES, converse, run, samples

pytestmark = [pytest.mark.core_model, pytest.mark.cuda, pytest.mark.omni]


def test_a_chat_is_answered_in_text_and_sound(server: LiveServer, tmp_path: Path) -> None:
    assert run(tmp_path, sys.executable, str(EXAMPLES / "chat.py"), "--url", f"{server.url}/v1")
    assert samples(tmp_path / "whole.wav") and samples(tmp_path / "streamed.mp3")


def test_a_realtime_session_answers(server: LiveServer, tmp_path: Path) -> None:
    converse(server, tmp_path)
