# SPDX-License-Identifier: Apache-2.0
"""DAC as Dia's program equals transformers' `DacModel`, streamed and batched (A-65, A-68)."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.diffusion.codecs import cut, encode, random_codes
from tests.diffusion.schedulers import unhurried
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import dia
from vllm_omni.diffusion.programs.code2wav import dia as DIA
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.speech.delay import delayed
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

RATE = 44_100
FRAME = 512
DELAYS = (0, 8, 9, 10, 11, 12, 13, 14, 15)
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=1e-4)

Family = Callable[[str], Path]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Family) -> Loaded:
    return dia.load(LoadContext(str(tiny_checkpoint("dia")), torch.device("cpu")))


@pytest.fixture(scope="module")
def codec(loaded: Loaded) -> dia.Codec:
    module = loaded.components["codec"].module
    assert isinstance(module, dia.Codec)
    return module


def messages(frames: torch.Tensor, policy: ChunkPolicy) -> list[Message]:
    """Windows count frames; rows come before them, and are as many as the longest delay more."""
    rows = delayed(frames, DELAYS, 1026, 1025)[:-1]
    made = cut(frames, policy, 5)
    ahead = max(DELAYS)
    for index, message in enumerate(made):
        start = 0 if index == 0 else message.start + ahead
        stop = message.start + len(message.tensors["codes"]) + ahead
        message.tensors["codes"] = rows[start:stop]
    return made


@pytest.mark.parametrize("policy", [ChunkPolicy(4, 64, 0, 10), ChunkPolicy(1, 10)])
def test_streams_equal_the_one_shot(loaded: Loaded, codec: dia.Codec, policy: ChunkPolicy) -> None:
    engine = Engine(DIA, loaded, scheduler=unhurried())
    codes = {str(n): random_codes(n, 9, n, 1024) for n in (1, 5, 37, 90)}
    streams = {name: iter(messages(frames, policy)) for name, frames in codes.items()}
    for name, feed in streams.items():
        engine.add(name, next(feed))
    made: dict[str, list[torch.Tensor]] = {name: [] for name in codes}
    while engine.has_work or len(engine):
        for name, feed in streams.items():
            if (message := next(feed, None)) is not None:
                engine.receive(name, message)
        for emission in engine.step():
            assert emission.error is None
            if emission.tensors is not None:
                assert emission.meta["sample_rate"] == RATE
                made[emission.request_id].append(emission.tensors["audio"])
    for name, frames in codes.items():
        with torch.inference_mode():
            expected = codec.decode(audio_codes=frames.T[None].long()).audio_values[0]
        assert len(expected) == len(frames) * FRAME
        assert_equal(torch.cat(made[name]), expected)


def test_recordings(loaded: Loaded, codec: dia.Codec) -> None:
    """As the processor encodes them: whole frames, silence at the end."""
    samples = {"a": 100 * FRAME, "b": 100 * FRAME, "c": 100 * FRAME - 7, "d": 130 * FRAME}
    recordings = {
        name: torch.from_numpy(sound(2.0, RATE, seed)[:length])
        for seed, (name, length) in enumerate(samples.items())
    }
    engine = Engine(DIA, loaded, scheduler=unhurried())
    made = encode(engine, {name: {"reference.0": each} for name, each in recordings.items()})
    assert engine.forward_sizes[3] == 1
    for name, recording in recordings.items():
        whole = torch.nn.functional.pad(recording, (0, -len(recording) % FRAME))
        with torch.inference_mode():
            expected = codec.encode(whole[None, None]).audio_codes[0].T
        tensors = made[name].tensors
        assert tensors is not None and tensors["codes"].dtype == torch.int32
        assert torch.equal(tensors["codes"].long(), expected)
        assert made[name].meta["frames"] == len(expected) == len(whole) // FRAME
        assert len(tensors["codes"].unique()) > 10


def test_nothing_decodes_to_nothing(loaded: Loaded) -> None:
    engine = Engine(DIA, loaded)
    engine.add("r", Message(final=True))
    (end,) = engine.step()
    assert end.finished and end.error is None and end.tensors is None


@pytest.mark.parametrize("name", dia.DESCRIPTIONS)
def test_where_the_codec_is(tiny_checkpoint: Family, tmp_path: Path, name: str) -> None:
    """Its own folder, what the processor's config names, or the published one."""
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dia"), model)
    ctx = LoadContext(str(model), torch.device("cpu"), revision="abc")
    assert dia.codec_place(ctx) == (ctx, "audio_tokenizer")
    elsewhere = shutil.move(model / "audio_tokenizer", tmp_path / "codec")
    place, folder = dia.codec_place(ctx)
    assert (place.model, place.revision, folder) == ("descript/dac_44khz", None, "")
    named = {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": str(elsewhere)}
    content = {"audio_tokenizer": named} if name == "processor_config.json" else named
    (model / name).write_text(json.dumps(content))
    assert dia.codec_place(ctx)[0].model == str(elsewhere)
    assert dia.load(ctx).assets["delays"] == DELAYS


def test_a_codec_that_does_not_fit(tiny_checkpoint: Family, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dia"), model)
    file = model / "audio_tokenizer" / "config.json"
    config = json.loads(file.read_text())
    for key, value, says in (
        ("n_codebooks", 8, "makes 9 codes per frame"),
        ("downsampling_ratios", [2, 4, 8, 5], "should be even"),
    ):
        file.write_text(json.dumps({**config, key: value}))
        with pytest.raises(OmniConfigError, match=says):
            dia.load(LoadContext(str(model), torch.device("cpu")))
    with pytest.raises(OmniConfigError, match="no Dia"):
        dia.load(LoadContext(str(tiny_checkpoint("csm")), torch.device("cpu")))
