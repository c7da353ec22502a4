# SPDX-License-Identifier: Apache-2.0
"""What a text-to-speech request may ask for, and the cache of recordings (rows A-61, I-16)."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_omni.connectors import serialization
from vllm_omni.entrypoints.reference_cache import ReferenceCache
from vllm_omni.entrypoints.speech import row_prompt
from vllm_omni.entrypoints.speech_checks import checked
from vllm_omni.errors import OmniClientError
from vllm_omni.speech.family import NOTHING, SpeechOffer, SpeechPrompt
from vllm_omni.speech.request import Reference, SpeechRequest

NAMED = SpeechOffer(
    24000, voices=("Vivian", "Ryan"), languages=("Auto", "english"), tasks=("CustomVoice",)
)
CLONING = SpeechOffer(24000, max_references=1, needs_reference=True, needs_transcript=True)
WHOLE = SpeechOffer(24000, max_references=1, speaker_embeddings=False, streams_text=False)
DEAF = SpeechOffer(24000, max_references=1, reads_transcripts=False)


def recording(seconds: float = 2.0, text: str | None = "hello", seed: int = 0) -> Reference:
    samples = np.random.default_rng(seed).uniform(-1, 1, int(seconds * 8000)).astype(np.float32)
    return Reference(samples, 8000, text)


def test_names_come_in_the_checkpoints_spelling() -> None:
    asked = SpeechRequest(text="Hi", voice="RYAN", language="English", task="customvoice")
    made = checked(asked, NAMED)
    assert (made.voice, made.language, made.task) == ("Ryan", "english", "CustomVoice")


@pytest.mark.parametrize("voice", [None, "default"])
def test_the_default_voice(voice: str | None) -> None:
    assert checked(SpeechRequest(text="Hi", voice=voice), NAMED).voice == "Vivian"


@pytest.mark.parametrize(
    ("asked", "offer", "field"),
    [
        (SpeechRequest(text=""), NAMED, "text"),
        (SpeechRequest(text=" \n\t"), NAMED, "text"),
        (SpeechRequest(text="...?!\u2026"), NAMED, "text"),
        (SpeechRequest(text="a\x00b"), NAMED, "text"),
        (SpeechRequest(text="a\ud800"), NAMED, "text"),
        (SpeechRequest(text="\x00\x01\x1b"), NAMED, "text"),
        (SpeechRequest(text="a" * 100_001), NAMED, "text"),
        (SpeechRequest(text=3), NAMED, "text"),
        (SpeechRequest(text="Hi", voice="nobody"), NAMED, "voice"),
        (SpeechRequest(text="Hi", voice=["Ryan"]), NAMED, "voice"),
        (SpeechRequest(text="Hi", voice="Ryan"), CLONING, "voice"),
        (SpeechRequest(text="Hi", language="klingon"), NAMED, "language"),
        (SpeechRequest(text="Hi", task="Base"), NAMED, "task"),
        (SpeechRequest(text="Hi", instructions="slowly"), NAMED, "instructions"),
        (SpeechRequest(text="Hi", extra={"pitch": 2}), NAMED, "extra.pitch"),
        (SpeechRequest(text="Hi", initial_frames=0), NAMED, "initial_frames"),
        (SpeechRequest(text="Hi", cache_salt="a\ud800"), NAMED, "cache_salt"),
        (SpeechRequest(text="Hi", references=(recording(),)), NAMED, "references"),
        (SpeechRequest(text="Hi", non_streaming=False), WHOLE, "non_streaming"),
        (
            SpeechRequest(text="Hi", references=(recording(),), x_vector_only=True),
            WHOLE,
            "x_vector_only",
        ),
        (
            SpeechRequest(text="Hi", speaker_embedding=np.ones(4, np.float32)),
            WHOLE,
            "speaker_embedding",
        ),
        (SpeechRequest(text="Hi", x_vector_only=True), WHOLE, "x_vector_only"),
        (SpeechRequest(text="Hi", x_vector_only=True), CLONING, "x_vector_only"),
        (SpeechRequest(text="Hi", references=(recording(),)), DEAF, "references.text"),
        (SpeechRequest(text="Hi"), CLONING, "references"),
        (SpeechRequest(text="Hi", references=(recording(),) * 2), CLONING, "references"),
        (SpeechRequest(text="Hi", references=(recording(0),)), CLONING, "references"),
        (SpeechRequest(text="Hi", references=(recording(0.5),)), CLONING, "references"),
        (SpeechRequest(text="Hi", references=(recording(31),)), CLONING, "references"),
        (SpeechRequest(text="Hi", references=(recording(text=None),)), CLONING, "references.text"),
        (SpeechRequest(text="Hi", references=(recording(text="..."),)), CLONING, "references.text"),
        (
            SpeechRequest(
                text="Hi", references=(Reference(np.full(16000, np.nan, np.float32), 8000, "a"),)
            ),
            CLONING,
            "references",
        ),
        (
            SpeechRequest(text="Hi", speaker_embedding=np.full(4, math.inf)),
            CLONING,
            "speaker_embedding",
        ),
        (SpeechRequest(text="Hi", speaker_embedding=np.ones(4)), NAMED, "speaker_embedding"),
    ],
)
def test_what_is_not_offered_is_refused(
    asked: SpeechRequest, offer: SpeechOffer, field: str
) -> None:
    with pytest.raises(OmniClientError) as refused:
        checked(asked, offer)
    assert refused.value.param == field
    assert str(refused.value).startswith(field)


def heard(samples: Any, rate: Any = 8000) -> Any:
    return (Reference(samples, rate, "a"),)


SAMPLES = recording().samples


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"references": heard((SAMPLES * 32767).astype(np.int16))}, "int16 array"),
        ({"references": heard(SAMPLES * 32767)}, "divide"),
        ({"references": heard(SAMPLES.tolist())}, "list"),
        ({"references": heard("ann.wav")}, "str"),
        ({"references": heard(np.stack([SAMPLES] * 2))}, "mono"),
        ({"references": heard(np.zeros(16000))}, "silent"),
        *(({"references": heard(SAMPLES, rate)}, "sample_rate") for rate in (0, -1, 1 << 40, "8")),
        ({"references": "ann.wav"}, "tuple of Reference"),
        ({"references": [SAMPLES]}, "ndarray"),
        ({"speaker_embedding": "ann"}, "numbers"),
        ({"speaker_embedding": [[1.0]]}, "[d]"),
        ({"speaker_embedding": [0.0] * 3}, "zero"),
        ({"speaker_embedding": [1.0] * 4}, "3 numbers"),
        ({"extra": ["joy"]}, "mapping"),
        ({"x_vector_only": "no"}, "bool"),
    ],
)
def test_what_is_of_another_type_is_told(attributes: dict[str, Any], told: str) -> None:
    with pytest.raises(OmniClientError) as refused:
        checked(SpeechRequest(text="Hi", **attributes), replace(CLONING, embedding_size=3))
    (name,) = attributes
    assert refused.value.param == name and told in refused.value.message


def test_what_is_meant_is_taken() -> None:
    alone = SpeechRequest(text="Hi", references=Reference(SAMPLES.astype(np.float64), 8000, "a"))
    assert checked(alone, CLONING).references[0].samples.dtype == np.float32
    vector = SpeechRequest(text="Hi", speaker_embedding=[1, 2])
    assert checked(vector, CLONING).speaker_embedding.dtype == np.float32


def test_a_transcript_is_not_needed_for_the_voice_alone() -> None:
    asked = SpeechRequest(text="Hi", references=(recording(text=None),), x_vector_only=True)
    assert checked(asked, CLONING).references


def test_rows_with_a_vector_come_first() -> None:
    prompt = SpeechPrompt(
        length=3,
        text=torch.tensor([10, 11, NOTHING, 13]),
        codes=torch.tensor([[1, NOTHING], [2, 3], [4, 5], [NOTHING, NOTHING]]),
        placeholder=7,
        vectors={2: torch.full((4,), 0.5)},
        reference_codes=torch.tensor([[8, 9]]),
    )
    made = row_prompt(prompt)
    assert made.token_ids == [7, 7, 7]
    assert made.rows.final
    (span,) = made.rows.spans
    rows = serialization.decode(span.handle.inline)
    index = torch.tensor(made.rows.index)
    assert rows["text"][index].tolist() == prompt.text.tolist()
    assert rows["codes"][index].tolist() == prompt.codes.tolist()
    assert index[2] == 0
    assert rows["vector"].tolist() == [[0.5] * 4]
    beside = serialization.decode(made.beside[0].handle.inline)
    assert beside["reference_codes"].tolist() == [[8, 9]]


class Encoder:
    """Counts what it is asked."""

    def __init__(self, size: int = 4) -> None:
        self.asked = 0
        self.size = size

    async def __call__(self, reference: Reference) -> dict[str, torch.Tensor]:
        self.asked += 1
        await asyncio.sleep(0.01)
        return {"codes": torch.full((self.size,), len(reference.samples), dtype=torch.float32)}


async def test_a_recording_is_encoded_once() -> None:
    """A-61: three callers at a time, one encoding, two that wait; later a hit."""
    cache, encoder = ReferenceCache(), Encoder()
    first = recording()
    made = await asyncio.gather(*(cache.encoded(first, encoder) for _ in range(3)))
    assert encoder.asked == 1
    assert all(torch.equal(each["codes"], made[0]["codes"]) for each in made)
    await cache.encoded(recording(), encoder)
    assert encoder.asked == 1
    await cache.encoded(recording(seed=1), encoder)
    assert encoder.asked == 2


async def test_who_goes_away_does_not_take_it_from_the_others() -> None:
    cache, encoder = ReferenceCache(), Encoder()
    leaving = asyncio.create_task(cache.encoded(recording(), encoder))
    staying = asyncio.create_task(cache.encoded(recording(), encoder))
    await asyncio.sleep(0.005)
    leaving.cancel()
    assert (await staying)["codes"].numel() == 4
    assert encoder.asked == 1


async def test_a_failure_is_not_remembered() -> None:
    cache, encoder = ReferenceCache(), Encoder()

    async def fail(reference: Reference) -> dict[str, torch.Tensor]:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            await cache.encoded(recording(), fail)
    await cache.encoded(recording(), encoder)
    assert len(cache) == 1


async def test_the_cache_is_bounded_by_entries_and_by_bytes() -> None:
    encoder = Encoder(size=4)  # 16 bytes
    cache = ReferenceCache(max_entries=2, max_bytes=1 << 20)
    for seed in (0, 1, 0, 2):  # 1 is the one not used for longest
        await cache.encoded(recording(seed=seed), encoder)
    assert len(cache) == 2
    asked = encoder.asked
    await cache.encoded(recording(seed=0), encoder)
    assert encoder.asked == asked
    await cache.encoded(recording(seed=1), encoder)
    assert encoder.asked == asked + 1
    small = ReferenceCache(max_entries=8, max_bytes=40)
    for seed in range(3):
        await small.encoded(recording(seed=seed), encoder)
    assert (len(small), small.nbytes) == (2, 32)
    await small.encoded(recording(seed=9), Encoder(size=11))
    assert (len(small), small.nbytes) == (2, 32)
