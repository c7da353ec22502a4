# SPDX-License-Identifier: Apache-2.0
"""A client's sounds, pictures and videos to arrays.

`check_*` reads headers (and, for sounds and videos, walks over the packets without decoding them),
for media that something else will decode; `decode_*` checks the same and then decodes. Whatever is
wrong with the bytes is an `OmniClientError` that names the request field.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.video.stream import VideoStream
from PIL import Image, ImageOps

from vllm_omni.media.containers import (
    AUDIO_CODECS,
    VIDEO_CODECS,
    check_size,
    opened,
    too_much,
    unreadable,
)
from vllm_omni.media.limits import DEFAULT_LIMITS, MediaLimits
from vllm_omni.media.pixels import eight_bit

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
# What Pillow's readers are known to raise on broken files.
_IMAGE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    EOFError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
_Stream = TypeVar("_Stream", AudioStream, VideoStream)
_NEGATIVE = 1 << 31


@dataclass(frozen=True)
class AudioInfo:
    """What a sound is: length in seconds, sample rate in Hz, channels, codec (FFmpeg's name)."""

    seconds: float
    rate: int
    channels: int
    codec: str


@dataclass(frozen=True)
class ImageInfo:
    """What a picture is: size in pixels, format and mode (Pillow's names)."""

    width: int
    height: int
    format: str
    mode: str


@dataclass(frozen=True)
class VideoInfo:
    """What a video is: size in pixels, frames, frames per second, seconds, codec, its sound."""

    width: int
    height: int
    frames: int
    fps: float
    seconds: float
    codec: str
    has_audio: bool


@dataclass(frozen=True)
class Video:
    """A decoded video.

    Attributes:
        frames: uint8 ``[T, height, width, 3]``, RGB.
        fps: Frames per second of `frames`.
        audio: Mono float32 ``[n]`` in [-1, 1], if the file has sound.
        audio_rate: Its sample rate in Hz.
    """

    frames: np.ndarray
    fps: float
    audio: np.ndarray | None = None
    audio_rate: int | None = None


def check_audio(
    data: bytes, limits: MediaLimits = DEFAULT_LIMITS, *, param: str = "audio"
) -> AudioInfo:
    """What the sound is, if it keeps the limits. Nothing is decoded.

    Raises:
        OmniClientError: It does not, or is no sound.
    """
    with opened(data, "audio", limits, param) as container:
        stream = _audio_stream(container, limits, param)
        seconds = _claimed_seconds(container, stream)
        _check_seconds("audio", seconds, limits.max_audio_seconds, param)
        context = stream.codec_context
        walked, size = 0.0, 0
        for packet in container.demux(stream):
            size += packet.size
            walked += _packet_seconds(packet, stream)
            _check_seconds("audio", walked, limits.max_audio_seconds, param)
        if not size:
            raise unreadable("audio", param, "it holds no samples")
        return AudioInfo(max(seconds, walked), stream.rate, context.channels, context.name)


def decode_audio(
    data: bytes,
    limits: MediaLimits = DEFAULT_LIMITS,
    *,
    mono: bool = True,
    param: str = "audio",
) -> tuple[np.ndarray, int]:
    """The sound of an audio or video file.

    Returns:
        Float32 samples in [-1, 1] and the sample rate in Hz: ``[n]``, the mean of the channels, or
        ``[n, channels]`` if not `mono`.

    Raises:
        OmniClientError: It passes a limit, or is no sound.
    """
    with opened(data, "audio", limits, param) as container:
        stream = _audio_stream(container, limits, param)
        seconds = _claimed_seconds(container, stream)
        _check_seconds("audio", seconds, limits.max_audio_seconds, param)
        channels, rate = stream.codec_context.channels, stream.rate
        to_float = av.AudioResampler(format="flt", layout=stream.layout, rate=rate)
        blocks, count = [], 0
        for frame in container.decode(stream):
            count += frame.samples
            _check_seconds("audio", count / rate, limits.max_audio_seconds, param)
            _check_memory("audio", count * channels * 4, limits, param)
            for converted in to_float.resample(frame):
                block = converted.to_ndarray().reshape(-1, channels)
                blocks.append(block.mean(axis=1) if mono else block)
    if not count:
        raise unreadable("audio", param, "it holds no samples")
    samples = np.concatenate(blocks)
    if not np.isfinite(samples).all():
        raise unreadable("audio", param, "it has samples that are not numbers")
    return samples.clip(-1.0, 1.0, out=samples), rate


def check_image(
    data: bytes, limits: MediaLimits = DEFAULT_LIMITS, *, param: str = "image"
) -> ImageInfo:
    """What the picture is, if it keeps the limits. Its pixels are not decoded.

    Raises:
        OmniClientError: It does not, or is no picture of a known format.
    """
    with _open_image(data, limits, param) as image:
        return ImageInfo(image.width, image.height, image.format or "", image.mode)


def decode_image(
    data: bytes, limits: MediaLimits = DEFAULT_LIMITS, *, param: str = "image"
) -> Image.Image:
    """The picture (the first one of an animation), upright, in its own mode.

    Raises:
        OmniClientError: It passes a limit, is broken or cut short, or is of no known format.
    """
    image = _open_image(data, limits, param)
    try:
        image.load()
        return eight_bit(ImageOps.exif_transpose(image))
    except _IMAGE_ERRORS as error:
        raise unreadable("image", param, error) from None


def check_video(
    data: bytes, limits: MediaLimits = DEFAULT_LIMITS, *, param: str = "video"
) -> VideoInfo:
    """What the video is, if it and its sound keep the limits. Nothing is decoded.

    Raises:
        OmniClientError: They do not, or there is no video.
    """
    with opened(data, "video", limits, param) as container:
        stream = _video_stream(container, limits, param)
        sounds = container.streams.audio
        audio = _audio_stream(container, limits, param) if sounds else None
        seconds = _claimed_seconds(container, stream)
        _check_seconds("video", seconds, limits.max_video_seconds, param)
        frames, sound, length = 0, 0.0, 0.0
        pixels = stream.codec_context.width * stream.codec_context.height
        for packet in container.demux([stream] if audio is None else [stream, audio]):
            if packet.stream is stream:
                frames += packet.size > 0 and not packet.is_discard
                length += _packet_seconds(packet, stream)
            elif audio is not None:
                sound += _packet_seconds(packet, audio)
            if frames > limits.max_video_frames:
                raise too_much("video", "frames", frames, limits.max_video_frames, param)
            if frames * pixels > limits.max_video_total_pixels:
                limit = limits.max_video_total_pixels
                raise too_much("video", "pixels in all", frames * pixels, limit, param)
            _check_seconds("video", length, limits.max_video_seconds, param)
            _check_seconds("video's sound", sound, limits.max_audio_seconds, param)
        if not frames:
            raise unreadable("video", param, "it holds no frames")
        seconds = max(seconds, length)
        fps = float(stream.average_rate or stream.guessed_rate or (frames / (seconds or 1.0)))
        context = stream.codec_context
        return VideoInfo(
            context.width, context.height, frames, fps, seconds, context.name, audio is not None
        )


def decode_video(
    data: bytes,
    limits: MediaLimits = DEFAULT_LIMITS,
    *,
    max_frames: int | None = None,
    param: str = "video",
) -> Video:
    """The frames and the sound of a video.

    Args:
        data: The file.
        limits: Bounds on it.
        max_frames: Take at most this many frames, evenly spread; None takes all.
        param: The request field that it came in.

    Raises:
        OmniClientError: It passes a limit, or is no video.
    """
    info = check_video(data, limits, param=param)
    count = info.frames if max_frames is None else min(max_frames, info.frames)
    wanted = set(np.linspace(0, info.frames - 1, count).round().astype(int).tolist())
    frames, _ = decode_frames(data, info, wanted, limits, param=param)
    fps = info.fps * len(wanted) / info.frames
    if not info.has_audio:
        return Video(frames, fps)
    audio, rate = decode_audio(data, limits, param=param)
    return Video(frames, fps, audio, rate)


def decode_frames(
    data: bytes,
    info: VideoInfo,
    wanted: Collection[int],
    limits: MediaLimits = DEFAULT_LIMITS,
    *,
    param: str = "video",
) -> tuple[np.ndarray, list[int]]:
    """Some frames of a video, upright.

    Args:
        data: The file.
        info: What `check_video` says about it.
        wanted: Their numbers. Those that are broken or do not exist are left out.
        limits: Bounds on it.
        param: The request field that it came in.

    Returns:
        uint8 ``[T, height, width, 3]``, RGB, and the numbers of the T frames.

    Raises:
        OmniClientError: They pass a limit, or there are none.
    """
    _check_memory("video", len(wanted) * info.width * info.height * 3, limits, param)
    kept: dict[int, np.ndarray] = {}
    last = max(wanted, default=-1)
    with opened(data, "video", limits, param) as container:
        stream = _video_stream(container, limits, param)
        stream.codec_context.options = {"max_pixels": str(limits.max_video_pixels)}
        stream.thread_type = "AUTO"
        for index, frame in enumerate(_whole_frames(container, stream)):
            if (frame.width, frame.height) != (info.width, info.height):
                raise unreadable("video", param, "its frames change their size")
            if index in wanted:
                kept[index] = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            if index >= last:
                break
    if len({pixels.shape for pixels in kept.values()}) != 1:
        raise unreadable("video", param, "it holds no frames" if not kept else "it turns")
    return np.stack(list(kept.values())), list(kept)


def _whole_frames(container: InputContainer, stream: VideoStream) -> Iterator[av.VideoFrame]:
    """The frames, without those that are broken."""
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            continue
        yield from frames


def _open_image(data: bytes, limits: MediaLimits, param: str) -> Image.Image:
    check_size(data, "image", limits, param)
    try:
        image = Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
    except Image.UnidentifiedImageError:
        known = ", ".join(_IMAGE_FORMATS)
        raise unreadable("image", param, f"it is none of {known}") from None
    except _IMAGE_ERRORS as error:
        raise unreadable("image", param, error) from None
    pixels = image.width * image.height
    if pixels > limits.max_image_pixels:
        raise too_much("image", "pixels", pixels, limits.max_image_pixels, param)
    if not pixels:
        raise unreadable("image", param, "it has no pixels")
    return image


def _audio_stream(container: InputContainer, limits: MediaLimits, param: str) -> AudioStream:
    """The first sound, its header within the limits."""
    stream = _first("audio", container.streams.audio, AUDIO_CODECS, param)
    channels = stream.codec_context.channels
    if stream.rate <= 0 or channels <= 0:
        raise unreadable("audio", param, f"{channels} channels at {stream.rate} Hz")
    if stream.rate > limits.max_audio_rate:
        raise too_much("audio", "samples per second", stream.rate, limits.max_audio_rate, param)
    if channels > limits.max_audio_channels:
        raise too_much("audio", "channels", channels, limits.max_audio_channels, param)
    return stream


def _video_stream(container: InputContainer, limits: MediaLimits, param: str) -> VideoStream:
    """The first video that is not a sound's cover picture, its header within the limits."""
    cover = av.stream.Disposition.attached_pic
    videos = [stream for stream in container.streams.video if not stream.disposition & cover]
    stream = _first("video", videos, VIDEO_CODECS, param)
    pixels = stream.codec_context.width * stream.codec_context.height
    if pixels <= 0:
        raise unreadable("video", param, "it has no size")
    if pixels > limits.max_video_pixels:
        raise too_much("video", "pixels per frame", pixels, limits.max_video_pixels, param)
    if stream.frames > limits.max_video_frames:
        raise too_much("video", "frames", stream.frames, limits.max_video_frames, param)
    return stream


def _first(
    kind: str, streams: tuple[_Stream, ...] | list[_Stream], codecs: frozenset[str], param: str
) -> _Stream:
    if not streams:
        raise unreadable(kind, param, f"it holds no {kind}")
    context = streams[0].codec_context
    if context is None or context.name not in codecs:
        name = None if context is None else context.name
        raise unreadable(kind, param, f"unsupported codec {name}")
    return streams[0]


def _claimed_seconds(container: InputContainer, stream: AudioStream | VideoStream) -> float:
    """The longest duration that the headers claim; 0 if they claim none."""
    whole = (container.duration or 0) / av.time_base
    own = float((stream.duration or 0) * stream.time_base) if stream.time_base else 0.0
    return max(whole, own, 0.0)


def _packet_seconds(packet: av.Packet, stream: AudioStream | VideoStream) -> float:
    # FFmpeg gives the end of a short Vorbis file a negative duration, as an unsigned number.
    if not packet.duration or not packet.time_base or packet.duration >= _NEGATIVE:
        return 0.0
    return max(0.0, float(packet.duration * packet.time_base))


def _check_seconds(kind: str, seconds: float, limit: float, param: str) -> None:
    # A sum over packets is off by its rounding.
    if seconds > limit and not math.isclose(seconds, limit):
        raise too_much(kind, "seconds", seconds, limit, param)


def _check_memory(kind: str, size: int, limits: MediaLimits, param: str) -> None:
    if size > limits.max_decoded_bytes:
        raise too_much(f"decoded {kind}", "bytes", size, limits.max_decoded_bytes, param)
