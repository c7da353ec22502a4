# SPDX-License-Identifier: Apache-2.0
"""Flags about where videos are kept, and the store that they describe."""

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

from vllm import envs

from vllm_omni.config.flag_types import positive_int, positive_seconds
from vllm_omni.entrypoints.openai.videos.store import StorageLimits, VideoStore


def add_video_storage_args(group: Any) -> None:
    """Add the flags to an argument group."""
    defaults = StorageLimits()
    group.add_argument(
        "--video-storage-path",
        type=Path,
        metavar="FOLDER",
        help="Where videos of /v1/videos are kept, over restarts too; one server a folder. "
        "Default: one for each port under VLLM_OMNI_STORAGE_PATH, or else under vLLM's cache.",
    )
    group.add_argument(
        "--video-storage-ttl",
        type=positive_seconds,
        default=defaults.ttl_s,
        metavar="SECONDS",
        help="How long a video is kept once it is finished.",
    )
    group.add_argument(
        "--video-storage-max-bytes",
        type=positive_int,
        default=defaults.max_bytes,
        metavar="BYTES",
        help="Most bytes of all videos together; the oldest ones make room.",
    )


def video_store(args: argparse.Namespace) -> VideoStore:
    """The store that a command line describes.

    Raises:
        OmniConfigError: Its folder cannot be used.
    """
    limits = StorageLimits(ttl_s=args.video_storage_ttl, max_bytes=args.video_storage_max_bytes)
    return VideoStore(args.video_storage_path or _default_folder(args), limits)


def _default_folder(args: argparse.Namespace) -> Path:
    """The same for the same command line, another for every server of a host."""
    root = os.environ.get("VLLM_OMNI_STORAGE_PATH") or Path(envs.VLLM_CACHE_ROOT) / "omni"
    name = f"port-{args.port}"
    if args.uds:
        name = "socket-" + hashlib.sha256(args.uds.encode()).hexdigest()[:16]
    return Path(root) / "videos" / name
