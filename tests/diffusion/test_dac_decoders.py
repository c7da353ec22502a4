# SPDX-License-Identifier: Apache-2.0
"""DAC's decoders, which look ahead, batched and padded to sizes of graphs (A-68): every sound is
what transformers' decoder makes of it alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.diffusion.codec_graphs import Padding
from tests.diffusion.codecs import cut, random_codes, run_streams
from tests.diffusion.schedulers import unhurried
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.programs import code2wav, twosided
from vllm_omni.diffusion.replay import Replay
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.framing import ChunkPolicy

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

ATOL = 1e-5
CODES = 1024
CPU = torch.device("cpu")
Samples = Callable[[torch.Tensor], torch.Tensor]
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Decoder:
    """A codec's decoder, and transformers' of the same weights.

    Attributes:
        batched: Codes int64 [b, groups, n], lengths int64 [b] -> samples.
        rules: Of `batched`.
        alone: Codes int64 [1, groups, n] -> samples [1, n * hop].
        groups: Codes per frame.
        hop: Samples per frame.
    """

    batched: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rules: CallRules
    alone: Samples
    groups: int
    hop: int


def load(family: str, folder: Path) -> Loaded:
    return vars(code2wav)[family].load(LoadContext(str(folder), CPU))


@pytest.fixture(scope="module")
def higgs(tiny_checkpoint: Callable[[str], Path]) -> Loaded:
    return load("higgs_audio_v2", tiny_checkpoint("higgs_audio_v2"))


@pytest.fixture(scope="module")
def decoders(higgs: Loaded, tiny_checkpoint: Callable[[str], Path]) -> dict[str, Decoder]:
    """Of odd strides, and of even ones."""
    odd = higgs.components["decoder"]
    even = load("dia", tiny_checkpoint("dia")).components["codec"]
    dac = even.module
    return {
        "higgs": Decoder(odd.module, odd.methods["forward"], odd.module, 4, 960),
        "dia": Decoder(
            dac.samples,
            even.methods["samples"],
            lambda codes: dac.decode(audio_codes=codes).audio_values,
            9,
            512,
        ),
    }


def codes_of(frames: int, groups: int, seed: int) -> torch.Tensor:
    """int64 [1, groups, frames]."""
    return random_codes(frames, groups, seed, CODES).T[None].long()


@pytest.mark.parametrize("name", ["higgs", "dia"])
@few
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    more=st.integers(0, 12),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_what_is_behind_a_sound_is_not_heard(
    decoders: dict[str, Decoder], name: str, lengths: list[int], more: int, seed: int
) -> None:
    decoder = decoders[name]
    codes = codes_of(len(lengths) * (max(lengths) + more), decoder.groups, seed)
    batch = torch.cat(codes.chunk(len(lengths), dim=2))
    made = decoder.batched(batch, torch.tensor(lengths))
    for samples, row, length in zip(made, batch, lengths, strict=True):
        expected = decoder.alone(row[None, :, :length])[0]
        assert len(expected) == length * decoder.hop
        torch.testing.assert_close(samples[: len(expected)], expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["higgs", "dia"])
@torch.inference_mode()
def test_alone_it_is_bit_identical(decoders: dict[str, Decoder], name: str) -> None:
    decoder = decoders[name]
    codes = codes_of(23, decoder.groups, 0)
    assert torch.equal(decoder.batched(codes, torch.tensor([23])), decoder.alone(codes))


class Bucketed(nn.Module):
    """A decoder of which inputs are padded to the sizes that there would be graphs for.

    Attributes:
        sizes: Rows and frames of its forwards.
    """

    def __init__(self, decoder: Decoder, lengths: list[int]) -> None:
        super().__init__()
        self._decoder = decoder
        self.sizes: list[tuple[int, int]] = []
        self._replay = Replay(self._decode, "decoder", decoder.rules, CPU, lengths, Padding)

    def _decode(self, codes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        self.sizes.append((codes.shape[0], codes.shape[2]))
        return self._decoder.batched(codes, lengths)

    def forward(self, codes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self._replay(codes, lengths)


policies = st.builds(
    ChunkPolicy,
    initial=st.integers(1, 6),
    steady=st.integers(6, 30),
    left_context=st.integers(0, 12),
    right_holdback=st.integers(0, 14),
)


@few
@given(
    policy=policies | st.just(ChunkPolicy.one_shot()),
    frames=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    arrival=st.integers(1, 20),
    buckets=st.lists(st.integers(1, 64), min_size=1, max_size=4),
)
def test_streams_together_equal_the_one_shot(
    higgs: Loaded,
    decoders: dict[str, Decoder],
    policy: ChunkPolicy,
    frames: list[int],
    arrival: int,
    buckets: list[int],
) -> None:
    decoder = decoders["higgs"]
    made = decode(higgs, Bucketed(decoder, sorted(buckets)), policy, frames, arrival)
    assert_one_shot(decoder, frames, made)


def test_long_sounds_are_decoded_in_parts(higgs: Loaded, decoders: dict[str, Decoder]) -> None:
    """So that memory is bounded, whatever the length."""
    decoder, bucketed = decoders["higgs"], Bucketed(decoders["higgs"], [4])
    frames = [twosided.PART + 1, 3 * twosided.PART, 30]
    made = decode(higgs, bucketed, ChunkPolicy.one_shot(), frames, 1000)
    assert_one_shot(decoder, frames, made)
    reach = higgs.assets["reach"]
    longest = reach.before + twosided.PART + reach.after
    assert max(length for _, length in bucketed.sizes) == longest
    assert max(rows for rows, _ in bucketed.sizes) > 1


def decode(
    higgs: Loaded, bucketed: Bucketed, policy: ChunkPolicy, frames: list[int], arrival: int
) -> list[torch.Tensor]:
    """Sounds of streams of random codes, which come without delays."""
    parts = {"decoder": Component(bucketed, higgs.components["decoder"].methods)}
    loaded = Loaded(parts, {**higgs.assets, "delays": (0,) * 4})
    engine = Engine(code2wav.higgs_audio_v2, loaded, scheduler=unhurried())
    streams = {
        str(seed): cut(random_codes(count, 4, seed, CODES), policy, arrival)
        for seed, count in enumerate(frames)
    }
    return list(run_streams(engine, streams).values())


@torch.inference_mode()
def assert_one_shot(decoder: Decoder, frames: list[int], made: list[torch.Tensor]) -> None:
    for seed, (count, samples) in enumerate(zip(frames, made, strict=True)):
        expected = decoder.alone(codes_of(count, decoder.groups, seed))[0]
        torch.testing.assert_close(samples, expected, atol=ATOL, rtol=0)
