# SPDX-License-Identifier: Apache-2.0
"""Tiny random diffusers checkpoints, complete and made offline as the hub lays them out.

A family is one `Recipe` in one of the modules below, which are imported when first asked for.
``build`` writes it, ``recipe(name).examples`` says which pipeline classes it serves and how a small
request to each looks.
"""

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from vllm_omni.testing.diffusers_tiny.recipe import Example, Recipe

__all__ = ["FAMILIES", "Example", "Recipe", "build", "recipe"]

MODULES: dict[str, tuple[str, ...]] = {
    "audio": ("stable_audio", "stable_audio_3", "ace_step", "longcat_audio", "audioldm2"),
    "video_wan": (
        "wan21_t2v",
        "wan21_i2v",
        "wan21_flf2v",
        "wan21_vace",
        "wan22_t2v",
        "wan22_i2v",
        "wan22_ti2v",
        "wan22_animate",
    ),
    "video_ltx": ("ltx", "ltx_095", "ltx2"),
    "video_hunyuan": ("hunyuan_video", "hunyuan_video_15", "hunyuan_video_15_i2v"),
    "video_cosmos": ("cosmos1_t2w", "cosmos1_v2w", "cosmos2_t2i", "cosmos2_v2w", "cosmos25"),
    "video_more": (
        "cogvideox",
        "cogvideox_i2v",
        "helios",
        "kandinsky5",
        "kandinsky5_i2v",
        "mochi",
        "sana_video",
        "sana_video_i2v",
        "skyreels_v2",
        "skyreels_v2_df",
    ),
    "stable_diffusion": ("sd15", "sdxl", "sd3"),
    "flux": ("flux", "flux_fill", "flux2", "flux2_klein", "chroma"),
    "qwen_image": ("qwen_image", "qwen_image_edit", "qwen_image_layered"),
    "qwen_encoders": ("z_image", "ovis_image", "longcat_image", "krea2", "hunyuan_image"),
    "t5_encoders": ("pixart_sigma", "auraflow", "hidream", "hunyuan_dit"),
    "llm_encoders": ("sana", "lumina2", "cogview4", "ernie_image", "glm_image"),
}
"""Module of this package -> the families in its ``RECIPES``."""

FAMILIES: dict[str, str] = {name: module for module, names in MODULES.items() for name in names}
"""Family -> module."""

STAMP = ".tiny_diffusers.json"


def recipe(name: str) -> Recipe:
    """The recipe of a family.

    Raises:
        ValueError: There is no such family.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    module = importlib.import_module(f"{__name__}.{FAMILIES[name]}")
    return module.RECIPES[name]


def build(name: str, folder: Path | str, seed: int = 0) -> Path:
    """Write the checkpoint into `folder`, unless it is there already, and return its path.

    The folder appears whole (written aside, then renamed), so concurrent builders are safe.

    Raises:
        ValueError: There is no such family.
        FileExistsError: `folder` holds something else.
    """
    made = recipe(name)
    folder = Path(folder)
    stamp = _stamp(name, seed)
    if _read_stamp(folder) == stamp:
        return folder
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP).exists():
        raise FileExistsError(f"{folder} is not empty and is not a tiny checkpoint")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(made, staging, seed)
        (staging / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        staging.chmod(0o755)
        _swap_in(staging, folder, stamp)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _write(made: Recipe, staging: Path, seed: int) -> None:
    import torch

    from vllm_omni.testing.diffusers_tiny.weights import randomize

    generator = torch.Generator().manual_seed(seed)
    pipeline = made.make()
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            randomize(component, generator)
    with torch.no_grad():
        made.tune(pipeline)
    pipeline.save_pretrained(staging)


def _swap_in(staging: Path, folder: Path, stamp: dict[str, str]) -> None:
    """Rename `staging` to `folder`; a concurrent builder of the same content may win the race."""
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        os.replace(folder, old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        os.replace(staging, folder)
    except OSError:
        if _read_stamp(folder) != stamp:
            raise


def _read_stamp(folder: Path) -> dict[str, str] | None:
    try:
        return json.loads((folder / STAMP).read_text())
    except FileNotFoundError:
        return None


def _stamp(name: str, seed: int) -> dict[str, str]:
    """What a checkpoint's bytes depend on."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.stem not in MODULES or source.stem == FAMILIES[name]:
            digest.update(source.read_bytes())
    libraries = {name: version(name) for name in ("torch", "transformers", "diffusers")}
    return {"family": name, "seed": str(seed), "recipe": digest.hexdigest(), **libraries}
