# SPDX-License-Identifier: Apache-2.0
"""The model of docs/design/adding_a_model.md, added from outside as the page tells it."""

import io
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile
import torch
from transformers import AutoTokenizer, VitsModel

from vllm_omni.testing.server import OmniServer

pytestmark = [pytest.mark.advanced_model, pytest.mark.cpu, pytest.mark.tts, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "adding_a_model"
TEXTS = ("hello there", "who is it?", "hello there")
FULL_SCALE = 32767
HALF_A_STEP = 0.5 + 1e-3
"""What rounding to 16 bits changes at most, and float32's own error at full scale."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vits")
    runpy.run_path(str(EXAMPLE / "tiny.py"))["main"](folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniServer]:
    folder = tmp_path_factory.mktemp("plugin")
    # What `pip install examples/adding_a_model` writes, in a folder of its own.
    about = folder / "mms_tts_for_vllm_omni-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mms-tts-for-vllm-omni\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nmms_tts = mms_tts:register\n")
    path = os.pathsep.join([str(ROOT), str(folder), str(EXAMPLE)])
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with OmniServer(checkpoint, log=folder / "log.txt", env=env) as it:
        yield it


def speak(server: OmniServer, text: str, **fields: Any) -> httpx.Response:
    body = {"input": text, "seed": 3, **fields}
    return httpx.post(f"{server.url}/v1/audio/generate", json=body, timeout=60)


def test_it_says_what_its_reference_says(server: OmniServer, checkpoint: Path) -> None:
    model = VitsModel.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for text in TEXTS:
        samples, rate = soundfile.read(io.BytesIO(speak(server, text).content), dtype="int16")
        torch.manual_seed(3)
        with torch.inference_mode():
            wanted = model(**tokenizer(text, return_tensors="pt")).waveform[0]
        assert rate == model.config.sampling_rate and wanted.std() > 0.1
        scaled = wanted * FULL_SCALE
        torch.testing.assert_close(
            torch.from_numpy(samples).float(), scaled, atol=HALF_A_STEP, rtol=0
        )


def test_what_it_does_not_know_is_refused(server: OmniServer) -> None:
    reply = speak(server, "hello", speling=1)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "speling")


def test_the_page_shows_the_whole_of_it() -> None:
    page = (ROOT / "docs" / "design" / "adding_a_model.md").read_text()
    for name in ("mms_tts.py", "tiny.py", "pyproject.toml"):
        assert f'--8<-- "examples/adding_a_model/{name}"' in page
