# SPDX-License-Identifier: Apache-2.0
"""The examples that begin with a picture or make sound beside a video, at one server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import av
import pytest

from tests.entrypoints.generation import KEY, GenerationServer, generation_server, png

pytestmark = [pytest.mark.advanced_model, pytest.mark.cpu, pytest.mark.diffusion]

EXAMPLES = Path(__file__).parents[2] / "examples" / "online_serving"
SMALL = ("--size", "32x32", "--frames", "9", "--fps", "8", "--steps", "2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationServer]:
    folder = tmp_path_factory.mktemp("filmer")
    storage = ("--video-storage-path", str(folder / "videos"))
    with generation_server("ltx2", folder, *storage) as it:
        yield it


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("image_to_video", ("photo.png", "it moves")),
        ("x_to_video_audio", ("a drum", "--image", "photo.png")),
        ("x_to_video_audio", ("a drum",)),
    ],
)
def test_an_example(
    server: GenerationServer, tmp_path: Path, name: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "photo.png").write_bytes(png())
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments, *SMALL]
    env = {**os.environ, "OPENAI_API_KEY": KEY}
    command += ["--url", f"{server.url}/v1", "--out", "film.mp4"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=120)
    with av.open(tmp_path / "film.mp4") as film:
        assert sum(1 for _ in film.decode(video=0)) == 9
        assert film.streams.audio
    assert list((server.temporary.parent / "videos").rglob("*.mp4")) == []
