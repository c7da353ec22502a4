# SPDX-License-Identifier: Apache-2.0
"""Small Qwen3-Omni deployments of these tests."""

from typing import Any

from tests.dfx.probe import EXTENSION

AR: dict[str, Any] = {
    "devices": "cpu",
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "worker_extension_cls": EXTENSION,
}
SOUND: dict[str, Any] = {"devices": "cpu", "max_num_seqs": 8}


def config(replicas: tuple[int, int, int] = (1, 1, 1), **ar_options: Any) -> dict[str, Any]:
    """A deploy config whose stages have so many replicas.

    Every payload goes through shared memory, however small.
    """
    ar = {**AR, **ar_options}
    stages = [
        {"stage_id": 0, **ar},
        {"stage_id": 1, **ar, "input_connectors": {"from_stage_0": "memory"}},
        {"stage_id": 2, **SOUND, "input_connectors": {"from_stage_1": "memory"}},
    ]
    for stage, count in zip(stages, replicas, strict=True):
        stage["num_replicas"] = count
    extra = {
        "inline_small_payloads": False,
        "initial_codec_chunk_frames": 4,
        "codec_chunk_frames": 25,
        "codec_left_context_frames": 25,
    }
    return {
        "base_config": "qwen3_omni_moe.yaml",
        "platforms": {},
        "connectors": {"memory": {"name": "SharedMemoryConnector", "extra": extra}},
        "stages": stages,
    }
