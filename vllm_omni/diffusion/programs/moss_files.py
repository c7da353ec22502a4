# SPDX-License-Identifier: Apache-2.0
"""Where the codec of a MOSS-TTS checkpoint is: it has a repository of its own."""

import json
import os
from dataclasses import replace

from transformers.utils import cached_file

from vllm_omni.diffusion.spec import LoadContext

VARIABLE = "MOSS_AUDIO_TOKENIZER_PATH"
"""Folder or hub name of the codec."""
FOLDER = "audio_tokenizer"
REPOSITORY = "OpenMOSS-Team/MOSS-Audio-Tokenizer"
_NAMED = "audio_tokenizer_name_or_path"


def codec_place(ctx: LoadContext) -> tuple[LoadContext, str]:
    """What to load the codec from, and the folder in it.

    What the environment names comes first, then the checkpoint's own folder, what its processor's
    config names, and the published repository.
    """
    if named := os.environ.get(VARIABLE):
        return replace(ctx, model=named, revision=None), ""
    if _own_file(ctx, "config.json", FOLDER) is not None:
        return ctx, FOLDER
    return replace(ctx, model=_named_by_processor(ctx) or REPOSITORY, revision=None), ""


def _named_by_processor(ctx: LoadContext) -> str | None:
    file = _own_file(ctx, "processor_config.json")
    if file is None:
        return None
    with open(file, encoding="utf-8") as opened:
        settings = json.load(opened)
    inner = settings.get("audio_tokenizer")
    return (inner.get(_NAMED) if isinstance(inner, dict) else None) or settings.get(_NAMED)


def _own_file(ctx: LoadContext, name: str, folder: str = "") -> str | None:
    return cached_file(
        ctx.model,
        name,
        subfolder=folder,
        revision=ctx.revision,
        _raise_exceptions_for_missing_entries=False,
    )
