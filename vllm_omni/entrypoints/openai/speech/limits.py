# SPDX-License-Identifier: Apache-2.0
"""What a client of the speech routes may ask of the server, and the flags that say so."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs

from vllm_omni.config.flag_types import positive_int


@dataclass(frozen=True, slots=True)
class SpeechLimits:
    """Limits of the speech routes.

    Attributes:
        max_input: Most characters of a text.
        max_instructions: Most characters of `instructions` (row I-16).
    """

    max_input: int = 4096
    max_instructions: int = 500

    @classmethod
    def of(cls, args: argparse.Namespace) -> "SpeechLimits":
        """From the flags of `add_speech_args`."""
        return cls(
            max_input=args.tts_max_input_length, max_instructions=args.tts_max_instructions_length
        )


def add_speech_args(group: Any) -> None:
    """Add the flags to an argument group."""
    default = SpeechLimits()
    group.add_argument(
        "--tts-max-input-length",
        type=positive_int,
        default=default.max_input,
        metavar="CHARACTERS",
        help="Longest text of a speech request, and longest piece of a speech WebSocket.",
    )
    group.add_argument(
        "--tts-max-instructions-length",
        type=positive_int,
        default=default.max_instructions,
        metavar="CHARACTERS",
        help="Longest `instructions` of a speech request.",
    )
    group.add_argument(
        "--custom-voice-dir",
        type=Path,
        metavar="FOLDER",
        help="Where voices of /v1/audio/voices are kept, over restarts too; servers may share it. "
        "Default: `custom_voice_dir` of the deploy file, or else a folder under "
        "VLLM_OMNI_STORAGE_PATH, or else under vLLM's cache.",
    )


def voice_folder(args: argparse.Namespace) -> Path:
    """Where uploaded voices are kept, by the flags."""
    if args.custom_voice_dir is not None:
        return Path(args.custom_voice_dir)
    root = os.environ.get("VLLM_OMNI_STORAGE_PATH") or Path(envs.VLLM_CACHE_ROOT) / "omni"
    return Path(root) / "voices"
