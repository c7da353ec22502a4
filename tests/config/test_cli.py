# SPDX-License-Identifier: Apache-2.0
"""From a command line to a plan, with vLLM's own parser."""

import argparse
from typing import Any

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config import build, cli
from vllm_omni.config.cli import add_omni_args, explicit_args, plan_from_args
from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.errors import OmniConfigError

from .conftest import CPU, PIPELINE

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_omni_args(make_arg_parser(FlexibleArgumentParser()))


def typed(parser: argparse.ArgumentParser, *argv: str) -> dict[str, Any]:
    return explicit_args(parser, argv, parser.parse_args(list(argv)))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {}),
        (["--max-model-len", "2k"], {"max_model_len": 2000}),
        (["--max_model_len=7"], {"max_model_len": 7}),
        (["--no-async-chunk"], {"async_chunk": False}),
        (["--async-chunk"], {"async_chunk": True}),
        (["--stage-init-timeout", "300"], {"stage_init_timeout": 300.0}),
        (["--port", "8000"], {"port": 8000}),
        (["--api-server-count", "1"], {"api_server_count": 1}),
        (["-tp", "2"], {"tensor_parallel_size": 2}),
        (["--stage-configs-path", "a.yaml"], {"deploy_config": "a.yaml"}),
        (["--hf-overrides.a.b", "1"], {"hf_overrides": {"a": {"b": 1}}}),
        (["--middleware", "a", "--middleware", "b"], {"middleware": ["a", "b"]}),
        (["--usp", "2"], {"ulysses_degree": 2}),
        (["--cache-config", '{"a": 1}'], {"cache_config": {"a": 1}}),
    ],
)
def test_what_was_typed(
    parser: argparse.ArgumentParser, argv: list[str], expected: dict[str, Any]
) -> None:
    before = vars(parser.parse_args(["m"]))
    assert typed(parser, "m", *argv) == {"model_tag": "m", **expected}
    assert vars(parser.parse_args(["m"])) == before


def test_a_config_file_counts_as_typed(parser: argparse.ArgumentParser, tmp_path: Any) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("max-num-seqs: 5\n")
    assert typed(parser, "m", "--config", str(path))["max_num_seqs"] == 5


@pytest.fixture
def plan_of(
    parser: argparse.ArgumentParser, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The plan of a command line, for the made-up pipeline on a CPU."""

    def with_toy(*args: Any, **kwargs: Any) -> DeploymentPlan:
        return build.build_plan(*args, host=CPU, resolve=lambda *a, **k: PIPELINE, **kwargs)

    monkeypatch.setattr(cli, "build_plan", with_toy)

    def make(*argv: str) -> DeploymentPlan:
        line = [checkpoint, "--omni", *argv]
        args = parser.parse_args(line)
        return plan_from_args(args, explicit_args(parser, line, args))

    return make


def test_defaults(plan_of: Any, checkpoint: str) -> None:
    plan = plan_of()
    assert plan.model == checkpoint
    assert (plan.stage_init_timeout, plan.init_timeout, plan.log_stats) == (300.0, 600.0, False)
    assert plan.stages[0].engine_args.keys() == {
        "model",
        "dtype",
        "enforce_eager",
        "async_scheduling",
    }


def test_everything_at_once(plan_of: Any, tmp_path: Any) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text("async_chunk: true\nstages: [{stage_id: 0, max_num_seqs: 9, seed: 3}]")
    plan = plan_of(
        *("--deploy-config", str(path), "--no-async-chunk", "--init-timeout", "5"),
        *("--max-num-seqs", "4", "--served-model-name", "a", "b", "--log-stats"),
        *("--stage-overrides", '{"talker": {"max_num_seqs": 2}}'),
        *("--default-sampling-params", '{"0": {"temperature": 0.5}}'),
        *("--limit-mm-per-prompt", '{"image": 2}', "--port", "1", "--tool-call-parser", "hermes"),
    )
    assert not plan.async_chunk
    assert plan.init_timeout == 5
    assert plan.log_stats
    assert plan.served_model_names == ("a", "b")
    assert [s.engine_args.get("max_num_seqs") for s in plan.stages] == [4, 2, None]
    assert plan.stages[0].engine_args["seed"] == 3
    assert "limit_mm_per_prompt" not in plan.stages[1].engine_args
    assert plan.stages[0].default_sampling == {"temperature": 0.5}


def test_a_default_that_was_typed_wins_over_the_file(plan_of: Any, tmp_path: Any) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text("stages: [{stage_id: 0, block_size: 16, seed: 3}]")
    plan = plan_of("--deploy-config", str(path), "--seed", "0")
    assert plan.stages[0].engine_args["seed"] == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--worker-cls", "x.Y"], "--worker-cls: may not be set: vLLM-Omni sets it"),
        (["--stage-overrides", "{"], "--stage-overrides: not valid JSON at line 1 column 2"),
        (["--deploy-config", "gone.yaml"], "'gone.yaml' is neither a file nor a packaged one"),
    ],
)
def test_wrong_flags(plan_of: Any, argv: list[str], message: str) -> None:
    with pytest.raises(OmniConfigError, match=message):
        plan_of(*argv)


@pytest.mark.parametrize(
    "argv",
    [["--init-timeout", "0"], ["--worker-backend", "x"], ["--cache-config", "{"]],
)
def test_flags_that_argparse_rejects(
    parser: argparse.ArgumentParser, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["m", *argv])
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--shm-threshold-bytes", "65536"],
        ["--batch-timeout", "10"],
        ["--ray-address", "x"],
        ["--worker-backend", "ray"],
        ["--lora-backend", "peft"],
        ["--enable-cpu-offload"],
    ],
)
def test_flags_without_effect_say_so(
    plan_of: Any, argv: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan_of(*argv)
    assert argv[0] in caplog.text
    assert "effect" in caplog.text


def test_help_can_be_formatted(parser: argparse.ArgumentParser) -> None:
    assert "--stage-overrides" in argparse.ArgumentParser.format_help(parser)


def test_adapters_of_an_autoregressive_entry_are_vllms_own(plan_of: Any) -> None:
    made = plan_of("--lora-modules", "a=/adapters/a", "b=/adapters/b", "--max-loras", "2")
    assert made.entry.engine_args["max_loras"] == 2
    assert "lora_modules" not in made.entry.engine_args
    assert made.stage("decoder").diffusion.lora_modules == {}
