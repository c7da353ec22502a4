# SPDX-License-Identifier: Apache-2.0
"""What runs when: the pipelines keep the rules of docs/contributing/ci.md (A-01, A-03 to A-08)."""

import re
import shlex
from typing import Any

import pytest
import yaml

from tests.ci.pipelines import FOLDER, ROOT, commands, jobs

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

PIPELINES = sorted(path.name for path in FOLDER.glob("*.y*ml"))
TESTS = ("test-ready.yml", "test-merge.yml", "test-nightly.yml")
H100 = "mithril-h100-pool"
KEY = "source_file_dependencies"
PLACE = re.compile(r"(?:tests|benchmarks|tools|vllm_omni|docker|\.buildkite)/[\w./-]+")
MADE = ("tests/dfx/perf/results", "benchmarks/results")


def job(name: str, label: str) -> dict[str, Any]:
    """The one job of a pipeline with that label."""
    (found,) = (each for each in jobs(name) if each.get("label") == label)
    return found


def raw(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load((FOLDER / name).read_text())["steps"]


def test_there_are_the_pipelines_of_every_level() -> None:
    assert set(PIPELINES) == {"pipeline.yml", "rebase-pipeline.yaml", *TESTS}


@pytest.mark.parametrize("name", PIPELINES)
def test_whatever_a_job_names_is_there(name: str) -> None:
    places = {
        place.rstrip("/")
        for each in jobs(name)
        for text in (*commands(each), *each.get(KEY, []))
        for place in PLACE.findall(text)
        if not place.startswith(MADE)
    }
    assert places
    assert [place for place in places if not (ROOT / place).exists()] == []


@pytest.mark.parametrize("name", ["test-ready.yml", "test-merge.yml"])
def test_only_jobs_on_h100s_depend_on_what_has_changed(name: str) -> None:
    assert not [step for step in raw(name) if "group" in step and KEY in step]
    for each in jobs(name):
        queue = each["agents"]["queue"]
        assert KEY not in each or queue == H100, each["label"]
        if queue == H100 and "Entrypoints" not in each["label"]:
            assert KEY in each, each["label"]


def test_no_job_waits_for_one_that_may_be_left_out() -> None:
    for name in PIPELINES:
        keys = {each["key"] for each in jobs(name) if KEY in each and "key" in each}
        for each in jobs(name):
            waits = each.get("depends_on", [])
            assert not keys & set([waits] if isinstance(waits, str) else waits)


@pytest.mark.parametrize("name", ["pipeline.yml", "rebase-pipeline.yaml"])
def test_the_tests_of_l2_are_uploaded_by_the_uploader(name: str) -> None:
    (step,) = (each for each in jobs(name) if each.get("key") == "upload-ready-pipeline")
    assert commands(step) == [
        "python3 .buildkite/scripts/upload_pipeline.py --upload .buildkite/test-ready.yml"
    ]
    assert step["agents"] == {"queue": "cpu_queue_premerge"}
    assert step["depends_on"] == "image-build"
    assert step.get("if") == ("__UPLOAD_READY_IF__" if name == "pipeline.yml" else None)


def test_entrypoints_are_tested_on_two_gpus_whatever_has_changed() -> None:
    step = job("test-ready.yml", "Entrypoints Test")
    (command,) = commands(step)
    words = shlex.split(command)
    assert words[:2] == ["timeout", "30m"]
    assert (
        "tests/entrypoints/" in words and words[words.index("-m", 5) + 1] == "core_model and cuda"
    )
    assert words[-2:] == ["--run-level", "core_model"]
    assert step["agents"] == {"queue": H100} and KEY not in step
    assert step["env"]["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    (pod,) = (plugin["kubernetes"]["podSpec"] for plugin in step["plugins"])
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["devshm"]["emptyDir"] == {"medium": "Memory"}
    assert "hostPath" in volumes["hf-cache"]


def test_realtime_has_no_job_of_its_own() -> None:
    assert not [each for each in jobs("test-ready.yml") if "Realtime" in each["label"]]


def test_what_l3_runs_without_regard_to_the_change() -> None:
    minutes = {
        "Diffusion · LoRA": 30,
        "Distributed": 60,
        "Entrypoints · On H100": 60,
        "TTS · Qwen3-TTS CustomVoice": 30,
        "TTS · Qwen3-TTS Base": 30,
        "TTS · VoxCPM2": 30,
        "TTS · Higgs-Audio V2": 30,
        "Diffusion · Z-Image": 30,
        "Diffusion · FLUX.2 Klein": 30,
    }
    for label, limit in minutes.items():
        step = job("test-merge.yml", label)
        assert KEY not in step and step["timeout_in_minutes"] == limit


def test_performance_of_higgs_audio_v3_is_measured_every_night() -> None:
    step = job("test-nightly.yml", "TTS · Performance · Higgs-Audio V3")
    assert step["key"] == "nightly-tts-performance-higgs-audio-v3"
    for reason in ('build.env("NIGHTLY") == "1"', '"nightly-test"', '"tts-test"'):
        assert reason in step["if"]
    assert step["timeout_in_minutes"] == 180
    assert step["env"] == {
        "BENCHMARK_DIR": "tests/dfx/perf/results",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_MOE_USE_DEEP_GEMM": "0",
    }
    assert step["secrets"] == ["HF_TOKEN"]
    (script,) = commands(step)
    measured, uploaded, ended = script.rstrip().rsplit("\n", 2)
    assert measured.endswith("; rc=$$?") and ended == "exit $$rc", "figures of a failed run, too"
    assert uploaded == 'buildkite-agent artifact upload "tests/dfx/perf/results/*.json"'


def test_the_report_has_every_measurement() -> None:
    report = job("test-nightly.yml", ":bar_chart: Report")
    measured = {
        each["key"] for each in jobs("test-nightly.yml") if "performance" in each.get("key", "")
    }
    assert set(report["depends_on"]) == measured
    downloads = " ".join(commands(report))
    assert all(f"--step {key} " in downloads for key in measured)


def test_the_rules_are_written_down() -> None:
    text = (ROOT / "docs" / "contributing" / "ci.md").read_text()
    for word in (KEY, H100, "gpu_1_queue", "gpu_4_queue", "`ready`", "`merge-test`", *TESTS):
        assert word in text
