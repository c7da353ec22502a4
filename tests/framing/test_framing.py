# SPDX-License-Identifier: Apache-2.0
"""Windows partition the stream in order, and stitched windows equal the one-shot decode."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy, Stitcher, Windower
from vllm_omni.inputs import Window

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


@st.composite
def policies(draw: st.DrawFn) -> ChunkPolicy:
    initial = draw(st.integers(1, 30))
    return ChunkPolicy(
        initial=initial,
        steady=draw(st.integers(initial, 60)),
        left_context=draw(st.integers(0, 40)),
        right_holdback=draw(st.integers(0, 20)),
        ramp=draw(st.sampled_from([1.25, 2.0, 3.0, math.inf])),
        align=draw(st.sampled_from([1, 1, 4, 12])),
    )


pushes = st.lists(st.integers(0, 50), max_size=12)


def run(policy: ChunkPolicy, arrivals: list[int]) -> list[tuple[int, Window]]:
    """(frames known when it was made, window) of a stream whose last push is the final one."""
    windower = Windower(policy)
    made = []
    known = 0
    for index, count in enumerate(arrivals):
        known += count
        made += [(known, w) for w in windower.push(count, final=index == len(arrivals) - 1)]
    return made


@settings(deadline=None)
@given(policies(), pushes)
def test_windows_partition_the_stream(policy: ChunkPolicy, arrivals: list[int]) -> None:
    made = run(policy, arrivals)
    total = sum(arrivals)
    position = start = stop = 0
    for index, (known, window) in enumerate(made):
        assert window.emit_from == position
        assert window.emit_to > window.emit_from
        assert start <= window.start and stop <= window.stop <= known
        assert window.start == max(0, window.emit_from - policy.context)
        assert window.start % policy.align == 0
        position, start, stop = window.emit_to, window.start, window.stop
        if window.last:
            assert known == total and window is made[-1][1]
            assert window.emit_to == window.stop == total
        else:
            assert window.emit_to - window.emit_from == policy.chunk(index)
            assert window.stop == window.emit_to + policy.holdback
    assert position == (total if arrivals else 0)


@settings(deadline=None)
@given(policies(), pushes)
def test_a_window_comes_as_soon_as_it_can(policy: ChunkPolicy, arrivals: list[int]) -> None:
    windower = Windower(policy)
    chunks = 0
    for count in arrivals:
        chunks += len(windower.push(count))
        pending = windower.received - windower.emitted
        assert pending < policy.chunk(chunks) + policy.holdback


@settings(deadline=None)
@given(policies(), st.integers(0, 50))
def test_chunks_grow_to_the_steady_size(policy: ChunkPolicy, index: int) -> None:
    assert policy.chunk(index) <= policy.chunk(index + 1)
    assert policy.chunk(10**6) == -(-policy.steady // policy.align) * policy.align
    assert policy.chunk(0) == -(-policy.initial // policy.align) * policy.align


def test_ramp_doubles() -> None:
    policy = ChunkPolicy(initial=4, steady=25)
    assert [policy.chunk(k) for k in range(5)] == [4, 8, 16, 25, 25]


@settings(deadline=None)
@given(pushes)
def test_one_shot_is_one_window(arrivals: list[int]) -> None:
    total = sum(arrivals)
    windows = [w for _, w in run(ChunkPolicy.one_shot(), arrivals)]
    expected = [Window(start=0, stop=total, emit_from=0, emit_to=total, last=True)]
    assert windows == (expected if total else [])


def test_nothing_may_follow_the_final_push() -> None:
    windower = Windower(ChunkPolicy.one_shot())
    windower.push(1, final=True)
    with pytest.raises(ValueError, match="after the final"):
        windower.push(1)


class TrimmingDecoder:
    """Sample i depends on `left` frames before and `right` after its own; trims at the end."""

    def __init__(self, upsample: int, left: int, right: int, trim: int) -> None:
        self.upsample, self.left, self.right, self.trim = upsample, left, right, trim

    def __call__(self, frames: torch.Tensor) -> torch.Tensor:
        if not len(frames):
            return frames
        padded = torch.nn.functional.pad(frames, (self.left, self.right))
        sums = padded.unfold(0, self.left + self.right + 1, 1) @ torch.arange(
            1, self.left + self.right + 2
        )
        samples = sums.repeat_interleave(self.upsample) * self.upsample
        samples = samples + torch.arange(self.upsample).repeat(len(frames))
        return samples[: max(0, len(samples) - self.trim)]


@settings(deadline=None)
@given(policies(), pushes, st.data())
def test_stitched_windows_equal_the_one_shot(
    policy: ChunkPolicy, arrivals: list[int], data: st.DataObject
) -> None:
    upsample = data.draw(st.integers(1, 9))
    # A trim of t samples makes the next window supply them, out of its left context.
    trim = data.draw(st.integers(0, policy.context * upsample))
    left = data.draw(st.integers(0, policy.context - -(-trim // upsample)))
    right = data.draw(st.integers(0, policy.holdback))
    decoder = TrimmingDecoder(upsample, left, right, trim)
    total = sum(arrivals)
    frames = torch.randint(0, 1000, (total,), generator=torch.Generator().manual_seed(total))
    stitcher = Stitcher(upsample)
    pieces = [
        stitcher.take(window, decoder(frames[window.start : window.stop]))
        for _, window in run(policy, arrivals)
    ]
    joined = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
    assert torch.equal(joined, decoder(frames)[: len(joined)])
    assert len(joined) == max(0, total * upsample - trim)
    assert stitcher.emitted == len(joined)


def test_a_gap_is_an_error() -> None:
    stitcher = Stitcher(2)
    with pytest.raises(ValueError, match="left context is too short"):
        stitcher.take(Window(3, 5, 3, 5, False), torch.zeros(4))


def test_policy_from_extra() -> None:
    extra = {
        "initial_codec_chunk_frames": 4,
        "codec_chunk_frames": 25,
        "codec_left_context_frames": 72,
        "codec_right_holdback_frames": 3,
        "shm_threshold_bytes": 65536,
    }
    assert ChunkPolicy.from_extra(extra) == ChunkPolicy(4, 25, 72, 3)
    assert ChunkPolicy.from_extra({}) == ChunkPolicy(5, 25, 25)
    assert ChunkPolicy.from_extra({"codec_chunk_frames": 2}) == ChunkPolicy(2, 2, 25)
    assert ChunkPolicy.from_extra({"initial_codec_chunk_frames": 40}) == ChunkPolicy(40, 40, 25)
    default = ChunkPolicy(12, 48, 24, 12, align=12)
    assert ChunkPolicy.from_extra({"codec_chunk_frames": 24}, default).align == 12


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"codec_chunk_frames": 0}, "codec_chunk_frames must be at least 1"),
        ({"codec_chunk_frames": "25"}, "codec_chunk_frames must be a whole number"),
        ({"codec_chunk_frames": True}, "codec_chunk_frames must be a whole number"),
        ({"codec_left_context_frames": -1}, "codec_left_context_frames must be at least 0"),
        ({"codec_right_holdback_frames": 1.5}, "codec_right_holdback_frames must be a whole"),
        (
            {"initial_codec_chunk_frames": 9, "codec_chunk_frames": 8},
            r"initial_codec_chunk_frames \(9\) must not exceed",
        ),
    ],
)
def test_bad_extra_names_the_key(extra: dict[str, object], message: str) -> None:
    with pytest.raises(OmniConfigError, match=message):
        ChunkPolicy.from_extra(extra)


@pytest.mark.parametrize(
    "fields", [{"initial": 0}, {"left_context": -1}, {"ramp": 1.0}, {"align": 0}]
)
def test_bad_policy(fields: dict[str, float]) -> None:
    with pytest.raises(OmniConfigError):
        ChunkPolicy(**{"initial": 1, "steady": 1, **fields})
