# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM thinker in this process; called in a child process of its own.

An in-process engine sets up vLLM's process-wide parallel state for its own model: after a dense
model, a mixture of experts in the same process finds no expert-parallel group.
"""

import os
from pathlib import Path
from typing import Any


def answer(path: Path, requests: list[dict[str, Any]], max_tokens: int) -> list[tuple[list, list]]:
    """Greedy ``(prompt_token_ids, token_ids)`` of each request, one engine for all, in float32."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(path),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        max_model_len=2048,
        max_num_seqs=4,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 2, "audio": 2, "video": 1},
        mm_processor_cache_gb=0,
        disable_log_stats=True,
    )
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    results = []
    for request in requests:
        output = engine.generate([request], greedy, use_tqdm=False)[0]
        results.append((list(output.prompt_token_ids), list(output.outputs[0].token_ids)))
    return results
