# SPDX-License-Identifier: Apache-2.0
"""How large a client's media may be."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on one medium, checked against its header first and its content then.

    The defaults for bytes, pixels of a picture and seconds of a sound are vLLM's
    (VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB, VLLM_MAX_IMAGE_PIXELS, VLLM_MAX_AUDIO_DECODE_DURATION_S).

    A limit may be infinite.

    Attributes:
        max_bytes: Size of the file.
        max_image_pixels: Width times height of a picture.
        max_audio_seconds: Length of a sound.
        max_audio_rate: Sample rate of a sound, Hz.
        max_audio_channels: Channels of a sound.
        max_video_seconds: Length of a video.
        max_video_frames: Frames of a video.
        max_video_pixels: Width times height of a video.
        max_video_total_pixels: That, times its frames: what decoding it costs.
        max_frame_list: Pictures of a video that is sent as a list of pictures.
        max_decoded_bytes: What one medium takes in memory when decoded here.
    """

    max_bytes: int | float = 256 << 20
    max_image_pixels: int | float = 178_956_970
    max_audio_seconds: float = 600.0
    max_audio_rate: int = 384_000
    max_audio_channels: int = 8
    max_video_seconds: float = 1800.0
    max_video_frames: int = 108_000
    max_video_pixels: int = 4096 * 2304
    max_video_total_pixels: int = 10**11
    max_frame_list: int = 4096
    max_decoded_bytes: int = 2 << 30


DEFAULT_LIMITS = MediaLimits()
