# SPDX-License-Identifier: Apache-2.0
"""The examples of `examples/offline_inference` run as they are.

One of each kind of pipeline on every push, the others at night: each starts an engine, and what
they make is made through a server as well.
"""

from collections.abc import Callable
from pathlib import Path

import av
import pytest
import soundfile
from PIL import Image

from tests.conftest import CHECKPOINTS
from tests.helpers.scripts import run_script
from vllm_omni import Omni
from vllm_omni.testing import diffusers_tiny, media, tiny

pytestmark = [pytest.mark.advanced_model, pytest.mark.cpu, pytest.mark.slow]

assert Omni  # what it imports is not imported anew by every script
EXAMPLES = Path(__file__).parents[2] / "examples" / "offline_inference"
SMALL = ("--height", "32", "--width", "64")
FEW = ("--steps", "2")
SHORT = ("--frames", "9", "--fps", "8")


def diffusers(name: str) -> tuple[str, str]:
    """The flag for a tiny checkpoint of diffusers."""
    return "--model", str(diffusers_tiny.build(name, CHECKPOINTS / f"diffusers-{name}"))


def stages(name: str) -> tuple[str, str]:
    """The flag for a tiny checkpoint of several stages."""
    return "--model", str(tiny.build(name, CHECKPOINTS / name))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    Image.linear_gradient("L").resize((64, 32)).convert("RGB").save(tmp_path / "photo.png")
    soundfile.write(tmp_path / "voice.wav", media.sound(0.5), 16_000)
    return lambda name, *arguments: run_script(EXAMPLES / f"{name}.py", *arguments, folder=tmp_path)


def film(path: Path) -> tuple[int, bool]:
    """Frames of a video, and whether it has sound."""
    with av.open(path) as container:
        frames = sum(1 for _ in container.decode(video=0))
        return frames, bool(container.streams.audio)


def test_text_to_image(run: Callable[..., str], tmp_path: Path) -> None:
    run("text_to_image", *diffusers("flux"), *SMALL, *FEW, "a cat", "a dog")
    pictures = [Image.open(tmp_path / f"{number}.png") for number in (0, 1)]
    assert [picture.size for picture in pictures] == [(64, 32)] * 2
    assert pictures[0].tobytes() != pictures[1].tobytes()


@pytest.mark.full_model
def test_image_to_image(run: Callable[..., str], tmp_path: Path) -> None:
    run("image_to_image", *diffusers("flux"), *FEW, "photo.png", "snow")
    assert Image.open(tmp_path / "changed.png").size == (64, 32)


@pytest.mark.full_model
def test_text_to_video(run: Callable[..., str], tmp_path: Path) -> None:
    run("text_to_video", *diffusers("wan21_t2v"), *SMALL, *FEW, *SHORT, "a robot")
    assert film(tmp_path / "video.mp4") == (9, False)


@pytest.mark.full_model
def test_image_to_video(run: Callable[..., str], tmp_path: Path) -> None:
    run("image_to_video", *diffusers("wan22_ti2v"), *FEW, *SHORT, "photo.png", "it moves")
    assert film(tmp_path / "moved.mp4") == (9, False)


@pytest.mark.full_model
def test_x_to_video_audio(run: Callable[..., str], tmp_path: Path) -> None:
    small = (*diffusers("ltx2"), *SMALL, *FEW, *SHORT)
    run("x_to_video_audio", *small, "--image", "photo.png", "a drum")
    assert film(tmp_path / "heard.mp4") == (9, True)


@pytest.mark.full_model
def test_text_to_audio(run: Callable[..., str], tmp_path: Path) -> None:
    run("text_to_audio", *diffusers("stable_audio"), *FEW, "--seconds", "0.1", "rain")
    assert soundfile.info(tmp_path / "sound.wav").frames


def test_text_to_speech(run: Callable[..., str], tmp_path: Path) -> None:
    run("text_to_speech", *stages("qwen3_tts_custom_voice"), "--max-frames", "8", "Hi.", "Who?")
    assert all(soundfile.info(tmp_path / f"{number}.wav").frames for number in (0, 1))


def test_x_to_text(run: Callable[..., str]) -> None:
    ask = ("--image", "photo.png", "--audio", "voice.wav", "--max-tokens", "4", "What is it?")
    _, progress, answer = run("x_to_text", *stages("qwen3_omni_moe"), *ask).rpartition("it/s]")
    assert progress and answer.strip()
