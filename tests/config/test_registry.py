# SPDX-License-Identifier: Apache-2.0
"""Which pipeline serves a checkpoint."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from vllm_omni.config.build import build_plan
from vllm_omni.config.devices import Host
from vllm_omni.config.load import packaged_deploys
from vllm_omni.config.schema import DeployConfig
from vllm_omni.errors import OmniConfigError
from vllm_omni.pipelines import registry
from vllm_omni.pipelines.registry import (
    BUILTINS,
    PIPELINES,
    THINKER_ONLY_SUFFIX,
    Registry,
    register_pipeline,
    resolve_pipeline,
)
from vllm_omni.testing.tiny import build

from .conftest import CPU, PIPELINE, write_checkpoint

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

FAMILIES = [family.module for family in BUILTINS]
RECIPES = {"qwen3_tts": "qwen3_tts_custom_voice"}
"""Of families whose tiny checkpoint has another name."""


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    entries = Registry[object]("pipeline")
    for name in ("PIPELINES", "_by_architecture", "_by_model_type"):
        monkeypatch.setattr(registry, name, {} if name.startswith("_") else entries)


@pytest.fixture(scope="session", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = RECIPES.get(request.param, request.param)
    return build(recipe, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.mark.parametrize("family", BUILTINS, ids=FAMILIES)
def test_the_table_agrees_with_the_pipelines(family: registry._Builtin) -> None:
    pipeline = PIPELINES[family.module]
    assert pipeline.name == family.module
    assert set(pipeline.architectures) == set(family.architectures)
    if family.thinker_only:
        name = family.module + THINKER_ONLY_SUFFIX
        assert PIPELINES[name].name == name


@pytest.mark.parametrize("name", PIPELINES.names())
def test_every_pipeline_has_a_deploy_file(name: str) -> None:
    assert name in packaged_deploys()


def test_real_checkpoints(tiny: Path) -> None:
    assert resolve_pipeline(str(tiny)).name == tiny.name


@pytest.mark.parametrize("host", [CPU, Host("cuda", 2)], ids=["cpu", "cuda"])
def test_packaged_files_fit_their_pipelines(tiny: Path, host: Host) -> None:
    plan = build_plan(str(tiny), host=host)
    assert plan.deploy_source.endswith(f"{tiny.name}.yaml")
    assert plan.async_chunk
    assert {s.devices[0] for s in plan.stages} <= {("0",), ("1",), ("cpu",)}
    if host is CPU:
        assert plan.stages[0].engine_args["kv_cache_memory_bytes"] >= 256 << 20
        assert plan.stages[0].engine_args["dtype"] == "float32"


def test_profiles_differ_from_the_default_only_in_what_they_say(tiny: Path) -> None:
    """A-63: they are chosen by name, and what a small batch is good for is not in both."""
    profiles = [f"{tiny.name}_{profile}" for profile in ("low_latency", "high_throughput")]
    if profiles[0] not in packaged_deploys():
        pytest.skip("it has none")
    default, quick, large = (
        build_plan(str(tiny), deploy_config=name, host=Host("cuda", 1))
        for name in (tiny.name, *profiles)
    )
    sizes = [plan.stages[0].engine_args["max_num_seqs"] for plan in (quick, default, large)]
    assert sizes == sorted(set(sizes))
    first, second, third = (
        next(iter(plan.stages[1].input_connectors.values())).extra
        for plan in (quick, default, large)
    )
    name = "initial_codec_chunk_frames"
    assert first[name] == 1 <= second[name] < third[name]
    assert {**first, name: 0} == {**second, name: 0}
    for plan in (quick, large):
        assert plan.stages[0].engine_args["gpu_memory_utilization"] > 0.5, "the default's"
    for name in profiles:
        on_cpu = build_plan(str(tiny), deploy_config=name, host=CPU)
        assert on_cpu.stages[0].engine_args["enforce_eager"]
        assert "compilation_config" not in on_cpu.stages[0].engine_args


def test_a_packaged_file_of_another_pipeline_is_refused(tiny: Path) -> None:
    other = next(name for name in ("csm", "qwen3_tts_low_latency") if tiny.name not in name)
    with pytest.raises(OmniConfigError, match=f"'{other}' is of another .* there are {tiny.name}"):
        build_plan(str(tiny), deploy_config=other, host=CPU)


def test_a_checkpoint_without_sound(tiny: Path, tmp_path: Path) -> None:
    if tiny.name + THINKER_ONLY_SUFFIX not in PIPELINES:
        pytest.skip("it makes nothing but sound")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "enable_audio_output": False}))
    for name in ("tokenizer.json", "preprocessor_config.json"):
        shutil.copy(tiny / name, tmp_path)
    name = tiny.name + THINKER_ONLY_SUFFIX
    plan = build_plan(str(tmp_path), host=CPU)
    assert plan.pipeline.name == name
    assert not plan.async_chunk
    assert [stage.name for stage in plan.stages] == ["thinker"]
    explicit = DeployConfig(pipeline=tiny.name)
    with pytest.raises(OmniConfigError, match=f"use '{name}'"):
        resolve_pipeline(str(tmp_path), explicit)


@pytest.mark.usefixtures("clean_registry")
def test_out_of_tree_pipelines(checkpoint: str) -> None:
    register_pipeline(PIPELINE)
    assert resolve_pipeline(checkpoint) is PIPELINE
    register_pipeline(PIPELINE)
    with pytest.raises(OmniConfigError, match="already served by 'toy'"):
        register_pipeline("else.where", name="other", architectures=PIPELINE.architectures)
    with pytest.raises(OmniConfigError, match="needs a name"):
        register_pipeline("else.where")


@pytest.mark.usefixtures("clean_registry")
def test_a_dotted_path_is_imported_when_used(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from tests.config.conftest import PIPELINE as LATE"
    (tmp_path / "late_pipeline.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    register_pipeline("late_pipeline.LATE", name="late", model_types=["qwen2"])
    assert "late_pipeline" not in sys.modules
    assert resolve_pipeline(checkpoint).name == "toy"


def test_an_explicit_pipeline(checkpoint: str) -> None:
    deploy = DeployConfig(pipeline="qwen2_5_omni")
    assert resolve_pipeline(checkpoint, deploy).name == "qwen2_5_omni"
    with pytest.raises(OmniConfigError, match=r"unknown pipeline 'qwen2_5_omn'; did you mean"):
        resolve_pipeline(checkpoint, DeployConfig(pipeline="qwen2_5_omn"))


def test_an_unknown_architecture_lists_the_known_pipelines(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", architectures=["OtherForCausalLM"])
    with pytest.raises(OmniConfigError) as caught:
        resolve_pipeline(model)
    assert "OtherForCausalLM" in str(caught.value)
    assert "qwen3_omni_moe" in str(caught.value)


@pytest.mark.parametrize(
    ("class_name", "modality"),
    [("FluxPipeline", "image"), ("WanPipeline", "video"), ("StableAudioPipeline", "audio")],
)
def test_any_diffusers_pipeline_is_served(tmp_path: Path, class_name: str, modality: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    pipeline = resolve_pipeline(str(tmp_path))
    assert pipeline.name == class_name
    assert pipeline.output_modalities == (modality,)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "model_index.json cannot be read"),
        ("{}", "names no pipeline (_class_name)"),
        ('{"_class_name": "FluxPipelin"}', "did you mean 'FluxPipeline'"),
    ],
)
def test_a_wrong_model_index(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(OmniConfigError, match=re.escape(message)):
        resolve_pipeline(str(tmp_path))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(OmniConfigError, match=r"no config\.json or model_index\.json"):
        resolve_pipeline(str(tmp_path))


@pytest.mark.parametrize("name", ["low_latancy", "qwen3_omni_moe_low_latency", "zzz"])
def test_a_profile_that_does_not_exist_names_those_of_the_family(tiny: Path, name: str) -> None:
    with pytest.raises(OmniConfigError, match=f"'{name}' is neither a file") as caught:
        build_plan(str(tiny), deploy_config=name, host=CPU)
    told = re.findall(r"\w+", str(caught.value).replace(name, "", 1))
    others = set(PIPELINES.names()) - {tiny.name, tiny.name + THINKER_ONLY_SUFFIX}
    assert tiny.name in told and not any(word.startswith(tuple(others)) for word in told)
