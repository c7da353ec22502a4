# SPDX-License-Identifier: Apache-2.0
"""What Voxtral TTS makes of a checkpoint in Mistral's layout (B-M71)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mistral_common.protocol.speech.request import SpeechRequest as MistralRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as MistralCommon
from vllm.tokenizers import get_tokenizer

from vllm_omni.config.build import build_plan
from vllm_omni.config.checkpoint import load_hf_config
from vllm_omni.config.devices import Host
from vllm_omni.errors import OmniConfigError
from vllm_omni.pipelines.voxtral_tts import VoxtralTTS
from vllm_omni.speech.family import NOTHING
from vllm_omni.speech.request import SpeechRequest

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

TINY = Callable[[str], Path]


def family(model: Path) -> VoxtralTTS:
    return VoxtralTTS(load_hf_config(str(model)), str(model), get_tokenizer(str(model)))


@pytest.fixture
def copy(tiny_checkpoint: TINY, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("voxtral_tts_voices_only"), folder)
    return folder


@pytest.mark.parametrize("voice", ["casual_male", "neutral_female"])
@pytest.mark.parametrize("text", ["Hello.", "Grüße, 你好! [AUDIO]"])
def test_prompts_are_mistral_commons(tiny_checkpoint: TINY, voice: str, text: str) -> None:
    model = tiny_checkpoint("voxtral_tts")
    common = MistralCommon.from_file(model / "tekken.json")
    ids = common.encode_speech_request(MistralRequest(input=text, voice=voice)).tokens
    prompt = family(model).prompt(SpeechRequest(text=text, voice=voice), [])
    heard = torch.load(model / "voice_embedding" / f"{voice}.pt")
    assert [i for i in prompt.text.tolist() if i != NOTHING] == [i for i in ids if i != 24]
    assert [position for position, token in enumerate(ids) if token == 24] == list(prompt.vectors)
    assert torch.equal(torch.stack(list(prompt.vectors.values())), heard.float())
    assert prompt.length == len(ids)
    assert (prompt.codes == NOTHING).all()


def test_what_is_offered(tiny_checkpoint: TINY) -> None:
    """Published checkpoints cannot encode recordings."""
    offer = family(tiny_checkpoint("voxtral_tts_voices_only")).offer
    assert offer.voices == ("neutral_female", "casual_male")
    assert offer.max_references == 0
    assert family(tiny_checkpoint("voxtral_tts")).offer.max_references == 1


class Boom:
    """Runs code when it is unpickled by a reader that trusts the file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/vllm-omni-pickle-ran"),))


@pytest.mark.parametrize(
    ("voice", "says"),
    [
        (None, "it has no voice_embedding/casual_male.pt"),
        (b"garbage", "cannot be read as a tensor"),
        (Boom(), "cannot be read as a tensor"),
        ({"voice": torch.ones(3, 64)}, "should be a tensor"),
        (torch.ones(3, 32), "should be a tensor"),
        (torch.ones(0, 64), "should have frames"),
        (torch.full((3, 64), torch.nan), "should have frames, of finite numbers"),
    ],
    ids=["none", "garbage", "code", "mapping", "width", "empty", "nan"],
)
def test_voices_that_are_none(copy: Path, voice: Any, says: str) -> None:
    file = copy / "voice_embedding" / "casual_male.pt"
    file.unlink()
    if isinstance(voice, bytes):
        file.write_bytes(voice)
    elif voice is not None:
        torch.save(voice, file)
    with pytest.raises(OmniConfigError, match=says):
        build_plan(str(copy), host=Host.current())
    assert not Path("/tmp/vllm-omni-pickle-ran").exists()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("audio_tokenizer_args", None, "multimodal.audio_tokenizer_args is missing"),
        ("audio_tokenizer_args.acoustic_dim", 5, "should equal .*n_acoustic_codebook, which is 6"),
        ("audio_tokenizer_args.semantic_codebook_size", 99, "should equal .*which is 96"),
        ("audio_tokenizer_args.decoder_convs_strides_str", "1,1,1,2", "should be at least"),
        ("audio_tokenizer_args.causal", False, "the codec is causal and mono"),
        ("audio_tokenizer_args.voice", {"../x": 0}, "should be the name of a file"),
        ("audio_model_args.acoustic_transformer_args.input_dim", 32, "should equal dim"),
        ("audio_model_args.acoustic_transformer_args.n_heads", "x", "n_heads"),
    ],
)
def test_params(copy: Path, path: str, value: Any, says: str) -> None:
    file = copy / "params.json"
    params = json.loads(file.read_text())
    *sections, name = path.split(".")
    section = params["multimodal"]
    for each in sections:
        section = section[each]
    section[name] = value
    file.write_text(json.dumps(params))
    with pytest.raises(OmniConfigError, match=says):
        build_plan(str(copy), host=Host.current())


def test_codebook_sizes_may_be_one_text(copy: Path) -> None:
    file = copy / "params.json"
    params = json.loads(file.read_text())
    codes = params["multimodal"]["audio_model_args"]
    expected = load_hf_config(str(copy)).code_sizes
    del codes["semantic_codebook_size"], codes["acoustic_codebook_size"]
    del codes["n_acoustic_codebook"]
    codes["codebook_sizes"] = "96,21,21,21,21,21,21"
    file.write_text(json.dumps(params))
    assert load_hf_config(str(copy)).code_sizes == expected == (98, *[23] * 6)
