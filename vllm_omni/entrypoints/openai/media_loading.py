# SPDX-License-Identifier: Apache-2.0
"""Sounds and videos for vLLM, decoded here.

vLLM hands files to libsndfile and OpenCV first, whose readers end the process at some broken files;
here one reader, FFmpeg through PyAV with few doors open, does it all. Which frames of a video are
taken is vLLM's decision. A backend that the operator chose (`--media-io-kwargs`) is used as it is.
"""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
from vllm import envs
from vllm.multimodal.media import AudioMediaIO, VideoMediaIO
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata

from vllm_omni.media.containers import too_much
from vllm_omni.media.decode import (
    VideoInfo,
    check_audio,
    check_video,
    decode_audio,
    decode_frames,
)
from vllm_omni.media.hearing import as_heard
from vllm_omni.media.limits import MediaLimits

PARAM = "messages"
_VLLM_DEFAULT = "opencv"
_NAME = "pyav"
_CHOICE = frozenset({"backend", "num_frames", "fps", "max_duration", "frame_recovery"})


def load_sound(
    io: AudioMediaIO, data: bytes, limits: MediaLimits, *, param: str = PARAM
) -> tuple[np.ndarray, int]:
    """A sound file as the models hear it.

    Raises:
        OmniClientError: It passes a limit, or is no sound.
    """
    if (largest := io.get_max_bytes()) < len(data):
        raise too_much("audio", "bytes", len(data), largest, param)
    if (most := envs.VLLM_MAX_AUDIO_DECODE_BYTES) > 0:
        limits = replace(limits, max_decoded_bytes=min(most, limits.max_decoded_bytes))
    if io.audio_backend is None:
        samples, rate = decode_audio(data, limits, param=param)
    else:
        check_audio(data, limits, param=param)
        samples, rate = io.load_bytes(data)
    return as_heard(samples, rate, param=param)


def load_video(io: VideoMediaIO, data: bytes, limits: MediaLimits) -> MediaWithBytes[Any]:
    """The frames of a video that vLLM would take, with what it says about them.

    Raises:
        OmniClientError: It passes a limit, or is no video.
        ValueError: vLLM cannot sample it.
    """
    info = check_video(data, limits, param=PARAM)
    source, wanted = sampled(io, info)
    size = len(wanted) * info.width * info.height * 3
    if size > limits.max_decoded_bytes:
        raise too_much("decoded video", "bytes", size, limits.max_decoded_bytes, PARAM)
    if io.kwargs.get("backend", _VLLM_DEFAULT) != _VLLM_DEFAULT:
        return io.load_bytes(data)
    frames, found = decode_frames(data, info, set(wanted), limits, param=PARAM)
    return MediaWithBytes((frames, io.video_loader.create_hf_metadata(source, found, _NAME)), data)


def sampled(io: VideoMediaIO, info: VideoInfo) -> tuple[VideoSourceMetadata, list[int]]:
    """A video as vLLM describes it, and the frames that it takes.

    Raises:
        ValueError: vLLM cannot sample it.
    """
    options = inspect.signature(io.video_loader.load_bytes).parameters
    target = VideoTargetMetadata(
        num_frames=io.num_frames,
        fps=io.kwargs.get("fps", options["fps"].default),
        max_duration=io.kwargs.get("max_duration", options["max_duration"].default),
    )
    source = VideoSourceMetadata(info.frames, info.fps, info.frames / info.fps)
    others = {name: value for name, value in io.kwargs.items() if name not in _CHOICE}
    try:
        return source, io.video_loader.compute_frames_index_to_sample(source, target, **others)
    except (ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"{info.frames} frames are too few for this model") from error
