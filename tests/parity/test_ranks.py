# SPDX-License-Identifier: Apache-2.0
"""Stages that are divided among ranks (`tensor_parallel_size`) say what one rank says.

Ranks are processes on this CPU, as vLLM's executor starts them. Omni pipelines are held to
transformers itself; text to speech to one rank, which the family's own test holds to its reference.
A frame is fed back, so one that differed would change all that is heard after it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.parity import speaking
from tests.parity.cases import cases
from tests.parity.harness import Deployment, assert_equal, counted, deployment, speech_config
from tests.parity.speaking import assert_same
from tests.reference.hf_omni import Reference as Expected
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

OMNI = "qwen3_omni_moe"
STAGE = {
    "devices": "cpu",
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "tensor_parallel_size": 2,
}


@pytest.fixture(scope="module")
def divided(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Deployment]:
    """A thinker and a talker of two ranks each. Rows of prompts are in shared memory, which one
    rank reads; those of single tokens are in the messages, which all have."""
    extra = {"inline_small_payloads": True, "shm_threshold_bytes": 4096}
    sounds = {"stage_id": 2, "devices": "cpu", "max_num_seqs": 8}
    stages = [{"stage_id": 0, **STAGE}, {"stage_id": 1, **STAGE}, sounds]
    config = {
        "base_config": f"{OMNI}.yaml",
        "platforms": {},
        "connectors": {"codec_stream": {"name": "SharedMemoryConnector", "extra": extra}},
        "stages": stages,
    }
    with deployment(tiny_checkpoint(OMNI), deploy_config=config, async_chunk=True) as running:
        yield running


@pytest.fixture(scope="module")
def expected(
    divided: Deployment, reference_answers: Callable[[str], dict[str, Expected]]
) -> dict[str, Expected]:
    return reference_answers(OMNI)


@pytest.mark.omni
@pytest.mark.parametrize("together", [1, 8])
def test_a_thinker_and_a_talker(
    together: int, divided: Deployment, expected: dict[str, Expected]
) -> None:
    """Text, pictures, sounds and videos are heard and answered as transformers does."""
    asked = cases()[-together:]
    work = [divided.ask(expected[case.name].prompt, case) for case in asked]
    for case, answer in zip(asked, divided.gather(*work), strict=True):
        assert_equal(answer, expected[case.name])


@dataclass(frozen=True)
class Family:
    """A text-to-speech family.

    Attributes:
        checkpoint: Name of the tiny one.
        deploy: Its packaged deploy file.
        ranks: How many.
        rate: Of its recordings.
        seconds: Of a recording that takes more than a block of the cache.
    """

    checkpoint: str
    deploy: str
    ranks: int
    rate: int = 24_000
    seconds: float = 3.0


FAMILIES = (
    Family("qwen3_tts_base", "qwen3_tts.yaml", 2),  # a depth transformer
    Family("higgs_audio_v2", "higgs_audio_v2.yaml", 4),  # a delay pattern
    Family("voxcpm2", "voxcpm2.yaml", 2, 16_000, 8.0),  # frames that are vectors, out of noise
)
TEXTS = ("Hello, how are you?", "One, two, three.", "A", "Bonjour, ça va?")


def sounds(family: Family, model: Path, ranks: int) -> dict[str, list[np.ndarray]]:
    """What so many ranks make of requests alone, of eight at once, and of one that draws."""
    config = speech_config(family.deploy)
    config["stages"][0]["tensor_parallel_size"] = ranks
    recording = Reference(sound(family.seconds, family.rate, 7), family.rate, "Hello.")
    requests = [SpeechRequest(text=text, references=(recording,)) for text in TEXTS]
    with deployment(model, deploy_config=config) as running:

        def say(*asked: SpeechRequest, **params: float) -> list[np.ndarray]:
            return speaking.say(running, *asked, **{"max_tokens": 24, "seed": 5, **params})

        made = {"alone": say(requests[0])}
        hits = counted("prefix_cache_hits")
        made["among eight"] = say(*requests * 2)
        assert counted("prefix_cache_hits") > hits, "the recording was computed before"
        made["drawn"] = say(*requests[:2], temperature=0.9)
    return made


@pytest.mark.tts
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.checkpoint)
def test_a_codec_language_model(family: Family, tiny_checkpoint: Callable[[str], Path]) -> None:
    """Frames are one rank's: greedy, drawn, and after prefix hits."""
    model = tiny_checkpoint(family.checkpoint)
    one, several = (sounds(family, model, ranks) for ranks in (1, family.ranks))
    for name, wanted in one.items():
        for samples, own in zip(several[name], wanted, strict=True):
            assert_same(samples, own)
    assert not np.array_equal(one["drawn"][0], one["alone"][0])
