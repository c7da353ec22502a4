# SPDX-License-Identifier: Apache-2.0
"""What a request can ask of its speech, and texts that leave little or nothing to say."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.features.conftest import GREEDY_TALKER, Answer, Client
from vllm_omni.errors import OmniClientError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

WORDS = "hello world, how are you?"
SAMPLES_PER_FRAME = 1920
# Samples are in [-1, 1]. Windows are batched with whatever is there, which rounds differently.
TOLERANCE = 1e-4
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 3, "max_tokens": 16}


def assert_same_sound(one: Answer, other: Answer) -> None:
    assert one.sound.shape == other.sound.shape
    assert len(one.sound)
    assert np.abs(one.sound - other.sound).max() < TOLERANCE


def differ(one: Answer, other: Answer) -> bool:
    return (
        one.sound.shape != other.sound.shape
        or float(np.abs(one.sound - other.sound).max()) > 10 * TOLERANCE
    )


def assert_silent_end(answer: Answer) -> None:
    """The request has ended, and so has its sound, which is empty."""
    assert len(answer.sound) == 0
    last = answer.outputs[-1]
    assert (last.final_output_type, last.finished, last.audio) == ("audio", True, None)


def test_several_spoken_completions_are_refused(client: Client) -> None:
    with pytest.raises(OmniClientError, match="n > 1") as caught:
        client.ask(WORDS, audio=True, n=2, temperature=1.0)
    assert caught.value.param == "n"


def test_a_stop_string_ends_speech_where_it_ends_the_text(client: Client) -> None:
    whole = client.ask(WORDS, ignore_eos=True)
    tokenizer = client.processor.tokenizer
    # The text of three tokens, as long as no token before belongs to it.
    shown = 5
    before, through = (tokenizer.decode(whole.token_ids[:n]) for n in (shown, shown + 3))
    stop = through[len(before) :]
    assert whole.text.index(stop) == len(before)

    def ask(**params: Any) -> Answer:
        # The talker may not end before all that it is given.
        return client.ask(WORDS, audio=True, ignore_eos=True, talker={"min_tokens": 24}, **params)

    stopped = ask(stop=[stop])
    assert stopped.text == before
    assert stopped.completion.finish_reason == "stop"
    assert len(stopped.token_ids) == shown + 3
    # As if the thinker had been told to say no more than is shown (its last token is never said).
    assert_same_sound(stopped, ask(max_tokens=shown + 1))
    # And as if there had been no stop string, if the text keeps it.
    kept = ask(stop=[stop], include_stop_str_in_output=True)
    assert kept.text == through
    assert_same_sound(kept, ask(max_tokens=shown + 3))
    assert differ(kept, stopped)


def test_a_stop_string_that_never_comes_changes_nothing(client: Client) -> None:
    assert_same_sound(
        client.ask(WORDS, audio=True, stop=["no such thing as this"]),
        client.ask(WORDS, audio=True),
    )


def test_a_thinker_that_ends_by_length_is_spoken(client: Client) -> None:
    answer = client.ask(WORDS, audio=True, max_tokens=5, ignore_eos=True)
    assert answer.completion.finish_reason == "length"
    assert len(answer.sound)
    assert answer.outputs[-1].final_output_type == "audio"
    assert answer.outputs[-1].finished


def test_one_token_is_too_little_to_speak(client: Client) -> None:
    answer = client.ask(WORDS, audio=True, max_tokens=1, ignore_eos=True)
    assert len(answer.token_ids) == 1
    assert answer.text
    assert_silent_end(answer)
    assert [m.stage for m in answer.outputs[-1].stage_metrics] == ["thinker"]


def test_an_empty_text_is_silent(client: Client) -> None:
    end = client.processor.tokenizer.eos_token_id
    answer = client.ask(WORDS, audio=True, logit_bias={end: 100.0})
    assert (answer.text, answer.token_ids) == ("", [end])
    assert answer.completion.finish_reason == "stop"
    assert_silent_end(answer)


def test_a_text_stopped_at_once_is_silent(client: Client) -> None:
    first = client.ask(WORDS, ignore_eos=True).text[0]
    answer = client.ask(WORDS, audio=True, stop=[first], ignore_eos=True)
    assert answer.text == ""
    assert answer.outputs[-1].finished


@pytest.mark.parametrize("limit", [2, 9, 20])
def test_a_talker_that_reaches_its_limit_ends(client: Client, limit: int) -> None:
    answer = client.ask(WORDS, audio=True, ignore_eos=True, talker=_endless(client, limit))
    assert math.ceil(len(answer.sound) / SAMPLES_PER_FRAME) == limit - 1
    assert answer.outputs[-1].finished
    metrics = {m.stage: m for m in answer.outputs[-1].stage_metrics}
    assert metrics["talker"].tokens == limit


def test_a_talker_of_one_token_is_silent(client: Client) -> None:
    answer = client.ask(WORDS, audio=True, ignore_eos=True, talker=_endless(client, 1))
    assert answer.text
    assert_silent_end(answer)


def _endless(client: Client, limit: int) -> dict[str, Any]:
    """A talker that never wants to end."""
    return {"max_tokens": limit, "min_tokens": limit}


def test_the_limit_of_one_request_is_its_own(client: Client) -> None:
    limits = [3, 5, 8, 13]

    async def all_at_once() -> list[Answer]:
        return await asyncio.gather(
            *[
                client.ask_async(WORDS, audio=True, ignore_eos=True, talker=_endless(client, limit))
                for limit in limits
            ]
        )

    answers = client.running.run(all_at_once())
    frames = [math.ceil(len(answer.sound) / SAMPLES_PER_FRAME) for answer in answers]
    assert frames == [limit - 1 for limit in limits]


def test_a_seeded_talker_says_the_same_alone_and_in_company(client: Client) -> None:
    alone = client.ask(WORDS, audio=True, talker=SAMPLED)

    async def in_company() -> list[Answer]:
        others = [
            client.ask_async(f"{i} {WORDS}", audio=True, talker={**SAMPLED, "seed": 100 + i})
            for i in range(6)
        ]
        return await asyncio.gather(client.ask_async(WORDS, audio=True, talker=SAMPLED), *others)

    assert_same_sound(alone, client.running.run(in_company())[0])
    assert_same_sound(alone, client.ask(WORDS, audio=True, talker=SAMPLED))
    assert differ(alone, client.ask(WORDS, audio=True, talker={**SAMPLED, "seed": 4}))
    assert differ(alone, client.ask(WORDS, audio=True))


def test_voices_differ(client: Client) -> None:
    voices = client.omni.voices
    assert len(voices) >= 2
    spoken = [client.ask(WORDS, audio=True, voice=voice) for voice in voices[:2]]
    assert spoken[0].token_ids == spoken[1].token_ids
    assert differ(*spoken)
    assert_same_sound(spoken[0], client.ask(WORDS, audio=True))
    assert_same_sound(spoken[1], client.ask(WORDS, audio=True, voice=voices[1].upper()))


def test_an_unknown_voice_is_refused(client: Client) -> None:
    with pytest.raises(OmniClientError, match="unknown voice 'nobody'") as caught:
        client.ask(WORDS, audio=True, voice="nobody")
    assert caught.value.param == "audio.voice"
    assert all(voice in str(caught.value) for voice in client.omni.voices)


@pytest.mark.parametrize(
    ("by_stage", "param"),
    [
        ([None, None], "sampling_params_list"),
        (3, "sampling_params_list"),
        ({"talker": {}}, "sampling_params_list"),
        ([None, "x", None], "sampling_params_list.1"),
        ([None, {"loudness": 2}, None], "sampling_params_list.1.loudness"),
        ([None, {"temperature": -1}, None], "sampling_params_list.1.temperature"),
        ([{"top_p": 2}, None, None], "sampling_params_list.0.top_p"),
        ([None, SamplingParams(seed="x"), None], "sampling_params_list.1.seed"),
    ],
)
def test_wrong_parameters_of_a_stage_are_refused(
    client: Client, by_stage: list[Any], param: str
) -> None:
    async def ask() -> None:
        async for _ in client.omni.generate(
            {"prompt": client.prompt(WORDS)}, sampling_params_list=by_stage
        ):
            pass

    with pytest.raises(OmniClientError) as caught:
        client.running.run(ask())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": {"prompt": 3}}, "prompt"),
        ({"prompt": {"prompt": "x", "multi_modal_data": {"image": 3}}}, "prompt"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
        ({"sampling_params": SamplingParams(ignore_eos="x")}, "sampling_params.ignore_eos"),
        ({"request_id": 3}, "request_id"),
        ({"output_modalities": "text"}, "modalities"),
        ({"output_modalities": 3}, "modalities"),
        ({"output_modalities": [3]}, "modalities"),
        ({"voice": 3}, "audio.voice"),
        ({"priority": "high"}, "priority"),
        ({"lora_request": "mine"}, "lora_request"),
        ({"prioriti": 1}, "prioriti"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(
    client: Client, arguments: dict[str, Any], param: str
) -> None:
    async def ask() -> None:
        async for _ in client.omni.generate(**{"prompt": client.prompt(WORDS), **arguments}):
            pass

    with pytest.raises(OmniClientError) as caught:
        client.running.run(ask())
    assert caught.value.param == param
    assert client.ask(WORDS).text


def test_each_stage_has_its_parameters(client: Client) -> None:
    async def ask() -> Answer:
        answer = Answer()
        by_stage = [
            {"temperature": 0, "max_tokens": 6, "ignore_eos": True},
            {**GREEDY_TALKER, "max_tokens": 7, "min_tokens": 7},
            None,
        ]
        async for output in client.omni.generate(
            {"prompt": client.prompt(WORDS)},
            sampling_params_list=by_stage,
            output_modalities=("text", "audio"),
        ):
            answer.outputs.append(output)
        return answer

    metrics = client.running.run(ask()).outputs[-1].stage_metrics
    assert {m.stage: m.tokens for m in metrics if m.stage != "code2wav"} == {
        "thinker": 6,
        "talker": 7,
    }
