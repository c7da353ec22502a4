# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints have the properties that make them good stand-ins for real ones."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from tests.reference.hf_omni import MODELS, HFOmni, Media, Reference
from vllm_omni.testing import media
from vllm_omni.testing.tiny import build

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

PROMPTS = [
    "Hello, how are you?",
    "Tell me a story about a fox.",
    "1+1=?",
    "你好，请介绍一下你自己。",
]
MARGIN = 1e-3


def ask(*parts: dict) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def text(value: str) -> dict:
    return {"type": "text", "text": value}


@pytest.fixture(scope="module", params=sorted(MODELS))
def reference(request, tmp_path_factory) -> HFOmni:
    return HFOmni(build(request.param, tmp_path_factory.mktemp("tiny") / request.param))


@pytest.fixture(scope="module")
def answers(reference: HFOmni) -> list[Reference]:
    return [
        reference.run(ask(text(prompt)), max_tokens=64, talker_max_tokens=100) for prompt in PROMPTS
    ]


def test_build_is_idempotent_and_deterministic(tmp_path: Path) -> None:
    first = build("qwen2_5_omni", tmp_path / "a")
    written = os.stat(first / "model.safetensors").st_mtime_ns
    assert build("qwen2_5_omni", first) == first
    assert os.stat(first / "model.safetensors").st_mtime_ns == written
    other = build("qwen2_5_omni", tmp_path / "b")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (first / name).read_bytes() == (other / name).read_bytes()
    reseeded = build("qwen2_5_omni", other, seed=1)
    weights = (reseeded / "model.safetensors").read_bytes()
    assert weights != (first / "model.safetensors").read_bytes()


def test_build_refuses_a_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        build("qwen2_5_omni", tmp_path)
    with pytest.raises(ValueError, match="unknown family"):
        build("qwen9", tmp_path / "out")


def test_layout(reference: HFOmni) -> None:
    path = reference.path
    names = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert names <= {entry.name for entry in path.iterdir()}
    assert (path / "spk_dict.pt").exists() == (reference.family == "qwen2_5_omni")
    config = AutoConfig.from_pretrained(path)
    assert json.loads((path / "config.json").read_text())["architectures"] == config.architectures
    assert AutoProcessor.from_pretrained(path).tokenizer.chat_template


def test_tokenizer(reference: HFOmni) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference.path)
    sample = "Hi, wörld!\n\t你好 🎉  \x00 ßẞ 1234"
    assert tokenizer.decode(tokenizer(sample).input_ids) == sample
    for role in ("system", "user", "assistant"):
        assert len(tokenizer(role).input_ids) == 1
    assert tokenizer.eos_token == "<|im_end|>"


def test_chat_template(reference: HFOmni) -> None:
    prompt = reference.prompt(
        [
            *ask({"type": "image"}, {"type": "audio"}, text("What?"), {"type": "video"}),
            {"role": "assistant", "content": "That."},
            *ask(text("And now?")),
        ]
    )
    tokenizer = reference.processor.tokenizer
    vision = tokenizer.vision_bos_token, tokenizer.vision_eos_token
    image = vision[0] + tokenizer.image_token + vision[1]
    audio = tokenizer.audio_bos_token + tokenizer.audio_token + tokenizer.audio_eos_token
    video = vision[0] + tokenizer.video_token + vision[1]
    system = ""
    if reference.family == "qwen2_5_omni":
        system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert prompt == (
        f"{system}<|im_start|>user\n{image}{audio}What?{video}<|im_end|>\n"
        "<|im_start|>assistant\nThat.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_codec_relations(reference: HFOmni) -> None:
    config = reference.config
    talker = config.talker_config
    if reference.family == "qwen2_5_omni":
        dit = config.token2wav_config.dit_config
        assert talker.embedding_size == config.thinker_config.text_config.hidden_size
        assert talker.hidden_size != talker.embedding_size
        assert dit.num_embeds <= talker.tts_codec_pad_token_id < talker.vocab_size
        voices = torch.load(reference.path / "spk_dict.pt", weights_only=True)
        assert set(voices) == {"Chelsie", "Ethan"}
        assert voices["Chelsie"]["bos_token"] != voices["Ethan"]["bos_token"]
        return
    codes = talker.text_config.vocab_size - 1024
    special = [talker.codec_eos_token_id, talker.codec_pad_id, talker.codec_bos_id]
    assert all(codes <= i < talker.text_config.vocab_size for i in special)
    assert codes == talker.code_predictor_config.vocab_size == config.code2wav_config.codebook_size
    assert talker.num_code_groups == config.code2wav_config.num_quantizers
    assert talker.code_predictor_config.hidden_size == talker.text_config.hidden_size
    assert talker.text_config.hidden_size != talker.thinker_hidden_size
    vision = config.thinker_config.vision_config
    assert talker.accept_hidden_layer > len(vision.deepstack_visual_indexes)
    assert set(talker.speaker_id) == {"ethan", "chelsie", "aiden"}


def test_replies_vary_and_some_end(reference: HFOmni, answers: list[Reference]) -> None:
    ends = [answer.token_ids[-1] == reference.end_token_id for answer in answers]
    assert any(ends)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)
    for answer in answers:
        assert len(answer.token_ids) > 1
        assert len(set(answer.token_ids)) > 2
        assert "\ufffd" not in answer.text
        assert answer.hidden.isfinite().all() and answer.hidden.abs().max() < 100


def test_speech_varies_and_some_ends(answers: list[Reference]) -> None:
    finished = [answer for answer in answers if answer.talker_finished]
    assert any(len(answer.frames) >= 10 for answer in finished)
    for answer in answers:
        assert len(answer.frames.unique(dim=0)) > len(answer.frames) // 4


def test_margins_are_safe(answers: list[Reference]) -> None:
    for answer in answers:
        assert min(answer.margins.values()) > MARGIN, answer.margins


def test_waveform_level(reference: HFOmni, answers: list[Reference]) -> None:
    for answer in answers:
        assert 0.02 < float(answer.waveform.std()) < 0.5
        assert float((answer.waveform.abs() >= 1).float().mean()) < 0.01


def test_one_shot_decode_equals_generate(reference: HFOmni, answers: list[Reference]) -> None:
    wave = reference.waveform_one_shot(answers[0].frames, speaker="Chelsie", noise_seed=0)
    torch.testing.assert_close(wave, answers[0].waveform, atol=1e-5, rtol=0)


def test_decoding_with_25_frames_of_context_is_exact(reference: HFOmni) -> None:
    if reference.family != "qwen3_omni_moe":
        pytest.skip("token2wav of Qwen2.5 is not causal")
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(2048, (60, 4), generator=generator)
    whole = reference.waveform_one_shot(frames)
    window = reference.waveform_one_shot(frames[40 - 25 :])
    torch.testing.assert_close(window[25 * 1920 :], whole[40 * 1920 :], atol=1e-5, rtol=0)


def test_rows_cover_the_fed_tokens(answers: list[Reference]) -> None:
    for answer in answers:
        fed = len(answer.prompt_token_ids) + len(answer.token_ids) - 1
        assert answer.embeds.shape[0] == answer.hidden.shape[0] == fed


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
def test_media_matter(reference: HFOmni, modality: str) -> None:
    make = {
        "image": lambda seed: Media(images=[media.image(96, 64, seed)]),
        "audio": lambda seed: Media(audios=[media.sound(1.5, seed=seed)]),
        "video": lambda seed: Media(videos=[media.video(4, 64, 64, seed)]),
    }[modality]
    messages = ask({"type": modality}, text("What is this?"))
    first, second = (
        reference.run(messages, make(seed), max_tokens=8, talker_max_tokens=8) for seed in (1, 2)
    )
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.token_ids != second.token_ids
    assert first.frames.tolist() != second.frames.tolist()


def test_speakers_differ(reference: HFOmni) -> None:
    voices = [
        reference.run(ask(text(PROMPTS[0])), speaker=speaker, max_tokens=8, talker_max_tokens=8)
        for speaker in ("Chelsie", "Ethan")
    ]
    assert voices[0].token_ids == voices[1].token_ids
    assert voices[0].frames.tolist() != voices[1].frames.tolist()
