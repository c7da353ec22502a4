# SPDX-License-Identifier: Apache-2.0
"""Decoder processes: what they make is what the reader makes, and they may die."""

import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import ImageMediaIO

from tests.entrypoints.mutations import samples
from tests.media.test_decode import picture_file
from tests.processes import command_line
from vllm_omni.entrypoints.openai.media_checks import CheckedIO
from vllm_omni.errors import OmniClientError, OmniError, OmniGenerateError
from vllm_omni.fork_server import Lifeline, fork_server
from vllm_omni.media import decoder_process
from vllm_omni.media.decode import decode_audio
from vllm_omni.media.decoders import Decoders, close_decoders, decoders
from vllm_omni.media.hearing import as_heard
from vllm_omni.media.jobs import Answer, AnyJob, SoundJob
from vllm_omni.media.limits import DEFAULT_LIMITS

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

SOUND = samples()["wav"].data
JOB = SoundJob(limits=DEFAULT_LIMITS, param="file")
PIXELS = np.random.default_rng(0).integers(0, 256, (37, 1031, 4), np.uint8)


def running() -> list[psutil.Process]:
    forked = psutil.Process(fork_server().pid).children()
    return [each for each in forked if decoder_process.NAME in command_line(each)]


@cache
def pictures() -> dict[str, bytes]:
    palette = Image.fromarray(PIXELS[..., :3]).quantize(17)
    palette.info["transparency"] = 3
    grey16 = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)
    modes = {mode: Image.fromarray(PIXELS).convert(mode) for mode in ("1", "L", "LA", "RGB")}
    return {
        **{mode: picture_file("PNG", image) for mode, image in modes.items()},
        "RGBA": picture_file("PNG", Image.fromarray(PIXELS)),
        "P": picture_file("PNG", palette),
        "I;16": picture_file("PNG", grey16),
        "CMYK": picture_file("JPEG", Image.fromarray(PIXELS).convert("CMYK")),
        "GIF": picture_file("GIF", palette),
    }


@pytest.mark.parametrize("mode", ["RGB", None])
@pytest.mark.parametrize("name", list(pictures()))
def test_pictures_are_vllms(name: str, mode: str | None) -> None:
    data, io = pictures()[name], ImageMediaIO(mode)
    ours, theirs = CheckedIO(io).load_bytes(data), io.load_bytes(data)
    assert ours.media.mode == theirs.media.mode
    assert ours.media.tobytes() == theirs.media.tobytes()
    assert ours.media.convert("RGBA").tobytes() == theirs.media.convert("RGBA").tobytes()
    assert ours.original_bytes == theirs.original_bytes and ours.io_config == theirs.io_config
    hashes = [MultiModalHasher.hash_kwargs("blake3", image=each) for each in (ours, theirs)]
    assert hashes[0] == hashes[1]


def test_sounds_are_as_heard() -> None:
    rate, heard = decoders().run(JOB, SOUND)
    expected, expected_rate = as_heard(*decode_audio(SOUND))
    assert rate == expected_rate and np.array_equal(heard, expected)


def test_processes_start_when_they_are_needed_and_end() -> None:
    close_decoders()
    assert not running()
    decoders().run(JOB, SOUND)
    (process,) = running()
    decoders().run(JOB, SOUND)
    assert running() == [process]
    process.kill()
    decoders().run(JOB, SOUND)
    close_decoders()
    assert not running()
    close_decoders()


def die_as_told(lifeline: Lifeline) -> None:
    """A decoder to whom a file is a signal to die of, unless another file says it has been."""

    def run(job: AnyJob, data: bytes) -> tuple[Answer, None]:
        number, _, once = data.decode().partition(" ")
        if once and Path(once).exists():
            return Answer(about=msgspec.Raw(msgspec.msgpack.encode(16_000))), None
        if once:
            Path(once).touch()
        os.kill(os.getpid(), int(number))
        return Answer(), None

    decoder_process._run = run  # in this process alone
    decoder_process.decode_files(lifeline)


@pytest.fixture
def dying() -> Iterator[Decoders]:
    made = Decoders(1, die_as_told)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (signal.SIGSEGV, OmniClientError, "file: cannot read the audio: its decoder crashed"),
        (signal.SIGXCPU, OmniClientError, "file: the audio takes more than 300 s to decode"),
        (signal.SIGKILL, OmniGenerateError, "file: the process that decoded the audio was ended"),
    ],
)
def test_a_file_that_ends_its_decoder(
    dying: Decoders, number: int, error: type[OmniError], says: str
) -> None:
    with pytest.raises(error, match=says):
        dying.run(JOB, b"%d" % number)
    assert not running()
    with pytest.raises(OmniClientError, match="crashed"):
        dying.run(JOB, b"%d" % signal.SIGABRT)


def test_a_file_gets_a_second_try(dying: Decoders, tmp_path: Path) -> None:
    rate, _ = dying.run(JOB, b"%d %s" % (signal.SIGSEGV, bytes(tmp_path / "died")))
    assert rate == 16_000
