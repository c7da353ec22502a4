# SPDX-License-Identifier: Apache-2.0
"""Opening a client's audio or video file with FFmpeg, with few doors open.

FFmpeg guesses what a file is. Left alone, a playlist (HLS, concat, ...) would make it read other
files and addresses, so only real containers and the usual codecs are allowed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import av
from av.container import InputContainer

from vllm_omni.errors import OmniClientError
from vllm_omni.media.limits import MediaLimits

_CONTAINERS = (
    "wav,w64,aiff,caf,au,mp3,flac,ogg,aac,amr,asf,mov,mp4,matroska,webm,avi,flv,mpeg,mpegts"
)
_AUDIO_CODECS = (
    "aac aac_latm ac3 adpcm_ima_wav adpcm_ms alac amrnb amrwb eac3 flac gsm_ms libopus libvorbis"
    " mp2 mp2float mp3 mp3float opus pcm_alaw pcm_f32be pcm_f32le pcm_f64le pcm_mulaw pcm_s16be"
    " pcm_s16le pcm_s24be pcm_s24le pcm_s32be pcm_s32le pcm_s8 pcm_u8 vorbis wavpack wmav1 wmav2"
    " libopencore_amrnb libopencore_amrwb"
)
_VIDEO_CODECS = (
    "av1 flv h263 h264 hevc libdav1d libvpx libvpx-vp9 mjpeg mpeg1video mpeg2video mpeg4"
    " msmpeg4v2 msmpeg4v3 prores theora vp8 vp9 wmv2"
)
AUDIO_CODECS = frozenset(_AUDIO_CODECS.split())
VIDEO_CODECS = frozenset(_VIDEO_CODECS.split())
_OPTIONS = {
    "format_whitelist": _CONTAINERS,
    "codec_whitelist": ",".join(sorted(AUDIO_CODECS | VIDEO_CODECS)),
    "protocol_whitelist": "none",
    "max_streams": "32",
    "probesize": str(1 << 20),
    "analyzeduration": str(5_000_000),
}


@contextmanager
def opened(data: bytes, kind: str, limits: MediaLimits, param: str) -> Iterator[InputContainer]:
    """The file in `data`. What FFmpeg has to say about it, in the body too, blames the client.

    Args:
        data: The file.
        kind: What it should be ("audio", "video"), for messages.
        limits: Bounds on its size.
        param: The request field that it came in.

    Raises:
        OmniClientError: Nothing FFmpeg can read, or one that the body raised.
    """
    check_size(data, kind, limits, param)
    try:
        with av.open(io.BytesIO(data), options=_OPTIONS, metadata_errors="replace") as container:
            yield container
    except OmniClientError:
        raise
    except av.error.FFmpegError as error:
        reason = f"{error.strerror} (a format or codec that is not supported, or a broken file)"
        raise unreadable(kind, param, reason) from None
    except (ValueError, EOFError, OverflowError, MemoryError) as error:
        raise unreadable(kind, param, error) from None


def check_size(data: bytes, kind: str, limits: MediaLimits, param: str) -> None:
    """Refuse a file that is empty or too large."""
    if not data:
        raise OmniClientError(f"{param}: the {kind} is empty", param=param)
    if len(data) > limits.max_bytes:
        raise too_much(kind, "bytes", len(data), limits.max_bytes, param)


def unreadable(kind: str, param: str, reason: object) -> OmniClientError:
    """What to raise for a file that is broken or of no known format."""
    return OmniClientError(f"{param}: cannot read the {kind}: {reason}", param=param)


def too_much(kind: str, unit: str, found: float, limit: float, param: str) -> OmniClientError:
    """What to raise for a file that passes a limit."""
    return OmniClientError(
        f"{param}: the {kind} has {found:.10g} {unit}, more than the {limit:.10g} that are allowed",
        param=param,
    )
