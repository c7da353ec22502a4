# SPDX-License-Identifier: Apache-2.0
"""Frames and sound to MP4 files that browsers play: H.264 (yuv420p, BT.709) and AAC.

The index is at the file's beginning, so playing can start before all has been downloaded. H.264
with halved colour holds even sizes only: an odd side gets its last row or column once more.
"""

import itertools
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import numpy as np

from vllm_omni.media.audio_encode import AAC_RATES, channels_of, clean_samples, encoder_rate

VIDEO_CONTENT_TYPE = "video/mp4"
DEFAULT_CRF = 18
"""x264's quality scale, 0 (lossless) to 51: visually lossless and small."""
MAX_FPS = 240.0

_AAC_BIT_RATE = 96_000
_BT709 = 1  # FFmpeg's number for it, as matrix, primaries and transfer
_LIMITED_RANGE = 1
_AAC_FRAME = 1024  # samples


class VideoEncoder:
    """One MP4 file, made piece by piece; a context manager that finishes it.

    What it holds is a few frames of the encoder's own, however long the video gets. It blocks, so
    it belongs into a thread; not for use by two at once.

    Args:
        path: Where the file goes.
        size: Width and height of the frames in pixels.
        fps: Frames per second.
        audio_rate: Sample rate in Hz of the sound that will be fed; None for a silent file.
        channels: Channels of that sound, 1 or 2.
        crf: x264's quality scale, 0 to 51, lower is better.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        path: Path | str,
        size: tuple[int, int],
        fps: float,
        *,
        audio_rate: int | None = None,
        channels: int = 1,
        crf: int = DEFAULT_CRF,
    ) -> None:
        if min(size) < 1:
            raise ValueError(f"no video has frames of {size[0]} x {size[1]} pixels")
        if not 0 < fps <= MAX_FPS:
            raise ValueError(f"fps should be above 0 and at most {MAX_FPS:g}, not {fps}")
        if audio_rate is not None and (audio_rate <= 0 or channels not in (1, 2)):
            raise ValueError(f"cannot encode {channels} channels at {audio_rate} Hz")
        self._size = size
        self._rate = Fraction(fps).limit_denominator(10_000)
        self._frames = 0
        self._samples = 0
        self._audio_rate = audio_rate
        self._channels = channels
        self._container = av.open(
            str(path), "w", format="mp4", container_options={"movflags": "+faststart"}
        )
        self._video = self._video_stream(crf)
        self._audio = None if audio_rate is None else self._audio_stream(audio_rate)

    def feed(self, frames: np.ndarray) -> None:
        """Add frames: uint8 ``[n, height, width, 3]``, RGB."""
        width, height = self._size
        if frames.dtype != np.uint8 or frames.shape[1:] != (height, width, 3):
            raise ValueError(
                f"frames are uint8 [n, {height}, {width}, 3], not {frames.dtype} "
                f"{list(frames.shape)}"
            )
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(_evened(pixels), format="rgb24").reformat(
                format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG"
            )
            frame.pts = self._frames
            frame.time_base = 1 / self._rate
            self._frames += 1
            self._container.mux(self._video.encode(frame))

    def feed_audio(self, samples: np.ndarray) -> None:
        """Add sound: floating point ``[n]`` or ``[n, channels]`` in [-1, 1]."""
        if self._audio is None or self._audio_rate is None:
            raise ValueError("this video was begun without sound")
        if channels_of(samples) != self._channels:
            raise ValueError(f"samples of shape {samples.shape} in a {self._channels}-channel file")
        if not len(samples):
            return
        row = np.ascontiguousarray(clean_samples(samples)).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(row, format="flt", layout=_layout(self._channels))
        frame.sample_rate = self._audio_rate
        frame.time_base = Fraction(1, self._audio_rate)
        frame.pts = self._samples
        self._samples += len(samples)
        self._container.mux(self._audio.encode(frame))

    def close(self) -> None:
        """Finish the file.

        Raises:
            ValueError: It has no frames.
        """
        try:
            if not self._frames:
                raise ValueError("a video needs at least one frame")
            self._container.mux(self._video.encode(None))
            if self._audio is not None:
                if not self._samples:  # a track without a packet cannot be read
                    self.feed_audio(np.zeros((_AAC_FRAME, self._channels), np.float32))
                self._container.mux(self._audio.encode(None))
        finally:
            self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._container.close()

    def _video_stream(self, crf: int) -> av.VideoStream:
        options = {"crf": str(crf), "preset": "veryfast"}
        stream = self._container.add_stream("libx264", rate=self._rate, options=options)
        width, height = self._size
        stream.width, stream.height = width + width % 2, height + height % 2
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = _LIMITED_RANGE
        return stream

    def _audio_stream(self, rate: int) -> av.AudioStream:
        stream = self._container.add_stream("aac", rate=encoder_rate(AAC_RATES, rate))
        stream.codec_context.layout = _layout(self._channels)
        stream.codec_context.bit_rate = self._channels * min(_AAC_BIT_RATE, 4 * stream.rate)
        return stream


def encode_video(
    frames: np.ndarray,
    fps: float,
    audio: np.ndarray | None = None,
    audio_rate: int | None = None,
    *,
    crf: int = DEFAULT_CRF,
) -> bytes:
    """One MP4 file.

    Args:
        frames: uint8 ``[n, height, width, 3]``, RGB.
        fps: Frames per second.
        audio: Floating point ``[n]`` or ``[n, 2]`` in [-1, 1], if there is sound; none if empty.
        audio_rate: Its sample rate in Hz.
        crf: x264's quality scale, lower is better.

    Raises:
        ValueError: An array is not as said.
    """
    # It has no name, so nothing of it is left however this process ends.
    with tempfile.TemporaryFile() as file:
        write_video(f"/proc/self/fd/{file.fileno()}", frames, fps, audio, audio_rate, crf=crf)
        return file.read()


def write_video(
    path: Path | str,
    frames: np.ndarray,
    fps: float,
    audio: np.ndarray | None = None,
    audio_rate: int | None = None,
    *,
    crf: int = DEFAULT_CRF,
) -> None:
    """As `encode_video`, to a file."""
    if frames.ndim != 4:
        raise ValueError(f"frames are [n, height, width, 3], not {list(frames.shape)}")
    height, width = frames.shape[1:3]
    if audio is None or not len(audio):
        with VideoEncoder(path, (width, height), fps, crf=crf) as encoder:
            encoder.feed(frames)
        return
    if audio_rate is None:
        raise ValueError("sound needs its sample rate")
    with VideoEncoder(
        path, (width, height), fps, audio_rate=audio_rate, channels=channels_of(audio), crf=crf
    ) as encoder:
        for pictures, sound in _seconds(frames, fps, audio, audio_rate):
            encoder.feed(pictures)
            encoder.feed_audio(sound)


def _seconds(
    frames: np.ndarray, fps: float, audio: np.ndarray, audio_rate: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A second of both at a time, so that the muxer need not keep the one for the other."""
    for second in itertools.count():
        pictures = frames[round(second * fps) : round((second + 1) * fps)]
        sound = audio[second * audio_rate : (second + 1) * audio_rate]
        if round(second * fps) >= len(frames) and not len(sound):
            return
        yield pictures, sound


def _evened(pixels: np.ndarray) -> np.ndarray:
    """A frame whose sides are even."""
    height, width = pixels.shape[:2]
    if height % 2 or width % 2:
        pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(pixels)


def _layout(channels: int) -> str:
    return "mono" if channels == 1 else "stereo"
