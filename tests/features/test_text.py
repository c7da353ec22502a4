# SPDX-License-Identifier: Apache-2.0
"""vLLM's own features of text, in a pipeline's first stage."""

import asyncio
import json
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.features.conftest import Answer, Client
from tests.reference.hf_omni import HFOmni

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

SHORT = "hello world, how are you?"
ENDS_EARLY = "hi"
LONG = "tell me a tale of a tiny model that could hear and see. " * 6
# The two implementations sum in another order.
LOGPROB_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference(client: Client) -> HFOmni:
    """Made after the deployment, which is forked from this process."""
    return HFOmni(client.model)


@torch.no_grad()
def logprobs(reference: HFOmni, prompt: str, generated: list[int]) -> torch.Tensor:
    """[positions, vocabulary]: row p is the distribution of the token at p + 1."""
    inputs = reference.inputs(prompt)
    ids = torch.cat([inputs["input_ids"], torch.tensor([generated], dtype=torch.int64)], dim=1)
    logits = reference.model.thinker(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits[0].float().log_softmax(dim=-1)


@pytest.mark.parametrize("audio", [False, True])
@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
def test_logprobs_are_the_models(
    client: Client, reference: HFOmni, audio: bool, kind: RequestOutputKind
) -> None:
    answer = client.ask(SHORT, audio=audio, logprobs=3, output_kind=kind)
    assert answer.output is not None
    expected = logprobs(reference, client.prompt(SHORT), answer.token_ids)
    start = len(answer.output.prompt_token_ids or ()) - 1
    assert len(answer.completion.logprobs) == len(answer.token_ids)
    for offset, (token, entries) in enumerate(
        zip(answer.token_ids, answer.completion.logprobs, strict=True)
    ):
        row = expected[start + offset]
        assert set(row.topk(3).indices.tolist()) <= entries.keys()
        assert entries[token].rank == 1
        for each, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[each]), abs=LOGPROB_TOLERANCE)
    total = sum(
        e[t].logprob for t, e in zip(answer.token_ids, answer.completion.logprobs, strict=True)
    )
    assert answer.completion.cumulative_logprob == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("audio", [False, True])
def test_prompt_logprobs_over_chunks_are_the_models(
    client: Client, reference: HFOmni, audio: bool
) -> None:
    """The prompt is computed in four steps."""
    answer = client.ask(LONG, audio=audio, prompt_logprobs=1, max_tokens=2)
    assert answer.output is not None
    ids = answer.output.prompt_token_ids
    assert ids is not None and len(ids) > 3 * 64
    expected = logprobs(reference, client.prompt(LONG), [])
    assert answer.output.prompt_logprobs is not None
    assert len(answer.output.prompt_logprobs) == len(ids)
    assert answer.output.prompt_logprobs[0] is None
    for position, entries in enumerate(answer.output.prompt_logprobs[1:], start=1):
        assert entries is not None
        logprob = entries[ids[position]].logprob
        assert logprob == pytest.approx(
            float(expected[position - 1, ids[position]]), abs=LOGPROB_TOLERANCE
        )


def test_text_requests_hit_the_prefix_cache_and_spoken_ones_stay_exact(client: Client) -> None:
    client.running.run(client.omni.reset_prefix_cache())
    words = "what a fine prefix this is. " * 8
    spoken = client.ask(words, audio=True)
    assert spoken.output is not None and spoken.output.num_cached_tokens == 0
    first = client.ask(words)
    again = client.ask(words)
    assert first.output is not None and again.output is not None
    assert again.output.num_cached_tokens is not None
    assert again.output.num_cached_tokens >= 64
    assert spoken.token_ids == first.token_ids == again.token_ids
    spoken_again = client.ask(words, audio=True)
    assert spoken_again.token_ids == spoken.token_ids
    assert spoken_again.sound.shape == spoken.sound.shape
    assert abs(spoken_again.sound - spoken.sound).max() < 1e-4


CHOICE = StructuredOutputsParams(choice=["yes", "perhaps"])
REGEX = StructuredOutputsParams(regex=r"[a-c]{3}-[0-9]{2}")
SCHEMA = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
        "required": ["mood", "sure"],
        "additionalProperties": False,
    }
)


def is_choice(text: str) -> bool:
    return text in ("yes", "perhaps")


def is_code(text: str) -> bool:
    return re.fullmatch(r"[a-c]{3}-[0-9]{2}", text) is not None


def is_mood(text: str) -> bool:
    said = json.loads(text)
    return said["mood"] in ("good", "bad") and isinstance(said["sure"], bool)


@pytest.mark.parametrize("audio", [False, True])
@pytest.mark.parametrize(
    ("wanted", "holds"),
    [(CHOICE, is_choice), (REGEX, is_code), (SCHEMA, is_mood)],
    ids=["choice", "regex", "json"],
)
def test_structured_outputs(client: Client, wanted: Any, holds: Any, audio: bool) -> None:
    answer = client.ask(SHORT, audio=audio, structured_outputs=wanted, max_tokens=64)
    assert holds(answer.text), answer.text
    assert answer.completion.finish_reason == "stop"
    assert bool(len(answer.sound)) == audio
    assert answer.outputs[-1].finished


def test_structured_outputs_in_company(client: Client) -> None:
    """Each request keeps to its own grammar, or to none."""

    async def all_at_once() -> list[Answer]:
        asked = [
            client.ask_async(SHORT, audio=i % 2 == 0, structured_outputs=wanted, max_tokens=64)
            for i, wanted in enumerate([CHOICE, REGEX, None, SCHEMA] * 2)
        ]
        return await asyncio.gather(*asked)

    free = client.ask(SHORT, max_tokens=64)
    answers = client.running.run(all_at_once())
    for answer, holds in zip(
        answers, [is_choice, is_code, lambda text: text == free.text, is_mood] * 2, strict=True
    ):
        assert holds(answer.text), answer.text


def middle(answer: Answer) -> str:
    """Two characters from within the text."""
    at = len(answer.text) // 2
    return answer.text[at : at + 2]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_stop_strings_cut_the_text(client: Client, kind: RequestOutputKind) -> None:
    whole = client.ask(SHORT, ignore_eos=True)
    stop = middle(whole)
    answer = client.ask(SHORT, stop=[stop], output_kind=kind, ignore_eos=True)
    if kind == RequestOutputKind.DELTA:
        text = "".join(output.outputs[0].text for output in answer.outputs)
    else:
        text = answer.text
    assert text == whole.text[: whole.text.index(stop)]
    assert (answer.completion.finish_reason, answer.completion.stop_reason) == ("stop", stop)


def test_min_tokens_and_ignore_eos(client: Client) -> None:
    short = client.ask(ENDS_EARLY, max_tokens=24)
    assert short.completion.finish_reason == "stop"
    assert len(short.token_ids) < 12
    longer = client.ask(ENDS_EARLY, max_tokens=24, min_tokens=12)
    assert len(longer.token_ids) >= 12
    assert longer.token_ids[: len(short.token_ids) - 1] == short.token_ids[:-1]
    longest = client.ask(ENDS_EARLY, max_tokens=24, ignore_eos=True)
    assert len(longest.token_ids) == 24
    assert longest.completion.finish_reason == "length"


def test_bad_words_are_not_said(client: Client) -> None:
    free = client.ask(SHORT, ignore_eos=True)
    tokenizer = client.processor.tokenizer
    word = tokenizer.decode(free.token_ids[1:2])
    answer = client.ask(SHORT, ignore_eos=True, bad_words=[word])
    assert answer.token_ids[0] == free.token_ids[0]
    assert free.token_ids[1] not in answer.token_ids


def test_logit_bias(client: Client) -> None:
    token = client.ask(SHORT).token_ids[0] + 1
    answer = client.ask(SHORT, logit_bias={token: 100.0}, max_tokens=5)
    assert answer.token_ids == [token] * 5


def test_several_completions(client: Client) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 11, "ignore_eos": True, "max_tokens": 10}
    answer = client.ask(SHORT, **asked)
    assert answer.output is not None
    assert sorted(each.index for each in answer.output.outputs) == [0, 1, 2]
    texts = {each.text for each in answer.output.outputs}
    assert len(texts) == 3
    assert [len(each.token_ids) for each in answer.output.outputs] == [10] * 3
    again = client.ask(SHORT, **asked)
    assert again.output is not None
    assert {each.text for each in again.output.outputs} == texts
    streamed: dict[int, str] = {}
    for output in client.ask(SHORT, **asked, output_kind=RequestOutputKind.DELTA).outputs:
        for each in output.outputs:
            streamed[each.index] = streamed.get(each.index, "") + each.text
    assert set(streamed.values()) == texts


@pytest.mark.parametrize("audio", [False, True])
def test_cumulative_outputs_stay_as_they_were(client: Client, audio: bool) -> None:
    # Outputs that nobody has read yet are joined; of so many some are read in between.
    asked = {"output_kind": RequestOutputKind.CUMULATIVE, "ignore_eos": True, "max_tokens": 200}
    outputs = client.ask(SHORT, audio=audio, **asked).outputs
    said = [output for output in outputs if output.final_output_type == "text"]
    texts = [output.outputs[0].text for output in said]
    assert len(set(texts)) > 1
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert [output.outputs[0].finish_reason for output in said[:-1]] == [None] * (len(said) - 1)
    assert [output.finished for output in said] == [False] * (len(said) - 1) + [True]


@pytest.mark.parametrize("words", [SHORT, LONG], ids=["short", "chunked"])
def test_a_seeded_request_says_the_same_alone_and_in_company(client: Client, words: str) -> None:
    """With a prompt of several chunks too: its generator waits for the first token."""
    asked = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    client.running.run(client.omni.reset_prefix_cache())
    alone = client.ask(words, **asked)

    async def in_company() -> list[Answer]:
        others = [
            client.ask_async(f"{i} {LONG}", temperature=1.0, seed=100 + i, audio=i % 2 == 0)
            for i in range(5)
        ]
        return await asyncio.gather(client.ask_async(words, **asked), *others)

    client.running.run(client.omni.reset_prefix_cache())
    assert client.running.run(in_company())[0].token_ids == alone.token_ids
    assert client.ask(words, **{**asked, "seed": 6}).token_ids != alone.token_ids
