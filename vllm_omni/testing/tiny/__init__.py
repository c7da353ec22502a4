# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of the supported families, built offline as the hub lays them out.

A family is one recipe module with ``write(out: Path, seed: int) -> None``, listed in ``RECIPES``; a
module of several takes the name after the colon as its third argument. The modules are imported
when first built, so that importing this package stays cheap.
"""

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path

RECIPES: dict[str, str] = {
    "csm": "vllm_omni.testing.tiny.csm",
    "dia": "vllm_omni.testing.tiny.dia",
    "higgs_audio_v2": "vllm_omni.testing.tiny.higgs_audio_v2",
    "higgs_multimodal_qwen3": "vllm_omni.testing.tiny.higgs_multimodal_qwen3",
    "moss_tts": "vllm_omni.testing.tiny.moss_tts",
    "qwen2_5_omni": "vllm_omni.testing.tiny.qwen2_5_omni",
    "qwen3_omni_moe": "vllm_omni.testing.tiny.qwen3_omni_moe",
    "qwen3_tts_base": "vllm_omni.testing.tiny.qwen3_tts:base",
    "qwen3_tts_custom_voice": "vllm_omni.testing.tiny.qwen3_tts:custom_voice",
    "qwen3_tts_voice_design": "vllm_omni.testing.tiny.qwen3_tts:voice_design",
    "vibevoice": "vllm_omni.testing.tiny.vibevoice",
    "voxcpm2": "vllm_omni.testing.tiny.voxcpm2",
    "voxtral_tts": "vllm_omni.testing.tiny.voxtral_tts",
    "voxtral_tts_voices_only": "vllm_omni.testing.tiny.voxtral_tts:voices_only",
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
        module, _, variant = RECIPES[family].partition(":")
        importlib.import_module(module).write(staging, seed, *filter(None, [variant]))
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
    own, *others = (_module_name(RECIPES[each]) for each in (family, *RECIPES))
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.stem == own or source.stem not in others:
            digest.update(source.read_bytes())
    return {
        "family": family,
        "seed": str(seed),
        "recipe": digest.hexdigest(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _module_name(recipe: str) -> str:
    return recipe.partition(":")[0].rpartition(".")[2]
