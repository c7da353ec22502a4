# SPDX-License-Identifier: Apache-2.0
"""Dia's prompts against transformers' processor, and the sizes of its sequences (I-17)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DiaConfig
from vllm.tokenizers import get_tokenizer

from tests.reference.dia import LONGEST_DELAY, RATE, HFDia
from vllm_omni.config.build import build_plan
from vllm_omni.config.checkpoint import load_hf_config
from vllm_omni.config.devices import Host
from vllm_omni.errors import OmniConfigError
from vllm_omni.models.hf_overrides import talker_config
from vllm_omni.pipelines.dia import Dia
from vllm_omni.speech.family import NOTHING
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

TINY = Callable[[str], Path]
PAD = 1025


@pytest.mark.parametrize("text", ["[S1] Hello. [S2] Grüße, 你好!", " [S2] Yes (laughs)", "Plain."])
@pytest.mark.parametrize("cloned", [False, True])
def test_prompts_are_the_processors(tiny_checkpoint: TINY, text: str, cloned: bool) -> None:
    model = tiny_checkpoint("dia")
    reference = HFDia(model)
    recording = sound(1.003, RATE, 4) if cloned else None
    marked = text if "[S" in text else f"[S1] {text}"
    words = f"[S1] Before. {text}" if cloned else marked
    expected = reference.processor(text=[words], audio=recording, sampling_rate=RATE)
    rows = expected["decoder_input_ids"][0]
    heard = reference.processor.get_audio_prompt_len(expected["decoder_attention_mask"])
    references, encoded = (), []
    if recording is not None:
        references = (Reference(recording, RATE, "[S1] Before."),)
        encoded = [{"codes": rows.new_tensor(codes_of(rows, heard)).int()}]
    family = Dia(load_hf_config(str(model)), str(model), get_tokenizer(str(model)))
    prompt = family.prompt(SpeechRequest(text=text, references=references), encoded)

    ids = expected["input_ids"][0].tolist()
    lanes = 2
    positions = lanes * len(ids)
    assert prompt.text[:positions].tolist() == [i for i in ids for _ in range(lanes)]
    assert (prompt.text[positions:] == NOTHING).all()
    assert (prompt.codes[:positions] == NOTHING).all()
    assert prompt.length == positions + heard
    # Where the processor has padding, the model draws.
    assert torch.equal(prompt.codes[positions:], torch.where(rows == PAD, NOTHING, rows).long())
    assert len(prompt.codes) == prompt.length + LONGEST_DELAY


def codes_of(rows: torch.Tensor, heard: int) -> list[list[int]]:
    """The recording's frames, out of the processor's rows."""
    delays = (0, 8, 9, 10, 11, 12, 13, 14, 15)
    return [[int(rows[i + d, k]) for k, d in enumerate(delays)] for i in range(1, heard)]


def test_sequences_of_the_released_checkpoint() -> None:
    """Two streams of 16 heads of 128 numbers, and 5 kinds of queries; 4 positions per byte."""
    talker = talker_config(DiaConfig(architectures=["DiaForConditionalGeneration"]))
    assert (talker.num_attention_heads, talker.num_key_value_heads, talker.head_dim) == (32, 8, 160)
    assert talker.max_position_embeddings == 4 * 1024 + 3072
    assert talker.projection_dim == 2048 + 2 * 1024 + 4
    assert talker.vocab_size == 1029
    assert talker_config(talker) is talker


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("decoder_config.cross_head_dim", 32, "should equal decoder_config.head_dim, which is 16"),
        ("decoder_config.cross_num_attention_heads", 8, "should equal .*num_attention_heads"),
        ("decoder_config.cross_hidden_size", 48, "should equal encoder_config.hidden_size"),
        ("decoder_config.cross_num_key_value_heads", 3, "should be a multiple"),
        ("decoder_config.eos_token_id", 1028, "from 0 to 1027"),
        ("delay_pattern", [0, 9, 8, 10, 11, 12, 13, 14, 15], "should ascend from 0"),
    ],
)
def test_configs(tiny_checkpoint: TINY, tmp_path: Path, path: str, value: Any, says: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dia"), model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    *sections, name = path.split(".")
    section = config
    for each in sections:
        section = section[each]
    section[name] = value
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(OmniConfigError, match=says):
        build_plan(str(model), host=Host.current())


def test_a_checkpoint_without_its_tokenizer(tiny_checkpoint: TINY, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dia"), model)
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(OmniConfigError, match=r"it has no tokenizer_config\.json"):
        build_plan(str(model), host=Host.current())
