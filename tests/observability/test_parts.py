# SPDX-License-Identifier: Apache-2.0
"""Request ids and the measure of a sound's gaps."""

import contextvars
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.logs import (
    MAX_REQUEST_ID,
    RequestIdFilter,
    clean_request_id,
    current_request_id,
    set_request_id,
)
from vllm_omni.metrics.sound import SoundMeter

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


@given(st.text() | st.none())
def test_any_id_becomes_a_safe_one(given_id: str | None) -> None:
    made = clean_request_id(given_id)
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", made)
    assert clean_request_id(made) == made


@pytest.mark.parametrize(
    ("given_id", "expected"),
    [
        ("4bf92f35-77b3.a_B:1", "4bf92f35-77b3.a_B:1"),
        ("x" * 1000, "x" * MAX_REQUEST_ID),
        ("id\r\nINFO forged %s \x1b[2J", "idINFOforgeds2J"),
    ],
)
def test_what_is_kept_of_an_id(given_id: str, expected: str) -> None:
    assert clean_request_id(given_id) == expected


def test_lines_have_the_id_of_their_context() -> None:
    def line(message: str, *args: object) -> str:
        record = logging.LogRecord("vllm", logging.INFO, "f", 1, message, args, None)
        assert RequestIdFilter().filter(record)
        assert RequestIdFilter().filter(record), "two handlers may share a record"
        return f"{record.request_id} {record.getMessage()}"

    def in_context() -> None:
        set_request_id("abc")
        assert current_request_id() == "abc"
        assert line("%d steps", 3) == "abc [abc] 3 steps"
        assert line("abc has come") == "abc abc has come"

    contextvars.copy_context().run(in_context)
    assert line("%d steps", 3) == "- 3 steps"


def test_gaps_of_a_sound() -> None:
    """Pieces of one second; a player starts with the first one and waits where none is there."""
    meter = SoundMeter(arrival=10.0)
    meter.add(12.0, 24_000, 24_000)  # played from 12 to 13
    meter.add(12.5, 24_000, 24_000)  # in time: until 14
    assert meter.underrun_s == 0
    meter.add(14.5, 24_000, 24_000)  # half a second late: from 14.5 to 15.5
    assert meter.underrun_s == pytest.approx(0.5)
    meter.add(15.75, 24_000, 24_000)  # a quarter late again: the longest gap counts
    assert meter.underrun_s == pytest.approx(0.5)
    assert (meter.first, meter.last) == (12.0, 15.75)
    assert (meter.seconds, meter.frames) == (4.0, 96_000)
