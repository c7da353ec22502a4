# SPDX-License-Identifier: Apache-2.0
"""The edges of the speech pipelines: whatever the chunking, the same rows in the same order."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig, Qwen2_5OmniConfig, Qwen3OmniMoeConfig

from vllm_omni.config.pipeline import EdgeContext, EdgeState
from vllm_omni.errors import OmniClientError, OmniGenerateError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.handles import RowSpan, TensorHandle
from vllm_omni.inputs import ProgramInput, RowInput, RowPrompt
from vllm_omni.outputs import TokenOutput
from vllm_omni.pipelines import qwen2_5_omni, qwen3_omni_moe
from vllm_omni.pipelines.speakers import SPEAKERS_FILE
from vllm_omni.pipelines.speech import CodecEdge

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

IM_START, USER, ASSISTANT, SYSTEM, TEXT, MEDIA = 1, 2, 3, 4, 5, 6
REPLY_HEAD = [IM_START, ASSISTANT, TEXT]
CODEC_END = 2150
CHUNKS = {"initial_codec_chunk_frames": 2, "codec_chunk_frames": 4, "codec_left_context_frames": 3}


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, PretrainedConfig]:
    folder = tmp_path_factory.mktemp("speakers")
    voice = {"cond": torch.zeros(1, 2), "ref_mel": torch.zeros(1, 3, 4)}
    torch.save(
        {"Ethan": {"bos_token": 506, **voice}, "Chelsie": {"bos_token": 508, **voice}},
        folder / SPEAKERS_FILE,
    )
    qwen3 = Qwen3OmniMoeConfig(
        thinker_config={"audio_token_id": MEDIA, "image_token_id": 7, "video_token_id": 8},
        talker_config={
            "speaker_id": {"chelsie": 2301, "ethan": 2302},
            "codec_eos_token_id": CODEC_END,
        },
        im_start_token_id=IM_START,
        user_token_id=USER,
        assistant_token_id=ASSISTANT,
    )
    qwen2_5 = Qwen2_5OmniConfig(
        thinker_config={"audio_token_index": MEDIA, "image_token_index": 7, "video_token_index": 8}
    )
    qwen2_5.name_or_path = str(folder)
    return {"qwen3_omni_moe": qwen3, "qwen2_5_omni": qwen2_5}


FAMILIES = {"qwen3_omni_moe": qwen3_omni_moe, "qwen2_5_omni": qwen2_5_omni}


def context(config: PretrainedConfig, streaming: bool, voice: str | None = None) -> EdgeContext:
    model = config.name_or_path
    return EdgeContext(model=model, config=config, voice=voice, streaming=streaming, extra=CHUNKS)


def span(start: int, stop: int) -> RowSpan:
    """Rows [start, stop); the row of position p stands for the number p."""
    return RowSpan(start, stop - start, TensorHandle(key=f"r/thinker/{start}", nbytes=0))


@dataclass
class Heard:
    """What a talker is given over its whole life."""

    token_ids: list[int]
    rows: list[int]
    kinds: bytes


def replay(edge: EdgeState, outputs: Sequence[TokenOutput]) -> tuple[Heard | None, list[int]]:
    """Feed a request's outputs; resolve its messages' indices to thinker positions.

    Also returns how many talker positions were known after each output.
    """
    heard: Heard | None = None
    used: list[RowSpan] = []
    progress, final = [], False
    for output in outputs:
        message = edge.feed(output)
        if message is not None:
            assert not final, "nothing may follow the final message"
            if heard is None:
                assert isinstance(message, RowPrompt)
                rows, heard = message.rows, Heard(message.token_ids, [], b"")
                assert len(rows.index) >= len(message.token_ids)
            else:
                assert isinstance(message, RowInput)
                rows = message
            assert len(rows.kinds) == len(rows.index)
            values = [p for s in rows.spans for p in range(s.start, s.stop)]
            heard.rows += [-1 if i == -1 else values[i] for i in rows.index]
            heard.kinds += rows.kinds
            used += rows.spans
            final = rows.final
        progress.append(0 if heard is None else len(heard.rows))
    assert len(set(map(id, used))) == len(used), "a span may be read only once"
    assert heard is None or final
    return heard, progress


@dataclass
class Life:
    """A thinker request: prompt, number of sampled tokens, and its outputs in order."""

    prompt: list[int]
    tokens: int
    outputs: list[TokenOutput]


@st.composite
def lives(draw: st.DrawFn) -> Life:
    prompt: list[int] = draw(st.lists(st.sampled_from([TEXT, MEDIA]), max_size=3))
    for _ in range(draw(st.integers(0, 4))):
        role = draw(st.sampled_from([SYSTEM, USER, ASSISTANT]))
        body = draw(st.lists(st.sampled_from([TEXT, MEDIA]), min_size=1, max_size=6))
        prompt += [IM_START, role, *(body if role == USER else [TEXT] * len(body))]
    prompt += REPLY_HEAD + [TEXT] * draw(st.integers(0, 3))
    tokens = draw(st.integers(1, 8))
    fed = len(prompt) + tokens - 1
    # Each step feeds some prompt positions, or one sampled token; the last prompt chunk samples.
    cuts = sorted(draw(st.sets(st.integers(1, len(prompt)), max_size=4)) | {len(prompt)})
    steps = [*zip([0, *cuts[:-1]], cuts, strict=True)]
    steps += [(p, p + 1) for p in range(len(prompt), fed)]
    outputs: list[TokenOutput] = []
    spans: list[RowSpan] = []
    sampled = 0
    for start, stop in steps:
        if start and draw(st.integers(0, 9)) == 0:
            # Preempted: what was computed is computed, and emitted, again.
            again = draw(st.integers(1, start))
            spans += [span(0, again)] + ([span(again, stop)] if again < stop else [])
        else:
            spans.append(span(start, stop))
        sampled += stop >= len(prompt)
        last = stop == fed
        if last and draw(st.booleans()):
            spans.append(span(stop, stop + 1))  # the runner had gone one step further
        if not last and draw(st.integers(0, 3)) == 0:
            continue  # outputs are merged
        before = sum(len(o.new_token_ids) for o in outputs)
        outputs.append(
            TokenOutput(
                request_id="r",
                new_token_ids=[TEXT] * (sampled - before),
                prompt_token_ids=prompt if not outputs else None,
                spans=tuple(spans),
                finished=last,
                finish_reason="stop" if last else None,
            )
        )
        spans = []
    return Life(prompt, tokens, outputs)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=300, deadline=None)
@given(life=lives())
def test_rows_do_not_depend_on_chunking(family: str, configs, life: Life) -> None:
    start = FAMILIES[family].thinker_to_talker
    whole, _ = replay(start(context(configs[family], streaming=False)), life.outputs)
    streamed, progress = replay(start(context(configs[family], streaming=True)), life.outputs)
    assert streamed == whole

    fed = len(life.prompt) + life.tokens - 1
    if family == "qwen2_5_omni":
        expected = [*range(len(life.prompt)), -1, *range(len(life.prompt), fed), -1]
        first_text = len(life.prompt)
    else:
        starts = [i for i, token in enumerate(life.prompt) if token == IM_START]
        user = [
            p
            for p in range(len(life.prompt))
            if life.prompt[max([s for s in starts if s <= p], default=0) + 1] == USER
        ]
        reply = max(i for i in starts if life.prompt[i + 1] == ASSISTANT)
        first_text = reply + 3
        head = [*user, reply, reply + 1, reply + 2, *[-1] * 5]
        expected = [*head, *range(first_text, fed), -1]
    if fed <= first_text:
        assert whole is None
        return
    assert whole is not None
    assert whole.rows == expected
    # Streaming is as early as can be: everything that could be said was said at each output.
    known = tokens = 0
    for output, said in zip(life.outputs, progress, strict=True):
        known = max([known, *(s.stop for s in output.spans)])
        tokens += len(output.new_token_ids)
        sayable = min(known, len(life.prompt) + max(tokens - 1, 0))
        if output.finished:
            assert said == len(expected)
        elif sayable > first_text:
            assert said == expected.index(sayable - 1, len(expected) - (fed - first_text) - 1) + 1


def test_qwen3_prompt_layout(configs) -> None:
    config = configs["qwen3_omni_moe"]
    prompt = [IM_START, SYSTEM, TEXT, IM_START, USER, MEDIA, TEXT, *REPLY_HEAD]
    plan = qwen3_omni_moe.talker_plan(config, "Chelsie", prompt)
    kind, flag, talker = qwen3_omni_moe.RowKind, qwen3_omni_moe.CODEC_FLAG, config.talker_config
    assert plan.rows == [3, 4, 5, 6, 7, 8, 9, -1, -1, -1, -1, -1, 10]
    assert plan.kinds == bytes(
        [kind.TEXT, kind.TEXT, kind.MEDIA, *[kind.TEXT] * 4]
        + [kind.TTS_PAD | flag] * 4
        + [kind.TTS_BOS | flag, kind.TEXT | flag]
    )
    assert plan.token_ids[:7] == [talker.codec_pad_id] * 7
    assert plan.token_ids[7:] == [
        talker.codec_nothink_id,
        talker.codec_think_bos_id,
        talker.codec_think_eos_id,
        2301,
        talker.codec_pad_id,
        talker.codec_bos_id,
    ]
    default = qwen3_omni_moe.talker_plan(config, None, prompt)
    assert default.token_ids[10] == 2302


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("shown", "said"), [([0, 0, 1, 2, 3], 3), ([0, 0, 0, 0, 2], 2)])
def test_only_what_the_text_shows_is_said(
    family: str, streaming: bool, shown: list[int], said: int, configs
) -> None:
    """A stop string takes the last tokens from the text after they were sampled."""
    prompt = [IM_START, USER, TEXT, *REPLY_HEAD]
    stops = range(len(prompt), len(prompt) + len(shown))
    outputs = [
        TokenOutput(
            request_id="r",
            new_token_ids=[TEXT],
            prompt_token_ids=prompt if i == 0 else None,
            shown_tokens=shown[i],
            spans=(span(stop - 1 if i else 0, stop),),
            finished=i == len(shown) - 1,
        )
        for i, stop in enumerate(stops)
    ]
    edge = FAMILIES[family].thinker_to_talker(context(configs[family], streaming))
    heard, _ = replay(edge, outputs)
    assert heard is not None
    assert heard.rows[-said - 1 :] == [*range(len(prompt), len(prompt) + said), -1]


def test_nothing_shown_is_nothing_said(configs) -> None:
    edge = qwen3_omni_moe.thinker_to_talker(context(configs["qwen3_omni_moe"], streaming=True))
    prompt = [IM_START, USER, TEXT, *REPLY_HEAD]
    for i in range(3):
        output = TokenOutput(
            request_id="r",
            new_token_ids=[TEXT],
            prompt_token_ids=prompt if i == 0 else None,
            shown_tokens=0,
            spans=(span(len(prompt) + i - 1 if i else 0, len(prompt) + i),),
            finished=i == 2,
        )
        assert edge.feed(output) is None


def test_qwen3_needs_a_chat_prompt(configs) -> None:
    edge = qwen3_omni_moe.thinker_to_talker(context(configs["qwen3_omni_moe"], streaming=True))
    with pytest.raises(OmniClientError, match="chat template"):
        edge.feed(TokenOutput(request_id="r", new_token_ids=[], prompt_token_ids=[TEXT, TEXT]))


def test_lost_rows_are_an_error(configs) -> None:
    edge = qwen2_5_omni.thinker_to_talker(context(configs["qwen2_5_omni"], streaming=True))
    first = TokenOutput(
        request_id="r", new_token_ids=[9], prompt_token_ids=[TEXT] * 4, spans=(span(0, 4),)
    )
    assert edge.feed(first) is None
    with pytest.raises(OmniGenerateError, match="never arrived"):
        edge.feed(TokenOutput(request_id="r", new_token_ids=[9], spans=(span(5, 6),)))


def test_qwen2_5_speakers(configs) -> None:
    config = configs["qwen2_5_omni"]
    assert qwen2_5_omni.voices(config, config.name_or_path) == ("Ethan", "Chelsie")
    for voice, number in ((None, 1), ("chelsie", 1), ("Ethan", 0)):
        edge = qwen2_5_omni.thinker_to_talker(context(config, streaming=False, voice=voice))
        heard, _ = replay(
            edge,
            [
                TokenOutput(
                    request_id="r",
                    new_token_ids=[9, 9],
                    prompt_token_ids=[TEXT] * 4,
                    spans=(span(0, 5),),
                    finished=True,
                    finish_reason="stop",
                )
            ],
        )
        assert heard is not None
        assert heard.kinds[4] == qwen2_5_omni.RowKind.SPEAKER + number | qwen2_5_omni.CODEC_FLAG


def codes(start: int, stop: int) -> RowSpan:
    return RowSpan(start, stop - start, TensorHandle(key=f"r/talker/{start}", nbytes=0))


def decode(edge: EdgeState, tokens: list[int], reason: str, sizes: list[int]) -> list[ProgramInput]:
    """Feed a talker's tokens in outputs of the given sizes."""
    messages, done = [], 0
    for size in sizes:
        stop = min(done + size, len(tokens))
        last = stop == len(tokens)
        message = edge.feed(
            TokenOutput(
                request_id="r",
                new_token_ids=tokens[done:stop],
                prompt_token_ids=[0] if not done else None,
                spans=tuple(codes(i, i + 1) for i in range(done, stop)),
                finished=last,
                finish_reason=reason if last else None,
            )
        )
        if message is not None:
            messages.append(message)
        done = stop
        if last:
            return messages
    raise AssertionError("sizes do not cover the tokens")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("streaming", [True, False])
@settings(max_examples=100, deadline=None)
@given(frames=st.integers(0, 40), sizes=st.lists(st.integers(1, 5), min_size=41, max_size=41))
def test_windows_cover_the_frames_that_sound(
    family: str, reason: str, streaming: bool, configs, frames: int, sizes: list[int]
) -> None:
    config = configs[family]
    module = FAMILIES[family]
    ends = module.talker_constraints(config)["stop_token_ids"]
    tokens = [7] * frames + ([ends[-1]] if reason == "stop" else [])
    if not tokens:
        return
    edge = module.talker_to_code2wav(context(config, streaming))
    messages = decode(edge, tokens, reason, sizes)
    sounding = frames
    if reason == "length" and family == "qwen3_omni_moe":
        sounding -= 1
    if sounding == 0:
        assert messages == []
        return
    windows = [window for message in messages for window in message.windows]
    assert [w.emit_from for w in windows] == [0, *(w.emit_to for w in windows[:-1])]
    assert windows[-1].emit_to == sounding
    assert all(w.stop <= sounding for w in windows)
    assert [m.final for m in messages] == [False] * (len(messages) - 1) + [True]
    assert [bool(m.options) for m in messages] == [True] + [False] * (len(messages) - 1)
    assert messages[0].options["voice"].lower() == module.DEFAULT_VOICE.lower()
    sent = 0
    for message in messages:
        assert [s.start for s in message.spans] == [*range(sent, sent + len(message.spans))]
        sent += len(message.spans)
        assert all(window.stop <= sent for window in message.windows)
    assert sent == sounding
    if not streaming:
        assert len(messages) == len(windows) == 1
        assert windows[0].last


@pytest.mark.parametrize("family", FAMILIES)
def test_thinker_only_checkpoints(family: str) -> None:
    module = FAMILIES[family]
    assert module.THINKER_ONLY.output_modalities == ("text",)
    assert module.PIPELINE.output_modalities == ("text", "audio")


LAG = 3
"""Rows after its own that a frame of `delayed_edge` needs."""


def delayed_edge(config: PretrainedConfig, streaming: bool) -> CodecEdge:
    """Of a model whose rows are a delay pattern's."""
    return CodecEdge(
        context(config, streaming),
        end_ids=frozenset({CODEC_END}),
        drops_unfed=False,
        policy=ChunkPolicy.one_shot(),
        options={},
        lag=LAG,
    )


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("streaming", [True, False])
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 30), sizes=st.lists(st.integers(1, 5), min_size=31, max_size=31))
def test_frames_of_a_delay_pattern_wait_for_their_rows(
    reason: str, streaming: bool, configs, rows: int, sizes: list[int]
) -> None:
    """A-65: too few rows are nothing; of the others each window has the rows that it needs."""
    tokens = [7] * rows + ([CODEC_END] if reason == "stop" else [])
    messages = decode(delayed_edge(configs["qwen3_omni_moe"], streaming), tokens, reason, sizes)
    if rows <= LAG:
        assert messages == []
        return
    windows = [window for message in messages for window in message.windows]
    assert [w.emit_from for w in windows] == [0, *(w.emit_to for w in windows[:-1])]
    assert windows[-1].emit_to == rows - LAG
    sent = 0
    for message in messages:
        sent += len(message.spans)
        assert all(window.stop + LAG <= sent for window in message.windows)
    assert sent == rows
    assert messages[-1].final
