# SPDX-License-Identifier: Apache-2.0
"""The talkers equal transformers': rows, positions, logits, codes."""

import pickle

import pytest
import torch
from transformers import PreTrainedConfig

from tests.models.speech import PIPELINES, Spoken, Talker, ask_transformers, greedy, resolve
from tests.reference.hf_omni import HFOmni, Media
from vllm_omni.models.hf_overrides import talker_config
from vllm_omni.models.interfaces import RowDriven
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

ROUNDING = {"atol": 5e-6, "rtol": 1e-6}
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}


def said(role: str, *parts: dict | str) -> dict:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": role, "content": content}


CHATS = {
    "text": ([said("user", "Hello, how are you?")], Media()),
    "turns": (
        [
            said("system", "Be brief."),
            said("user", "Tell me a story about a fox."),
            said("assistant", "Once upon a time."),
            said("user", "Go on!"),
        ],
        Media(),
    ),
    "media": (
        [
            said("system", "Look and listen."),
            said("user", "See", {"type": "image"}, "this."),
            said("assistant", "Nice."),
            said("user", {"type": "audio"}, "and hear this", {"type": "image"}),
        ],
        Media(
            images=(media.image(64, 48), media.image(48, 64, seed=1)),
            audios=(media.sound(1.0),),
        ),
    ),
}


@pytest.fixture(scope="module", params=CHATS)
def spoken(request: pytest.FixtureRequest, hf: HFOmni) -> Spoken:
    messages, attachments = CHATS[request.param]
    return ask_transformers(
        hf, messages, attachments, max_tokens=12, talker_max_tokens=24, ignore_eos=True
    )


def test_vllm_takes_the_talker_config(talker: Talker, hf: HFOmni) -> None:
    text = hf.config.talker_config.get_text_config()
    config = talker.config
    assert isinstance(talker.model, RowDriven)
    assert config.hf_config.architectures == [type(talker.model).__name__]
    assert config.uses_mrope
    assert not config.is_multimodal_model
    assert config.get_head_size() == text.head_dim
    assert config.get_vocab_size() == text.vocab_size
    assert config.get_inputs_embeds_size() == config.get_hidden_size() == text.hidden_size


def test_override_is_picklable_and_leaves_other_configs_alone() -> None:
    override = pickle.loads(pickle.dumps(talker_config))
    other = PreTrainedConfig(architectures=[""], model_type="dummy_x")
    assert override(other) is other


@pytest.mark.parametrize(("streaming", "chunk"), [(False, 1000), (True, 1000), (True, 7)])
def test_rows(talker: Talker, hf: HFOmni, spoken: Spoken, streaming: bool, chunk: int) -> None:
    rows = resolve(talker, hf, spoken.reference, streaming, chunk)
    torch.testing.assert_close(rows.prompt, spoken.prompt, **ROUNDING)
    torch.testing.assert_close(rows.following, spoken.trailing, **ROUNDING)
    torch.testing.assert_close(talker.model.pad_input(), spoken.pad, **ROUNDING)
    assert talker.model.input_width == rows.prompt.shape[1]


def test_speech(talker: Talker, hf: HFOmni, spoken: Spoken) -> None:
    model, expected = talker.model, spoken.reference.frames
    rows = resolve(talker, hf, spoken.reference, streaming=True)
    fed, frames = rows.prompt, []
    with talker.positions(spoken.positions):
        for step, scores in enumerate(spoken.scores):
            _, hidden = talker.step(model.combine(fed))
            logits = model.compute_logits(hidden[None])[0]
            finite = scores.isfinite()  # the reference was also kept from ending
            torch.testing.assert_close(logits[finite], scores[finite], **TOLERANCE)
            if step == len(expected):
                break
            frame = model.frames(hidden[None], expected[step, :1], greedy(1))
            frames.append(frame.codes[0])
            row = rows.following[step] if step < len(rows.following) else spoken.pad
            fed = torch.cat([fed, (row + frame.inputs[0])[None]])
    assert torch.equal(torch.stack(frames), expected)


def test_free_running_speech(talker: Talker, hf: HFOmni) -> None:
    """Until the talker ends by itself; the end code's frame is dropped."""
    messages, attachments = CHATS["text"]
    spoken = ask_transformers(hf, messages, attachments, max_tokens=64, talker_max_tokens=60)
    assert spoken.reference.talker_finished
    rows = resolve(talker, hf, spoken.reference, streaming=False)
    fed, frames = rows.prompt, []
    while True:
        token, hidden = talker.step(talker.model.combine(fed))
        frame = talker.model.frames(hidden[None], torch.tensor([token]), greedy(1))
        if len(frames) == len(spoken.reference.frames):
            break
        row = rows.following[len(frames)] if len(frames) < len(rows.following) else spoken.pad
        frames.append(frame.codes[0])
        fed = torch.cat([fed, (row + frame.inputs[0])[None]])
    assert torch.equal(torch.stack(frames), spoken.reference.frames)
    assert token in stop_ids(hf)
    assert frame.codes.shape[1] == frames[0].shape[0]


def stop_ids(hf: HFOmni) -> list[int]:
    return PIPELINES[hf.family].talker_constraints(hf.config)["stop_token_ids"]


def test_suppressed_codes(talker: Talker, hf: HFOmni, spoken: Spoken) -> None:
    hidden = torch.randn(3, talker.config.get_hidden_size())
    allowed = talker.model.compute_logits(hidden).isfinite()
    assert allowed[:, stop_ids(hf)].all()
    expected = spoken.scores[0].isfinite()
    expected[stop_ids(hf)] = True
    assert torch.equal(allowed, expected.expand(3, -1))
