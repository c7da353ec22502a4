# SPDX-License-Identifier: Apache-2.0
"""Values of flags that make no sense are refused where they are read, with what would be right."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_omni.config.flag_types import count, positive_int, positive_number, positive_seconds
from vllm_omni.entrypoints.openai.realtime.limits import RealtimeLimits, add_realtime_args
from vllm_omni.entrypoints.openai.speech.limits import SpeechLimits, add_speech_args, voice_folder

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (positive_seconds, "0.5", ("0", "-1", "nan")),
        (positive_number, "0.5", ("0", "-1", "nan")),
        (positive_int, "1", ("0", "-1")),
        (count, "0", ("-1",)),
    ],
)
def test_ranges(read: Callable[[str], float], good: str, bad: tuple[str, ...]) -> None:
    assert read(good) == float(good)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"not {text}"):
            read(text)


@pytest.mark.parametrize(
    "flag", ["max-sessions", "max-frame-bytes", "max-session-bytes", "max-events-per-second"]
)
def test_realtime_limits_are_positive(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_realtime_args(parser.add_argument_group("realtime"))
    assert RealtimeLimits.of(parser.parse_args([])) == RealtimeLimits()
    with pytest.raises(SystemExit):
        parser.parse_args([f"--realtime-{flag}=0"])
    assert f"--realtime-{flag}" in capsys.readouterr().err


def test_speech_limits_and_where_voices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_speech_args(parser.add_argument_group("speech"))
    assert SpeechLimits.of(parser.parse_args([])) == SpeechLimits(4096, 500)  # row I-16
    given = parser.parse_args(["--tts-max-instructions-length=9", "--custom-voice-dir=/v"])
    assert SpeechLimits.of(given).max_instructions == 9
    assert voice_folder(given) == Path("/v")
    monkeypatch.setenv("VLLM_OMNI_STORAGE_PATH", "/storage")
    assert voice_folder(parser.parse_args([])) == Path("/storage/voices")
