# SPDX-License-Identifier: Apache-2.0
"""Where the codec of a Higgs-Audio checkpoint is (row A-66): not always beside the model."""

import os
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from transformers.utils import cached_file

from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniConfigError

VARIABLES = ("HIGGS_AUDIO_TOKENIZER_PATH", "HIGGS_AUDIO_V2_TOKENIZER_PATH")
"""Folders of the codec, or ones that hold it as `audio_tokenizer`."""
FOLDER = "audio_tokenizer"
REPOSITORY = "k2-fsa/OmniVoice"
"""Has the codec in transformers' format."""
_CONFIG = "config.json"


def codec_place(ctx: LoadContext) -> tuple[LoadContext, str]:
    """What to load the codec from, and the folder in it.

    What the environment names comes first, then the checkpoint's own folder, what the hub's cache
    holds, and what the hub has.

    Raises:
        OmniConfigError: The environment names no codec, or there is none to be had.
    """
    return known_place(ctx) or (_local(ctx, _of_the_hub(ctx.model)), "")


def known_place(ctx: LoadContext) -> tuple[LoadContext, str] | None:
    """Likewise, of what the environment names and what the checkpoint has; None for neither.

    Raises:
        OmniConfigError: The environment names no codec.
    """
    for variable in VARIABLES:
        if named := os.environ.get(variable):
            return _local(ctx, _named(variable, Path(named))), ""
    own = cached_file(
        ctx.model,
        _CONFIG,
        subfolder=FOLDER,
        revision=ctx.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if own is None else (ctx, FOLDER)


def _local(ctx: LoadContext, folder: Path) -> LoadContext:
    return replace(ctx, model=str(folder), revision=None)


def _named(variable: str, folder: Path) -> Path:
    for place in (folder / FOLDER, folder):
        if (place / _CONFIG).is_file():
            return place
    raise OmniConfigError(
        f"{variable}: {str(folder)!r} has no {_CONFIG}, and no {FOLDER}/{_CONFIG} either"
    )


def _of_the_hub(model: str) -> Path:
    cache = repo_folder_name(repo_id=REPOSITORY, repo_type="model")
    snapshots = Path(constants.HF_HUB_CACHE) / cache / "snapshots"
    for config in sorted(snapshots.glob(f"*/{FOLDER}/{_CONFIG}")):
        if any(config.parent.glob("*.safetensors")):
            return config.parent
    try:
        return Path(snapshot_download(REPOSITORY, allow_patterns=[f"{FOLDER}/*"])) / FOLDER
    except (OSError, HfHubHTTPError) as error:
        raise OmniConfigError(
            f"checkpoint {model!r} has no {FOLDER}/, and {REPOSITORY!r} cannot be fetched: name "
            f"the codec's folder by {VARIABLES[0]} ({type(error).__name__})"
        ) from error
