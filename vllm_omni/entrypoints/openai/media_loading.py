# SPDX-License-Identifier: Apache-2.0
"""Sounds, pictures and videos for vLLM, decoded in processes of their own.

vLLM hands files to libsndfile and OpenCV first, whose readers end the process at some broken files;
here one reader, FFmpeg through PyAV with few doors open, does it all, and pictures are vLLM's
reader's, with fewer formats. Which frames of a video are taken is vLLM's decision. A backend that
the operator chose (`--media-io-kwargs`) is used as it is, in the server's process.
"""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
from PIL.Image import Image
from vllm import envs
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata

from vllm_omni.media.containers import too_much
from vllm_omni.media.decode import VideoInfo, check_audio
from vllm_omni.media.decoders import decoders
from vllm_omni.media.hearing import as_heard
from vllm_omni.media.jobs import FilmJob, FrameListJob, FramesJob, PictureJob, SoundJob
from vllm_omni.media.limits import MediaLimits
from vllm_omni.media.pixels import rebuilt

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
        rate, samples = decoders().run(SoundJob(limits=limits, param=param), data)
        assert samples is not None
        return samples, rate
    check_audio(data, limits, param=param)
    samples, rate = io.load_bytes(data)
    return as_heard(samples, rate, param=param)


def load_picture(io: ImageMediaIO, data: bytes, limits: MediaLimits) -> MediaWithBytes[Image]:
    """The picture that vLLM would load.

    Raises:
        OmniClientError: It passes a limit, or is no picture.
        ValueError: vLLM cannot read it.
    """
    mode, background = io.image_mode, io.rgba_background_color
    job = PictureJob(limits=limits, param=PARAM, mode=mode, background=background)
    (picture, changed), pixels = decoders().run(job, data)
    assert pixels is not None
    changes = {"image_mode": mode, "rgba_background_color": background}
    return MediaWithBytes(rebuilt(picture, pixels), data, changes if changed else None)


def load_video(io: VideoMediaIO, data: bytes, limits: MediaLimits) -> MediaWithBytes[Any]:
    """The frames of a video that vLLM would take, with what it says about them.

    Raises:
        OmniClientError: It passes a limit, or is no video.
        ValueError: vLLM cannot sample it.
    """
    info, _ = decoders().run(FilmJob(limits=limits, param=PARAM), data)
    source, wanted = sampled(io, info)
    size = len(wanted) * info.width * info.height * 3
    if size > limits.max_decoded_bytes:
        raise too_much("decoded video", "bytes", size, limits.max_decoded_bytes, PARAM)
    if io.kwargs.get("backend", _VLLM_DEFAULT) != _VLLM_DEFAULT:
        return io.load_bytes(data)
    job = FramesJob(limits=limits, param=PARAM, info=info, wanted=wanted)
    found, frames = decoders().run(job, data)
    return MediaWithBytes((frames, io.video_loader.create_hf_metadata(source, found, _NAME)), data)


def load_frame_list(io: VideoMediaIO, text: str, limits: MediaLimits) -> MediaWithBytes[Any]:
    """vLLM's own form of a video: pictures in base64, joined by commas.

    Raises:
        OmniClientError: It passes a limit, or a picture is none.
        ValueError: vLLM cannot read it.
    """
    data = text.encode()
    job = FrameListJob(
        limits=limits,
        param=PARAM,
        mode=io.image_io.image_mode,
        background=io.image_io.rgba_background_color,
        num_frames=io.num_frames,
        options=io.kwargs,
    )
    about, frames = decoders().run(job, data)
    return MediaWithBytes((frames, about), data)


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
