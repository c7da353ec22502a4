# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of the supported families, built offline as the hub lays them out.

A family is one recipe module with ``write(out: Path, seed: int) -> None``, listed in ``RECIPES``.
The modules are imported when first built, so that importing this package stays cheap.
"""

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path

RECIPES: dict[str, str] = {
    "qwen2_5_omni": "vllm_omni.testing.tiny.qwen2_5_omni",
    "qwen3_omni_moe": "vllm_omni.testing.tiny.qwen3_omni_moe",
}

STAMP = ".tiny_checkpoint.json"


def build(family: str, out: Path | str, seed: int = 0) -> Path:
    """Write the ``family`` checkpoint into the directory ``out`` and return its path.

    Idempotent: a directory whose stamp names the same family, seed, recipe sources and library
    versions is left as it is. The directory appears whole (written aside, then renamed), so
    concurrent builders are safe. A directory that is not a tiny checkpoint is never overwritten.
    """
    if family not in RECIPES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(sorted(RECIPES))}")
    out = Path(out)
    stamp = _stamp(family, seed)
    if _read_stamp(out) == stamp:
        return out
    if out.exists() and any(out.iterdir()) and not (out / STAMP).exists():
        raise FileExistsError(f"{out} is not empty and is not a tiny checkpoint")

    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        importlib.import_module(RECIPES[family]).write(staging, seed)
        (staging / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        staging.chmod(0o755)
        _swap_in(staging, out, stamp)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _swap_in(staging: Path, out: Path, stamp: dict[str, str]) -> None:
    """Rename ``staging`` to ``out``; a concurrent builder of the same content may win the race."""
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
        os.replace(out, old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        os.replace(staging, out)
    except OSError:
        if _read_stamp(out) != stamp:
            raise


def _read_stamp(out: Path) -> dict[str, str] | None:
    try:
        return json.loads((out / STAMP).read_text())
    except FileNotFoundError:
        return None


def _stamp(family: str, seed: int) -> dict[str, str]:
    """What a checkpoint's bytes depend on."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.stem not in RECIPES or source.stem == family:
            digest.update(source.read_bytes())
    return {
        "family": family,
        "seed": str(seed),
        "recipe": digest.hexdigest(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
