# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic, with times that are made up (REFERENCE.md 2.7)."""

import pytest

from tests.benchmarks.fake import PIECE, RATE, WAV
from vllm_omni.benchmarks.backends.calling import AnswerError
from vllm_omni.benchmarks.backends.pcm import PcmReader
from vllm_omni.benchmarks.figures import FIGURES, distribution, single, totals
from vllm_omni.benchmarks.outputs import OmniOutput
from vllm_omni.benchmarks.stages import between, fields, read

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


def spoken(*pieces: tuple[float, float], start: float = 100.0, header: float | None = None):
    """A speech request whose pieces (seconds after sending, seconds of sound) came then."""
    output = OmniOutput(success=True, start_time=start)
    sound = output.hear()
    if header is not None:
        sound.byte(start + header)
    for at, seconds in pieces:
        sound.add(start + at, round(seconds * RATE), RATE)
    sound.end()
    output.latency = output.sound_took_s = pieces[-1][0]
    return output


def test_a_header_is_a_byte_and_no_sound() -> None:
    one = single(spoken((0.5, 1.0), (1.0, 1.0), header=0.2))
    assert one["audio_ttfp_ms"] == pytest.approx(200)
    assert one["audio_playable_ms"] == pytest.approx(500)
    assert one["audio_rtf"] == pytest.approx(0.5)
    assert one["audio_underrun_s"] == 0


def test_less_than_a_buffer_is_not_playable() -> None:
    one = single(spoken((0.1, 0.01), (0.3, 0.01), (0.4, 0.5)))
    assert one["audio_ttfp_ms"] == pytest.approx(100)
    assert one["audio_playable_ms"] == pytest.approx(300)
    assert one["audio_duration_s"] == pytest.approx(0.52)
    short = single(spoken((0.1, 0.005), (0.2, 0.005)))
    assert (short["audio_playable_ms"], short["audio_duration_s"]) == pytest.approx((200, 0.01))


def test_a_late_piece_is_a_gap_once() -> None:
    """Playback from 0.1 s on: it runs dry at 0.6 until 0.75, so the next is due at 1.25."""
    late = spoken((0.1, 0.5), (0.75, 0.5), (1.3, 0.5))
    assert single(late)["audio_underrun_s"] == pytest.approx(0.15)
    smooth = spoken((0.1, 0.5), (0.65, 0.5))
    made = totals([late, smooth], duration_s=5.0)
    assert made["audio_continuity_ok"] == 1
    assert made["audio_continuity_rate"] == 0.5
    assert made["total_audio_duration_s"] == pytest.approx(2.5)
    assert made["audio_throughput"] == pytest.approx(0.5)


def test_pictures_and_videos() -> None:
    picture = OmniOutput(success=True, latency=3.0, images=2, pixels=2 * 64 * 32, steps=10)
    film = OmniOutput(success=True, latency=4.0, video_frames=16, video_s=2.0)
    assert single(picture)["image_generation_ms"] == 3000
    assert single(picture)["denoise_step_latency_ms"] == 300
    assert single(picture)["video_rtf"] is None
    assert single(film)["video_rtf"] == 2.0
    made = totals([picture, film], duration_s=4.0)
    assert (made["total_images"], made["image_throughput"]) == (2, 0.5)
    assert made["average_pixels_per_image"] == 64 * 32
    assert (made["video_throughput"], made["total_video_frames"]) == (0.25, 16)
    assert "audio_throughput" not in made


def test_distributions_have_vllms_names() -> None:
    figure = next(figure for figure in FIGURES if figure.name == "audio_ttfp")
    made = distribution(figure, [1.0, 2.0, 3.0, 10.0], [50, 99.9])
    assert made["mean_audio_ttfp_ms"] == 4.0
    assert made["median_audio_ttfp_ms"] == made["p50_audio_ttfp_ms"] == 2.5
    assert made["std_audio_ttfp_ms"] == pytest.approx(12.5**0.5)
    assert made["p99.9_audio_ttfp_ms"] == pytest.approx(9.979)


@pytest.mark.parametrize("step", [1, 7, 43, 44, 45, 1000])
def test_samples_are_counted_however_they_are_cut(step: int) -> None:
    for format, data in (("wav", WAV + PIECE), ("pcm", PIECE)):
        reader = PcmReader(format, {"X-Sample-Rate": str(RATE)})
        counts = [reader.feed(data[i : i + step]) for i in range(0, len(data), step)]
        assert sum(counts) == len(PIECE) // 2
        assert reader.rate == RATE
        if format == "wav" and step == 1:
            assert not any(counts[: len(WAV)])


def test_headers_say_what_bare_samples_are() -> None:
    headers = {"X-Sample-Rate": "8000", "X-Channels": "2", "X-Bits-Per-Sample": "16"}
    reader = PcmReader("pcm", headers)
    assert (reader.feed(bytes(9)), reader.feed(bytes(3)), reader.rate) == (2, 1, 8000)
    assert PcmReader("pcm", {}).rate == 24_000


@pytest.mark.parametrize("data", [b"ID3\4", b"RIFF" + bytes(5000)])
def test_what_is_no_wav_file(data: bytes) -> None:
    with pytest.raises(AnswerError, match="WAV"):
        PcmReader("wav", {}).feed(data)


PAGE = """
# TYPE vllm_omni:stage_gen_time_s histogram
vllm_omni:stage_gen_time_s_bucket{{stage="talker",stage_type="ar",le="0.1"}} {0}
vllm_omni:stage_gen_time_s_bucket{{stage="talker",stage_type="ar",le="0.5"}} {1}
vllm_omni:stage_gen_time_s_bucket{{stage="talker",stage_type="ar",le="+Inf"}} {2}
vllm_omni:stage_gen_time_s_sum{{stage="talker",stage_type="ar"}} {3}
vllm_omni:stage_gen_time_s_count{{stage="talker",stage_type="ar"}} {2}
"""


def test_stages_are_what_was_added() -> None:
    before = read(PAGE.format(5, 5, 5, 0.25))
    after = read(PAGE.format(9, 13, 15, 3.25))  # of ten: four to 0.1, four to 0.5, two longer
    made = fields(between(before, after))
    assert made["stage_requests"] == {"talker": 10}
    assert made["stage_durations_mean"] == {"talker": pytest.approx(0.3)}
    assert made["stage_durations_p50"] == {"talker": pytest.approx(0.2)}
    assert made["stage_durations_p99"] == {"talker": pytest.approx(0.5)}
    assert between(after, after) == {}
    assert fields(between({}, after))["stage_requests"] == {"talker": 15}
