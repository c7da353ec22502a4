# SPDX-License-Identifier: Apache-2.0
"""The examples of `examples/online_serving` run as they are."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import av
import pytest

from tests.entrypoints.conftest import MODEL, LiveServer
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "online_serving"
REALTIME = ROOT / "docs" / "realtime.md"


def run(folder: Path, *command: str) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def samples(path: Path) -> int:
    with av.open(path) as container:
        return sum(frame.samples for frame in container.decode(audio=0))


def test_chat_py(server: LiveServer, tmp_path: Path) -> None:
    assert run(tmp_path, sys.executable, str(EXAMPLES / "chat.py"), "--url", f"{server.url}/v1")
    assert samples(tmp_path / "whole.wav") and samples(tmp_path / "streamed.mp3")


def test_x_to_text(server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(media.encode_image(media.image(64, 48, seed=1)))
    (tmp_path / "voice.wav").write_bytes(media.encode_audio(media.sound(0.5)))
    ask = ("--max-tokens", "4", "--url", f"{server.url}/v1", "What is it?")
    script = str(EXAMPLES / "x_to_text.py")
    assert run(tmp_path, sys.executable, script, *ask, "photo.png", "voice.wav").strip()


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs curl and jq")
def test_chat_sh(server: LiveServer, tmp_path: Path) -> None:
    assert run(tmp_path, str(EXAMPLES / "chat.sh"), server.url)
    assert samples(tmp_path / "story.wav") and samples(tmp_path / "story.mp3")


def converse(server: LiveServer, folder: Path) -> None:
    """Run the program of the document on realtime conversations, with short answers."""
    (code,) = re.findall(r"```python\n(.*?)```", REALTIME.read_text(), re.DOTALL)
    brief = {"max_output_tokens": 8, "sampling_params_list": [{}, {"max_tokens": 24}, {}]}
    for place, here in {
        "http://localhost:8000": server.url,
        "Qwen/Qwen3-Omni-30B-A3B-Instruct": MODEL,
        "response.create()": f"response.create(response={brief})",
    }.items():
        assert place in code
        code = code.replace(place, here)
    run(folder, sys.executable, "-c", code)
    assert samples(folder / "answer.wav")


def test_the_example_of_the_realtime_document(server: LiveServer, tmp_path: Path) -> None:
    converse(server, tmp_path)
