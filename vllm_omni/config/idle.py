# SPDX-License-Identifier: Apache-2.0
"""Keys and flags of the existing schema that are accepted and have no effect.

Two kinds: planned ones, which name something that this project does not do yet, and dead ones,
which never had or no longer have an effect. Using one of them is not an error, but it is said.
Move a key to `schema.py` when it comes to life.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "float", "str", "json"]
Warn = Callable[..., None]


@dataclass(frozen=True, slots=True)
class IdleKey:
    """An accepted key without effect.

    Attributes:
        help: What it would do.
        kind: Type of its value.
        aliases: Other flags of the same meaning.
        dead: It will never have an effect.
        flag: There is a command-line flag of this name.
    """

    help: str
    kind: Kind = "str"
    aliases: tuple[str, ...] = ()
    dead: bool = False
    flag: bool = False


def _planned(kind: Kind, help: str, *aliases: str, flag: bool = False) -> IdleKey:
    return IdleKey(help, kind, aliases, flag=flag)


def _flag(kind: Kind, help: str, *aliases: str) -> IdleKey:
    return IdleKey(help, kind, aliases, flag=True)


DEPLOY_IDLE: Mapping[str, IdleKey] = {
    "session_mode": _planned("str", "`turn` or `duplex` sessions."),
    "model_runner": IdleKey("vLLM's model runner; chosen by platform.", dead=True),
    "active_stream_window": _planned("int", "Streams that a talker keeps active."),
    "duplex_session": _planned("json", "Limits and timeouts of duplex sessions."),
    "speech_cache": _planned("json", "Limits of the caches of resolved speech references."),
    "edges": IdleKey("Edges are part of the pipeline.", "json", dead=True),
    "forced_aligner": _planned("json", "Model that aligns words with sound."),
}
"""At the top level of a deploy file."""

STAGE_IDLE: Mapping[str, IdleKey] = {
    # autoregressive stages
    "model_runner": IdleKey("vLLM's model runner; chosen by platform.", dead=True),
    "async_chunk": IdleKey("Streaming is a property of the whole pipeline.", "bool", dead=True),
    "default_pooling_params": _planned("json", "Defaults for pooling requests."),
    "silence_ban_frames": _planned("int", "First frames in which a talker may not be silent."),
    "task_type": _flag("str", "Task of a speech model (CustomVoice, VoiceDesign, Base)."),
    "tts_max_instructions_length": _planned("int", "For one stage; the flag of this name works."),
    # loading
    "num_gpus": _flag("int", "Devices of a diffusion stage; `devices` says it."),
    "diffusion_load_format": _flag("str", "How diffusion weights are loaded."),
    "diffusers_load_kwargs": _flag("json", "Arguments for diffusers' `from_pretrained`."),
    "diffusers_call_kwargs": _flag("json", "Arguments for each call of the pipeline."),
    "custom_pipeline_args": _flag("json", "Arguments for a custom pipeline."),
    "lora_backend": _flag("str", "`peft` or `distill`."),
    "hsdp_weight_load_strategy": _flag("str", "`full` or `pre_sharded`."),
    "disable_multithread_weight_load": _flag("bool", "Load weights in one thread."),
    "enable_broadcast_weight_load": _flag("bool", "Rank 0 reads weights, the others receive."),
    "num_weight_load_threads": _flag("int", "Threads that load weights."),
    # parallelism
    "ulysses_mode": _flag("str", "`strict` or `advanced_uaa`."),
    "ulysses_a2a_permute": _flag("bool", "Fuse the permutation with the all-to-all."),
    "ring_degree": _flag("int", "Ring attention.", "--ring"),
    "allgather_degree": _flag("int", "All-gather sequence parallelism."),
    "vae_patch_parallel_size": _flag("int", "Devices that share a VAE call."),
    "vae_parallel_mode": _flag("str", "How a VAE call is shared."),
    "text_encoder_tp_size": _flag("int", "Tensor parallelism of the text encoder."),
    "use_hsdp": _flag("bool", "Hybrid sharded data parallelism."),
    "hsdp_shard_size": _flag("int", "Devices that share one copy of the weights."),
    "hsdp_replicate_size": _flag("int", "Copies of the weights."),
    # performance
    "step_execution": _flag("bool", "Schedule denoising step by step; always so here."),
    "request_batch_max_wait_ms": _flag("float", "Longest wait for a fuller batch."),
    "enable_cache_dit_summary": _flag("bool", "Log cache-dit's summary of each request."),
    "enable_cuda_graph_decode": IdleKey(
        "Codecs that have CUDA graphs use them unless `enforce_eager` is set.",
        "bool",
        dead=True,
        flag=True,
    ),
    "diffusion_attention_config": _flag("json", "Attention backend by layer kind.", "-dac"),
    "fastvideo_vsa_topk": _flag("int", "Blocks that video sparse attention keeps."),
    "fa_deterministic": _flag("bool", "Deterministic flash attention."),
    "diffusion_quantization_config": _flag("json", "Quantization of a diffusion stage."),
    "force_cutlass_fp8": _flag("bool", "Use CUTLASS for FP8 products."),
    "diffusion_kv_mode": _planned("str", "Layout of a diffusion stage's KV cache."),
    "diffusion_kv_cache_dtype": _flag("str", "Type of a diffusion stage's KV cache."),
    "diffusion_kv_cache_skip_steps": _flag("json", "Steps that keep full precision KV."),
    "diffusion_kv_cache_skip_layers": _flag("json", "Layers that keep full precision KV."),
    "vae_fast_path": _flag("str", "Faster VAE decoding."),
    "vae_encode_fast_path": _flag("str", "`off`, `lossless` or `channels_last`."),
    "video_output_transport": _flag("str", "How videos leave the worker."),
    "max_generated_image_size": _planned("int", "For one stage; the flag of this name works."),
    "diffusion_streaming_output": _flag("bool", "Send previews while denoising."),
    "streaming_output": _planned("bool", "Send output while a diffusion stage runs."),
    "no_guardrails": _flag("bool", "Turn the model's guardrails off."),
    # memory
    "enable_cpu_offload": _flag("bool", "Keep idle components in host memory."),
    "enable_layerwise_offload": _flag("bool", "Bring layers in one by one."),
    "enable_distributed_layerwise_offload": _flag("bool", "Share layers between devices."),
    "dlo_use_allgather": _flag("bool", "Gather shared layers by all-gather."),
    "dlo_resident_layers": _flag("int", "Layers that stay on the device."),
    "dlo_host_registration_limit_gib": _flag("float", "Most pinned host memory, in GiB."),
    "diffusion_offload_config": _flag("json", "Offloading as one mapping."),
    "host_weight_runtime_mode": _flag("str", "`disabled`, `preferred` or `required`."),
    "host_weight_runtime_root": _flag("str", "Folder of the host weight runtime."),
}
"""In an entry of `stages`, in `engine_extras` and in `--stage-overrides`."""

PARALLEL_IDLE: Mapping[str, IdleKey] = {
    **{
        name: STAGE_IDLE[name]
        for name in (
            "ulysses_mode",
            "ring_degree",
            "allgather_degree",
            "vae_patch_parallel_size",
            "vae_parallel_mode",
            "text_encoder_tp_size",
            "use_hsdp",
            "hsdp_shard_size",
            "hsdp_replicate_size",
        )
    },
    "sequence_parallel_size": IdleKey("`ulysses_degree` says it.", "int", dead=True),
}
"""In `parallel_config`."""

EXTRAS_IDLE: Mapping[str, IdleKey] = {
    "engine_backend": IdleKey("There is one diffusion engine.", dead=True),
    "model_config": _planned("json", "Settings of the model's own config."),
    "omni_kv_config": _planned("json", "KV transfer between stages."),
}
"""In `engine_extras` only, beside those of a stage."""

FLAG_IDLE: Mapping[str, IdleKey] = {
    "shm_threshold_bytes": IdleKey(
        "Payloads up to this size go inline; the connector decides.", "int", dead=True
    ),
    "batch_timeout": IdleKey("Longest wait for a batch, in seconds.", "float", dead=True),
    "ray_address": IdleKey("Address of a Ray cluster.", dead=True),
    "log_file": IdleKey("Log file prefix; use vLLM's logging configuration.", dead=True),
    "collect_stage_metrics": _planned("bool", "Per-stage metrics are always collected."),
    "enable_diffusion_pipeline_profiler": _planned("bool", "Time each part of a pipeline."),
    "enable_ar_profiler": _planned("bool", "Time each part of an autoregressive step."),
    "enable_orch_monitor": _planned("bool", "Log the orchestrator's queues."),
}
"""On the command line only."""

_warned: set[str] = set()


def warn_idle(warn: Warn, place: str, entry: IdleKey) -> None:
    """Say once per process that the key at `place` has no effect."""
    text = f"{place}: accepted, has no effect yet"
    if entry.dead:
        text = f"{place}: deprecated and without effect ({entry.help})"
    if text not in _warned:
        _warned.add(text)
        warn("%s", text)


def idle_set(keys: Mapping[str, Any], table: Mapping[str, IdleKey]) -> dict[str, IdleKey]:
    """The idle keys among `keys` that were given a value."""
    return {key: table[key] for key, value in keys.items() if key in table and value is not None}
