# SPDX-License-Identifier: Apache-2.0
"""What a plan says, and which contradictions are found before anything starts."""

import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from vllm import AsyncEngineArgs

from vllm_omni.config.devices import Host
from vllm_omni.config.plan import ConnectorSpec, DiffusionStageConfig
from vllm_omni.config.schema import DeployConfig
from vllm_omni.errors import OmniConfigError

from .conftest import GPUS, SINGLE, Planner, write_checkpoint

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

SHM = {"name": "SharedMemoryConnector", "extra": {"codec_chunk_frames": 25}}


def stage(stage_id: int, **values: Any) -> dict[str, Any]:
    return {"stage_id": stage_id, **values}


def shares(*values: float) -> dict[str, Any]:
    """A deploy config with one device for each stage and these memory shares."""
    stages = [
        stage(i, devices=str(i), gpu_memory_utilization=value) for i, value in enumerate(values)
    ]
    return {"stages": stages}


def test_defaults_on_a_cpu(plan: Planner, checkpoint: str) -> None:
    resolved = plan()
    thinker, talker, decoder = resolved.stages
    assert resolved.platform == "cpu"
    assert resolved.served_model_names == (checkpoint,)
    assert resolved.async_chunk
    assert resolved.entry is thinker
    assert thinker.engine_args == {
        "model": checkpoint,
        "dtype": "float32",
        "enforce_eager": True,
        "async_scheduling": False,
    }
    assert thinker.devices == talker.devices == decoder.devices == (("cpu",),)
    assert thinker.diffusion is None
    assert decoder.engine_args == {}
    assert decoder.diffusion == DiffusionStageConfig(
        model=checkpoint, device="cpu", dtype="float32", enforce_eager=True
    )
    assert talker.input_connectors == {"thinker": ConnectorSpec()}
    assert talker.output_connectors == {"decoder": ConnectorSpec()}


def test_engine_args_are_vllms(plan: Planner) -> None:
    resolved = plan(
        {"stages": [stage(0, attention_backend="cpu_attn", compilation_config={"mode": 0})]},
        cli={"max_model_len": 128, "limit_mm_per_prompt": {"image": 1}},
    )
    for entry in resolved.stages[:2]:
        AsyncEngineArgs(**entry.engine_args)


def test_a_stage_plan_can_be_sent_to_a_process(plan: Planner) -> None:
    entry = plan().stages[0]
    assert pickle.loads(pickle.dumps(entry)) == entry


def test_nothing_given_is_changed(plan: Planner) -> None:
    deploy = DeployConfig.parse({"stages": [stage(1, seed=1)]}, "x")
    before = deploy.as_mapping()
    flags: dict[str, Any] = {"max_num_seqs": 2}
    plan(deploy, cli=flags, stage_overrides={"1": {"seed": 2}})
    assert deploy.as_mapping() == before
    assert flags == {"max_num_seqs": 2}


def test_checkpoint_dtype_of_a_stage(plan: Planner, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", dtype="bfloat16")
    assert plan().stages[0].engine_args["dtype"] == "bfloat16"
    write_checkpoint(tmp_path / "checkpoint")
    assert "dtype" not in plan().stages[0].engine_args
    assert "dtype" not in plan(host=GPUS, deploy_config=shares(0.5, 0.5)).stages[0].engine_args


def test_the_deploy_file_names_the_folder_of_voices(plan: Planner) -> None:
    assert plan().custom_voice_dir is None
    assert plan(deploy_config={"custom_voice_dir": "/voices"}).custom_voice_dir == "/voices"


# Flags


def test_a_flag_goes_to_every_stage_that_can_take_it(plan: Planner) -> None:
    resolved = plan(cli={"max_num_seqs": 7, "max_model_len": 99, "enforce_eager": False})
    for entry in resolved.stages[:2]:
        assert entry.engine_args["max_num_seqs"] == 7
        assert entry.engine_args["max_model_len"] == 99
        assert entry.engine_args["enforce_eager"] is False
    assert resolved.stages[2].diffusion is not None
    assert resolved.stages[2].diffusion.max_batch == 7
    assert resolved.stages[2].diffusion.enforce_eager is False


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("limit_mm_per_prompt", {"image": 1}),
        ("mm_processor_kwargs", {"fps": 1}),
        ("mm_processor_cache_gb", 1.0),
        ("tokenizer", "other"),
        ("enable_lora", True),
        ("reasoning_parser", "qwen3"),
    ],
)
def test_flags_about_the_prompt_go_to_the_entry_stage(plan: Planner, key: str, value: Any) -> None:
    thinker, talker, _ = plan(cli={key: value}).stages
    assert thinker.engine_args[key] == value
    assert key not in talker.engine_args


def test_tensor_parallelism_that_a_stage_cannot_take(plan: Planner) -> None:
    deploy = {
        "stages": [
            stage(0, devices="0,1", gpu_memory_utilization=0.5),
            stage(1, devices="2", gpu_memory_utilization=0.5),
        ]
    }
    with pytest.raises(OmniConfigError) as caught:
        plan(deploy, host=GPUS, cli={"tensor_parallel_size": 2})
    message = str(caught.value)
    assert message.startswith(
        "stage 1 (talker): tensor_parallel_size = 2 (from --tensor-parallel-size) needs 2 device(s)"
    )
    assert '"2" (from deploy config: stages[1].devices)' in message
    assert """--stage-overrides '{"thinker": {"tensor_parallel_size": ...}}'""" in message
    only_thinker = plan(deploy, host=GPUS, stage_overrides={"0": {"tensor_parallel_size": 2}})
    assert only_thinker.stages[0].devices == (("0", "1"),)


@pytest.mark.parametrize(
    ("cli", "message"),
    [
        ({"max_num_seqz": 3}, "max_num_seqz = 3: unknown key; did you mean 'max_num_seqs'?"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"devices": "0"}, "devices = '0': belongs to one stage"),
        ({"stage_1_max_num_seqz": 3}, "1.max_num_seqz = 3: unknown key; did you mean"),
        ({"stage_7_seed": 3}, "has no stage '7'; stages are 0 (thinker), 1 (talker), 2 (decoder)"),
    ],
)
def test_wrong_arguments(plan: Planner, cli: dict[str, Any], message: str) -> None:
    with pytest.raises(OmniConfigError, match=re.escape(message)):
        plan(cli=cli)


# Overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {"1": {"seed": 4}},
        {1: {"seed": 4}},
        {"talker": {"seed": 4}},
        '{"talker": {"seed": 4}}',
        {"stage_1_seed": 4},
        {"talker.seed": 4},
        {"1.seed": 4},
    ],
)
def test_ways_to_write_an_override(plan: Planner, overrides: Any) -> None:
    resolved = plan(stage_overrides=overrides)
    assert [s.engine_args.get("seed") for s in resolved.stages] == [None, 4, None]


def test_keyword_overrides(plan: Planner) -> None:
    assert plan(cli={"stage_1_max_num_seqs": 4}).stages[1].engine_args["max_num_seqs"] == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ('{"1": {"seed": }}', "--stage-overrides: not valid JSON at line 1 column 16"),
        ("[1]", "--stage-overrides: should be a JSON object, not [1]"),
        ({"1": 3}, "--stage-overrides: 1 = 3: should be a mapping"),
        ({"talkr": {}}, "has no stage 'talkr'; did you mean 'talker'?"),
        (
            {"talker": {"sead": 1}},
            "--stage-overrides: talker.sead = 1: unknown key; did you mean 'seed'?",
        ),
        ({"talker": {"seed": "x"}}, "--stage-overrides: talker.seed = 'x'"),
        ({"talker": {"stage_id": 2}}, "--stage-overrides: talker.stage_id = 2: unknown key"),
    ],
)
def test_wrong_overrides(plan: Planner, overrides: Any, message: str) -> None:
    with pytest.raises(OmniConfigError, match=re.escape(message)):
        plan(stage_overrides=overrides)


# Sampling


def test_flat_sampling_defaults_for_a_single_stage(plan: Planner) -> None:
    resolved = plan(pipeline=SINGLE, default_sampling_params={"temperature": 0.5})
    assert resolved.stages[0].default_sampling == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"talker": {"temprature": 1}}, "unknown sampling parameter; did you mean 'temperature'?"),
        ({"temperature": 1}, "has no stage 'temperature'"),
        ("{", "--default-sampling-params: not valid JSON"),
        (
            {"talker": {"temperature": "hot"}},
            "stage 1 (talker): default_sampling_params.temperature = 'hot' (from "
            "--default-sampling-params): expected `float`, got `str`",
        ),
        ({"talker": {"top_p": 2}}, "default_sampling_params.top_p = 2 (from"),
        ({"talker": {"n": 2}}, "n = 2 (from --default-sampling-params): only the first stage"),
        ({"thinker": {"n": 0}}, "n = 0 (from --default-sampling-params): n must be at least 1"),
        ({"thinker": {"seed": 2**70}}, "should be a 64-bit integer"),
        ({"thinker": {"skip_clone": True}}, "unknown sampling parameter"),
        (
            {"talker": {"extra_args": {"subtalker_sampling_params": {"top_q": 1}}}},
            "default_sampling_params.extra_args.subtalker_sampling_params.top_q = 1 (from "
            "--default-sampling-params): unknown parameter; did you mean 'top_p'?",
        ),
        (
            {"talker": {"stop": ["x"]}},
            "stop = ['x'] (from --default-sampling-params): stop strings are only supported",
        ),
    ],
)
def test_wrong_sampling_defaults(plan: Planner, sampling: Any, message: str) -> None:
    """Before any stage is started, and with the place, stage and key (I-04)."""
    with pytest.raises(OmniConfigError, match=re.escape(message)):
        plan(default_sampling_params=sampling)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"default_sampling_params": {"max_tokens": 0}},
            "stage 1 (talker): default_sampling_params.max_tokens = 0 (from deploy config: "
            "stages[0].default_sampling_params): max_tokens must be at least 1",
        ),
        (
            {"default_sampling_params": {"temprature": 1}},
            "default_sampling_params.temprature = 1 (from deploy config: stages[0]",
        ),
        (
            {"subtalker_sampling_params": {"temperature": -1}},
            "stage 1 (talker): subtalker_sampling_params.temperature = -1 (from deploy config: "
            "stages[0].subtalker_sampling_params): expected `float` >= 0.0",
        ),
    ],
)
def test_wrong_sampling_defaults_of_a_file(
    plan: Planner, stage: dict[str, Any], message: str
) -> None:
    with pytest.raises(OmniConfigError, match=re.escape(message)):
        plan({"stages": [{"stage_id": 1, **stage}]})


def test_a_good_value_over_a_wrong_one_counts(plan: Planner) -> None:
    file = {"stages": [{"stage_id": 0, "default_sampling_params": {"top_p": 7}}]}
    resolved = plan(file, default_sampling_params={"thinker": {"top_p": 0.5}})
    assert resolved.stages[0].default_sampling == {"top_p": 0.5}


# Devices


@pytest.mark.parametrize(
    ("devices", "replicas", "tensor_parallel", "groups"),
    [
        ("0", 1, 1, (("0",),)),
        ("0,1", 2, 1, (("0",), ("1",))),
        ("0,1,2,3", 2, 2, (("0", "1"), ("2", "3"))),
        ("1,1", 2, 1, (("1",), ("1",))),
        ("cpu", 2, 1, (("cpu",), ("cpu",))),
        ("0,1", 1, 1, (("0",),)),
    ],
)
def test_replicas_take_equal_shares(
    plan: Planner, devices: str, replicas: int, tensor_parallel: int, groups: Any
) -> None:
    entry = stage(
        0,
        devices=devices,
        num_replicas=replicas,
        tensor_parallel_size=tensor_parallel,
        gpu_memory_utilization=0.4,
    )
    resolved = plan({"stages": [entry, stage(1, gpu_memory_utilization=0.1)]}, host=GPUS)
    assert resolved.stages[0].devices == groups
    assert resolved.stages[0].num_replicas == replicas


@pytest.mark.parametrize(
    ("entry", "host", "message"),
    [
        ({"devices": "4"}, GPUS, "has 4 device(s), counted from 0"),
        ({"devices": "0"}, Host("cpu", 0), 'devices = "0", but this host has no accelerator'),
        ({"devices": "0,1,2", "num_replicas": 2}, GPUS, "cannot share the 3 device(s)"),
        ({"devices": "0", "num_replicas": 2}, GPUS, "num_replicas = 2 cannot share the 1 device"),
        ({"devices": "0,0", "tensor_parallel_size": 2}, GPUS, "names a device twice"),
        ({"devices": "0,1", "tensor_parallel_size": 4}, GPUS, "needs 4 device(s)"),
        ({"devices": "0", "pipeline_parallel_size": 2}, GPUS, "pipeline_parallel_size = 2"),
    ],
)
def test_impossible_devices(plan: Planner, entry: dict[str, Any], host: Host, message: str) -> None:
    deploy = {"stages": [stage(0, gpu_memory_utilization=0.1, **entry)]}
    with pytest.raises(OmniConfigError, match=re.escape(message)) as caught:
        plan(deploy, host=host)
    assert "stage 0 (thinker)" in str(caught.value)


def test_memory_shares_of_a_device(plan: Planner) -> None:
    deploy = shares(0.9, 0.8, 0.3)
    plan(deploy, host=GPUS)
    deploy["stages"][2]["devices"] = "1"
    with pytest.raises(OmniConfigError) as caught:
        plan(deploy, host=GPUS)
    assert "device 1: gpu_memory_utilization adds up to 1.1" in str(caught.value)
    assert "stage 1 (talker) 0.8, stage 2 (decoder) 0.3" in str(caught.value)


def test_memory_shares_count_vllms_default(plan: Planner) -> None:
    deploy = {"stages": [stage(0, devices="0", gpu_memory_utilization=0.5)]}
    with pytest.raises(OmniConfigError, match="adds up to"):
        plan(deploy, host=GPUS)


# Stages, connectors, chunks


@pytest.mark.parametrize(
    ("deploy", "message"),
    [
        ({"stages": [stage(3)]}, "stages[0].stage_id = 3: pipeline 'toy' has 3 stage(s)"),
        (
            {"stages": [stage(1, input_connectors={"from_stage_0": "shm"})]},
            "there is no such connector (connectors: none)",
        ),
        (
            {
                "connectors": {"shm_fast": SHM},
                "stages": [stage(1, input_connectors={"from_stage_0": "shm_fst"})],
            },
            "did you mean 'shm_fast'?",
        ),
        (
            {
                "connectors": {"shm": SHM},
                "stages": [stage(1, input_connectors={"from_stage_9": "shm"})],
            },
            "has no stage '9'",
        ),
        (
            {
                "connectors": {"shm": SHM},
                "stages": [stage(2, input_connectors={"from_stage_0": "shm"})],
            },
            "has no edge thinker -> decoder",
        ),
        (
            {"connectors": {"shm": SHM}, "stages": [stage(1, input_connectors={"0": "shm"})]},
            "the key should be from_stage_<stage id>",
        ),
        (
            {
                "connectors": {"a": SHM, "b": SHM},
                "stages": [
                    stage(0, output_connectors={"to_stage_1": "b"}),
                    stage(1, input_connectors={"from_stage_0": "a"}),
                ],
            },
            "contradicts",
        ),
        ({"stage_overrides": {"5": {}}}, "stage_overrides: pipeline 'toy' has no stage '5'"),
    ],
)
def test_contradictions(plan: Planner, deploy: dict[str, Any], message: str) -> None:
    with pytest.raises(OmniConfigError, match=re.escape(message)):
        plan(deploy)


@pytest.mark.parametrize(
    "entry",
    [
        stage(2, input_connectors={"from_stage_1": "shm"}),
        stage(2, input_connectors={"from_stage_talker": "shm"}),
        stage(1, output_connectors={"to_stage_2": "shm"}),
    ],
)
def test_connectors_by_edge(plan: Planner, entry: dict[str, Any]) -> None:
    resolved = plan({"connectors": {"shm": SHM}, "stages": [entry]})
    assert resolved.connector("talker", "decoder") == ConnectorSpec(**SHM)
    assert resolved.edge_extra("talker", "decoder") == {"codec_chunk_frames": 25}
    assert resolved.edge_extra("thinker", "talker") == {}


@pytest.mark.parametrize(
    "kwargs", [{"async_chunk": True}, {"deploy_config": {"async_chunk": True}}]
)
def test_nothing_streams_in_a_single_stage(plan: Planner, kwargs: dict[str, Any]) -> None:
    with pytest.raises(OmniConfigError, match="nothing streams between stages"):
        plan(pipeline=SINGLE, **kwargs)
    assert plan(pipeline=SINGLE).async_chunk is False


def test_platform_overlay(plan: Planner) -> None:
    deploy = {
        "async_chunk": True,
        "stages": [stage(0, devices="0", seed=1), stage(1, devices="1")],
        "platforms": {
            "cpu": {
                "async_chunk": False,
                "dtype": "bfloat16",
                "stages": [stage(0, devices="cpu"), stage(1, devices="cpu", seed=3)],
            }
        },
    }
    resolved = plan(deploy)
    assert not resolved.async_chunk
    assert [s.engine_args.get("seed") for s in resolved.stages] == [1, 3, None]
    assert resolved.stages[0].engine_args["dtype"] == "bfloat16"
    assert plan(deploy, host=GPUS).stages[0].devices == (("0",),)


# Warnings


def test_idle_keys_are_named_once(plan: Planner, caplog: pytest.LogCaptureFixture) -> None:
    deploy = {
        "speech_cache": {},
        "edges": [],
        "stages": [stage(1, silence_ban_frames=3, engine_extras={"engine_backend": "x"})],
    }
    with caplog.at_level(logging.WARNING):
        plan(deploy, cli={"lora_backend": "x", "shm_threshold_bytes": 1})
        plan(deploy, cli={"lora_backend": "x"})
    told = [record.getMessage() for record in caplog.records]
    assert told.count("deploy config: speech_cache: accepted, has no effect yet") == 1
    assert (
        told.count("deploy config: stages[0].silence_ban_frames: accepted, has no effect yet") == 1
    )
    assert told.count("--lora-backend: accepted, has no effect yet") == 1
    assert any(t.startswith("--shm-threshold-bytes: deprecated and without effect") for t in told)
    assert any(t.startswith("deploy config: edges: deprecated") for t in told)
    assert any(t.startswith("deploy config: stages[0].engine_backend: deprecated") for t in told)


def test_idle_keys_of_overrides_are_named(plan: Planner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan(stage_overrides={"decoder": {"enable_cpu_offload": True}})
    assert "--stage-overrides: decoder.enable_cpu_offload: accepted" in caplog.text


def test_keys_without_effect_on_a_diffusion_stage_are_named(
    plan: Planner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plan({"stages": [stage(2, max_num_batched_tokens=1, enable_prefix_caching=False)]})
    assert (
        "stage 2 (decoder): these keys have no effect on a stage of its kind: "
        "max_num_batched_tokens, enable_prefix_caching"
    ) in caplog.text


def test_served_names(plan: Planner) -> None:
    assert plan(served_model_name="a").served_model_names == ("a",)
    assert plan(served_model_name=["a", "b"]).served_model_names == ("a", "b")
