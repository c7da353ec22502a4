# SPDX-License-Identifier: Apache-2.0
"""Every mistake in a deploy file is one error that names place, key, value and the right key."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_omni.config.idle import DEPLOY_IDLE, STAGE_IDLE
from vllm_omni.config.load import find_deploy, load_deploy, packaged_deploys
from vllm_omni.config.schema import DeployConfig, StageKeys
from vllm_omni.errors import OmniConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


def words(text: str) -> list[str]:
    return text.split()


REFERENCE_STAGE_KEYS = words("""
stage_id devices num_replicas env model_runner async_chunk input_connectors output_connectors
default_sampling_params default_pooling_params subtalker_sampling_params silence_ban_frames
tensor_parallel_size enable_expert_parallel gpu_memory_utilization max_num_seqs
max_num_batched_tokens max_model_len attention_backend moe_backend linear_backend enforce_eager
async_scheduling disable_hybrid_kv_cache_manager mm_processor_cache_gb mamba_ssm_cache_dtype
compilation_config profiler_config skip_mm_profiling enable_flashinfer_autotune config_format
load_format tokenizer_mode enable_prefix_caching ulysses_degree max_generated_image_size
model_class_name diffusion_load_format lora_path lora_scale diffusers_load_kwargs
diffusers_call_kwargs step_execution tts_max_instructions_length engine_extras engine_args
enable_sleep_mode cache_backend cache_config flow_shift vae_use_slicing vae_use_tiling
""")
REFERENCE_TOP_KEYS = words("""
async_chunk session_mode model_runner active_stream_window cuda_mps duplex_session speech_cache
connectors edges stages platforms pipeline base_config forced_aligner trust_remote_code
distributed_executor_backend dtype quantization enable_prefix_caching enable_chunked_prefill
data_parallel_size pipeline_parallel_size custom_voice_dir weight_transfer_config stage_overrides
""")
REFERENCE_EXTRAS = words("""
hf_overrides model_config parallel_config limit_mm_per_prompt kv_cache_memory_bytes
logits_processors engine_backend streaming_output request_batch_max_wait_ms kv_transfer_config
omni_kv_config diffusion_kv_mode
""")


def error(raw: Any, where: str = "deploy.yaml") -> str:
    with pytest.raises(OmniConfigError) as caught:
        DeployConfig.parse(raw, where)
    return str(caught.value)


@pytest.mark.parametrize("key", REFERENCE_STAGE_KEYS)
def test_every_stage_key_of_existing_files_is_taken(key: str) -> None:
    entry = {"stage_id": 0}
    DeployConfig.parse({"stages": [{key: None, **entry}]}, "deploy.yaml")


@pytest.mark.parametrize("key", REFERENCE_TOP_KEYS)
def test_every_top_level_key_of_existing_files_is_taken(key: str) -> None:
    value = [] if key == "stages" else None
    DeployConfig.parse({key: value}, "deploy.yaml")


@pytest.mark.parametrize("key", REFERENCE_EXTRAS)
def test_every_engine_extra_of_existing_files_is_taken(key: str) -> None:
    stages = [{"stage_id": 0, "engine_extras": {key: None}}]
    DeployConfig.parse({"stages": stages}, "deploy.yaml")


def test_every_field_of_vllm_is_a_stage_key() -> None:
    names = [f.name for f in dataclasses.fields(AsyncEngineArgs) if not f.name.startswith("_")]
    owned = {"device_ids", "scheduler_cls", "worker_cls"}
    stage = {"stage_id": 0, **{name: None for name in names if name not in owned}}
    DeployConfig.parse({"stages": [stage]}, "deploy.yaml")


def test_no_key_is_both_alive_and_idle() -> None:
    assert not StageKeys.model_fields.keys() & STAGE_IDLE.keys()
    assert not DeployConfig.model_fields.keys() & DEPLOY_IDLE.keys()
    vllm = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    assert not vllm & STAGE_IDLE.keys()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"stages": [{"stage_id": 0}, {"stage_id": 1, "max_num_seqz": 64}]},
            "deploy.yaml: stages[1].max_num_seqz = 64: unknown key; did you mean 'max_num_seqs'?",
        ),
        (
            {"stages": [{"stage_id": 0, "enforce-eager": True}]},
            "deploy.yaml: stages[0].enforce-eager = True: unknown key; "
            "did you mean 'enforce_eager'?",
        ),
        (
            {"stages": [{"stage_id": 0, "asynch_scheduling": True}]},
            "deploy.yaml: stages[0].asynch_scheduling = True: unknown key; "
            "did you mean 'async_scheduling'?",
        ),
        ({"asink_chunk": True}, "asink_chunk = True: unknown key; did you mean 'async_chunk'?"),
        ({"qwertz": 1}, "deploy.yaml: qwertz = 1: unknown key"),
        ({"max_num_seqs": 4}, "max_num_seqs = 4: unknown key here: it is a stage key"),
        ({"stage_args": []}, "its successor is 'stages'"),
        (
            {"stages": [{"stage_id": 0, "engine_extras": {"hf_override": {}}}]},
            "stages[0].engine_extras.hf_override = {}: unknown key; did you mean 'hf_overrides'?",
        ),
        (
            {"platforms": {"cpu": {"stages": [{"stage_id": 0, "device": "cpu"}]}}},
            "platforms.cpu.stages[0].device = 'cpu': unknown key; did you mean 'devices'?",
        ),
        (
            {"connectors": {"shm": {"name": "SharedMemoryConnector", "extras": {}}}},
            "connectors.shm.extras = {}: unknown key; did you mean 'extra'?",
        ),
        ({"connectors": {"shm": {}}}, "connectors.shm.name"),
        ({"platforms": {"cude": {}}}, "unknown platform; did you mean 'cuda'?"),
        ({"stages": [{"devices": "0"}]}, "stages[0].stage_id"),
        ({"stages": [{"stage_id": -1}]}, "stages[0].stage_id = -1"),
        (
            {"stages": [{"stage_id": 0}, {"stage_id": 0}]},
            "stages[1].stage_id = 0: already used by stages[0]",
        ),
        (
            {"stages": [{"stage_id": 0, "diffusion_attention_backend": "FLASH_ATN"}]},
            "stages[0].diffusion_attention_backend = 'FLASH_ATN': should be one of auto, "
            "TORCH_SDPA, CUDNN_ATTN, FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_HUB, FLASH_ATTN_3_HUB, "
            "SAGE_ATTN; did you mean 'FLASH_ATTN'?",
        ),
        (
            {"stages": [{"stage_id": 0, "diffusion_compile_granularity": "block"}]},
            "stages[0].diffusion_compile_granularity = 'block': should be one of regional, full",
        ),
        ({"stages": "no"}, "stages = 'no'"),
        ({"stages": [{"stage_id": 0, "worker_cls": "x.Y"}]}, "worker_cls = 'x.Y': may not be set"),
        (
            {"stages": [{"stage_id": 0, "max_num_seqs": 1, "engine_extras": {"max_num_seqs": 2}}]},
            "'max_num_seqs' is given twice: 1 in the stage and 2 in engine_extras",
        ),
    ],
)
def test_wrong_keys(raw: dict[str, Any], message: str) -> None:
    assert message in error(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_num_seqs", "many"),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 1.5),
        ("max_model_len", 0),
        ("max_model_len", -5),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("enforce_eager", "perhaps"),
        ("devices", "gpu0"),
        ("devices", "0,cpu"),
        ("devices", ""),
        ("devices", []),
        ("devices", True),
        ("num_replicas", 0),
        ("env", {"A": [1]}),
        ("default_sampling_params", 3),
        ("async_scheduling", "perhaps"),  # vLLM's from here on
        ("enable_prefix_caching", 7),
        ("block_size", "big"),
        ("seed", True),
        ("scheduling_policy", "lifo"),
        ("attention_backend", "FLASHY"),
        ("max_logprobs", 1.5),
    ],
)
def test_wrong_values(key: str, value: Any) -> None:
    message = error({"stages": [{"stage_id": 0, key: value}]})
    assert message.startswith(f"deploy.yaml: stages[0].{key}"), message
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("devices", 0, "0"),
        ("devices", "0, 1", "0,1"),
        ("devices", [0, 1], "0,1"),
        ("devices", "cuda:1", "1"),
        ("devices", "CPU", "cpu"),
        ("max_model_len", "auto", -1),
        ("env", {"OMP_NUM_THREADS": 4}, {"OMP_NUM_THREADS": "4"}),
        ("gpu_memory_utilization", 1, 1.0),
        ("attention_backend", "flash_attn", AttentionBackendEnum.FLASH_ATTN),
        ("compilation_config", {"level": 3}, {"level": 3}),
        ("seed", 3, 3),
    ],
)
def test_values_are_normalized(key: str, value: Any, parsed: Any) -> None:
    config = DeployConfig.parse({"stages": [{"stage_id": 0, key: value}]}, "deploy.yaml")
    assert config.stages[0].settings() == {key: parsed}


def test_several_mistakes_are_told_together() -> None:
    message = error({"stages": [{"stage_id": 0, "a_b_c": 1, "seed": "x"}]})
    assert message.startswith("deploy.yaml: 2 errors\n")
    assert "stages[0].a_b_c = 1" in message
    assert "stages[0].seed = 'x'" in message


def test_a_long_value_is_shortened() -> None:
    assert len(error({"unknown_thing": "x" * 5000})) < 200


def test_base_config(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("dtype: half\nstages: [{stage_id: 0, max_num_seqs: 1}]")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/child.yaml").write_text(
        "base_config: ../base.yaml\nstages: [{stage_id: 0, devices: '1'}]"
    )
    loaded = load_deploy(tmp_path / "sub/child.yaml")
    assert loaded.config.dtype == "half"
    assert loaded.config.stages[0].settings() == {"max_num_seqs": 1, "devices": "1"}


def test_base_config_may_be_packaged(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("base_config: qwen3_omni_moe.yaml\nasync_chunk: false")
    config = load_deploy(tmp_path / "own.yaml").config
    assert config.async_chunk is False
    assert len(config.stages) == 3


def test_a_mistake_in_a_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("asink_chunk: true")
    (tmp_path / "child.yaml").write_text("base_config: base.yaml")
    with pytest.raises(OmniConfigError, match=r"base\.yaml: asink_chunk"):
        load_deploy(tmp_path / "child.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_config: own.yaml", "build on each other: own.yaml -> own.yaml"),
        ("base_config: gone.yaml", "base_config = 'gone.yaml': there is neither a file"),
        ("stages: [", "not valid YAML"),
        ("dtype: half\ndtype: float", "key 'dtype' was already given in line 1"),
        ("- a", "should be a mapping"),
    ],
)
def test_unreadable_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(OmniConfigError, match=re.escape(message)):
        load_deploy(path)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("# nothing\n")
    assert load_deploy(path).config == DeployConfig()


def test_a_missing_file_names_the_packaged_ones() -> None:
    with pytest.raises(OmniConfigError, match=r"did you mean 'qwen3_omni_moe'"):
        find_deploy("qwen3_omni_mo.yaml")


@pytest.mark.parametrize("name", packaged_deploys())
def test_packaged_files_are_valid(name: str) -> None:
    load_deploy(name)


def test_as_mapping_round_trips() -> None:
    raw = load_deploy("qwen3_omni_moe").config.as_mapping()
    assert DeployConfig.parse(raw, "x").as_mapping() == raw


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_file_wins_over_its_base_on_every_platform(tmp_path: Path, as_mapping: bool) -> None:
    raw = {"base_config": "qwen3_omni_moe.yaml", "stages": [{"stage_id": 1, "max_num_seqs": 4}]}
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(raw))  # YAML includes JSON
    stage = load_deploy(raw if as_mapping else path, "cpu").config.as_mapping()["stages"][1]
    assert stage["max_num_seqs"] == 4
    assert stage["devices"] == "cpu", "the base's overlay still applies"
