# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve --omni` against a server whose timing is known (REFERENCE.md 2.7)."""

import argparse
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.benchmarks.bench import bench, command_line, started
from tests.benchmarks.fake import (
    HEADER_AFTER_S,
    PIECES,
    RATE,
    SOUND_AFTER_S,
    TEXT,
    FakeServer,
    fake_server,
)
from vllm_omni.benchmarks.datasets import requests_of
from vllm_omni.benchmarks.values import metadata
from vllm_omni.entrypoints.cli.bench import OmniBenchmarkServing
from vllm_omni.errors import OmniConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

WAV = ("--extra-body", '{"response_format": "wav"}')
SPEECH = "openai-audio-speech"
ADDRESSES = ("localhost:8000", "ftp://h", "http://", "http://h:99999", "http://a b", "http://h?a")
SENTENCES = ("--dataset-name", "sentences", "--num-prompts")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as it:
        yield it


def test_speech_of_a_server_with_known_delays(server: FakeServer, tmp_path: Path) -> None:
    limits = (*WAV, "--max-concurrency", "2", "--metric-percentiles", "50,95")
    result = bench(server.url, SPEECH, tmp_path, *SENTENCES, "6", *limits)
    assert (result["completed"], result["failed"], server.most) == (6, 0, 2)
    seconds = PIECES / 4
    assert result["total_audio_duration_s"] == pytest.approx(6 * seconds)
    assert result["total_audio_frames"] == 6 * seconds * RATE
    assert result["audio_throughput"] == pytest.approx(6 * seconds / result["duration"])
    assert result["median_audio_duration_s"] == pytest.approx(seconds)
    # The server waits at least as long as it says; how much longer is the machine's affair.
    assert result["median_audio_ttfp_ms"] >= 1e3 * HEADER_AFTER_S
    assert result["median_audio_playable_ms"] >= 1e3 * (HEADER_AFTER_S + SOUND_AFTER_S)
    assert result["median_e2el_ms"] >= result["median_audio_playable_ms"]
    assert len(result["requests"]) == 6
    for one, latency in zip(result["requests"], result["latencies"], strict=True):
        assert one["audio_rtf"] == pytest.approx(latency / seconds)
        assert one["audio_ttfp_ms"] < one["audio_playable_ms"] <= 1e3 * latency
    assert result["p50_audio_rtf"] == result["median_audio_rtf"] <= result["p95_audio_rtf"]
    assert not {"total_output_tokens", "ttfts", "mean_image_generation_ms"} & set(result)


def test_chat_counts_the_text_apart_from_the_sound(server: FakeServer, tmp_path: Path) -> None:
    chat = ("openai-chat-omni", tmp_path, *SENTENCES, "2", "--skip-tokenizer-init")
    result = bench(server.url, *chat, "--output-len", "5")
    assert result["generated_texts"] == ["".join(TEXT)] * 2
    assert (result["total_output_tokens"], result["total_input_tokens"]) == (6, 14)
    assert result["total_audio_duration_s"] == pytest.approx(1.0)
    assert result["median_audio_ttfp_ms"] >= 1e3 * SOUND_AFTER_S
    for number, between in enumerate(result["itls"]):
        assert len(between) == len(TEXT) - 1
        one = result["requests"][number]
        assert one["tpot_ms"] == pytest.approx(1e3 * sum(between) / 2)
        assert one["audio_rtf"] == pytest.approx(one["audio_playable_ms"] / 500)
        assert result["ttfts"][number] * 1e3 <= one["audio_ttfp_ms"] <= one["audio_playable_ms"]
    asked = server.bodies[0]
    assert (asked["modalities"], asked["max_completion_tokens"]) == (["text", "audio"], 5)


def test_open_loop_does_not_wait_for_answers(server: FakeServer, tmp_path: Path) -> None:
    rate = ("--request-rate", "200", "--seed", "3")
    result = bench(server.url, SPEECH, tmp_path, *SENTENCES, "8", *WAV, *rate)
    assert result["request_rate"] == 200 and result["max_concurrency"] is None
    assert server.most > 2
    between = [
        b - a for a, b in zip(result["start_times"], result["start_times"][1:], strict=False)
    ]
    assert len({round(each, 4) for each in between}) > 1  # no clockwork


def test_a_sweep_saves_each_load_and_draws_them(server: FakeServer, tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "load.png"
    saving = ("--save-result", "--result-filename", str(tmp_path / "run.json"))
    command_line(
        *("--base-url", server.url, "--model", "tiny", "--backend", SPEECH, *SENTENCES, "4"),
        *(*WAV, *saving, "--sweep-max-concurrency", "1,3", "--plot-load", str(plot)),
    )
    saved = sorted(file.name for file in tmp_path.glob("*.json"))
    assert saved == ["run-concurrency1.json", "run-concurrency3.json"]
    assert server.most == 3
    with Image.open(plot) as picture:
        assert picture.format == "PNG" and min(picture.size) > 500
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 10


def test_the_same_seed_asks_the_same() -> None:
    def asked(seed: int) -> list[object]:
        options = {"dataset_name": "sentences", "num_prompts": 50, "seed": seed}
        rest = {"disable_shuffle": False, "output_len": 7, "request_id_prefix": "r"}
        requests = requests_of(argparse.Namespace(**options, **rest), None, ())
        assert [request.expected_output_len for request in requests] == [7] * 50
        assert len({request.request_id for request in requests}) == 50
        return [request.prompt for request in requests]

    assert asked(1) == asked(1) != asked(2)
    assert sorted(asked(1)[:40]) == sorted(asked(2)[:40]), "all of them before one comes again"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--extra-body", '{"fail": 1}'), "the machine is on fire"),
        (("--omni-request-timeout-s", "0.05"), "--omni-request-timeout-s"),
    ],
)
def test_when_every_request_fails(
    server: FakeServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    says: str,
) -> None:
    """The result is saved, and the command fails with the server's words."""
    with pytest.raises(SystemExit) as ended:
        bench(server.url, SPEECH, tmp_path, *SENTENCES, "2", *options)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in line and line.startswith("vllm-omni: error: ")
    assert ended.value.code == 1
    assert json.loads((tmp_path / "result.json").read_text())["failed"] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--percentile-metrics", "ttft,audio_ttpf"), "did you mean 'audio_ttfp'"),
        (("--metric-percentiles", "101"), "--metric-percentiles"),
        (("--endpoint", "/v1/completions"), "--endpoint: openai-audio-speech is for"),
        (("--dataset-name", "sentence"), "--dataset-name sentence"),
        (("--sweep-request-rate", "1,2", "--request-rate", "3"), "--sweep-request-rate"),
        (("--sweep-max-concurrency", "1,x"), "--sweep-max-concurrency"),
        (("--plot-load", "load.jpg"), "should end in .png"),
        (("--extra-body", '{"response_format": "mp3"}'), "'mp3'"),
        (("--extra-body", '{"stream_format": "sse"}'), "stream_format"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--max-concurrency", "0"), "--max-concurrency"),
        (("--request-rate", "-1"), "--request-rate"),
        (("--header", "no-equals"), "--header"),
        (("--goodput", "ttff:3"), "--goodput"),
        (("--goodput", "tpot:3"), "no tpot"),
        (("--backend", "openai-embeddings"), "--backend"),
        (("--plot-timeline",), "--plot-timeline"),
        (("--image-edits-bot-task", "recaption"), "--image-edits-bot-task"),
        (("--print-stages",), "did you mean --print-stage"),
        (("--backend", "openai-image-edits-omni"), "sentences-mm"),
        (("--backend", "openai-audio"), "--dataset-name"),
        (("--dataset-name", "random", "--skip-tokenizer-init"), "needs a tokenizer"),
        (("--extra-body", "[1]"), "--extra-body: should be a JSON object"),
        (("--num-warmups", "-3"), "--num-warmups"),
        (("--sweep-request-rate", "2,2.0000001"), "--sweep-request-rate"),
        (("--sweep-max-concurrency", "1,1"), "--sweep-max-concurrency"),
    ],
)
def test_bad_options_are_named(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    """Before anything is asked of a server: there is none."""
    base = ("--base-url", "http://127.0.0.1:9", "--model", "tiny", "--backend", SPEECH)
    with pytest.raises(SystemExit) as ended:
        command_line(*base, *SENTENCES, "2", *options)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(conflict_handler="resolve")
    OmniBenchmarkServing.add_cli_args(made)
    return made


@pytest.mark.parametrize("backend", ["openai-audio-speech", "openai-chat"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--extra-body", '{"speed": NaN}'), "--extra-body"),
        (("--random-mm-limit-mm-per-prompt", "[1]"), "--random-mm-limit-mm-per-prompt"),
        (("--random-mm-bucket-config", "{(1, 1, -1): 1}"), "--random-mm-bucket-config"),
        *((("--goodput", f"e2el:{bad}"), "--goodput") for bad in ("nan", "inf", "-1", "", "1:2")),
        (("--goodput", "e2el:1", "e2el:2"), "--goodput"),
        (("--num-prompts", "1000000000000"), "--num-prompts"),
        (("--seed", "-1"), "--seed"),
        (("--temperature", "nan"), "--temperature"),
        (("--burstiness", "inf"), "--burstiness"),
        (("--request-rate", "1e-310"), "--request-rate"),
        (("--probe-request-rate", "-1"), "--probe-request-rate"),
        (("--sweep-request-rate", "1,1e-310"), "--sweep-request-rate"),
        (("--metadata", "=1"), "--metadata"),
        *((("--base-url", bad), "--base-url") for bad in ADDRESSES),
        (("--base-url", "http://h", "--endpoint", "v1/audio/speech"), "--endpoint"),
        *((("--header", bad), "--header") for bad in ("a=b\nc", "a=b\n", "=b", "a b=c", "é=1")),
        (("--header", "a=1", "a=2"), "--header"),
    ],
)
def test_bad_values_are_named_whoevers_benchmark_runs(
    parser: FlexibleArgumentParser, backend: str, options: tuple[str, ...], says: str
) -> None:
    args = ("--model", "tiny", "--backend", backend, "--skip-tokenizer-init", *options)
    with pytest.raises(OmniConfigError, match=f"^{says}: "):
        OmniBenchmarkServing.cmd(parser.parse_args([*args]))


def test_metadata_may_not_take_a_results_key(server: FakeServer, tmp_path: Path) -> None:
    """Of every key that a result has: by name, before anything is asked."""
    rest = ("--max-concurrency", "1", "--metadata", "tp=2")
    result = bench(server.url, SPEECH, tmp_path, *SENTENCES, "1", *WAV, *rest)
    assert result.pop("tp") == "2"
    stages = ("stage_durations_mean", "stage_requests", "spec_decode_num_drafts", "ramp_up_end_rps")
    for key in (*result, *stages):
        with pytest.raises(OmniConfigError, match=f"^--metadata: '{key}'"):
            metadata(argparse.Namespace(metadata=[f"{key}=99"]))


@pytest.mark.parametrize("option", ["--result-filename", "--result-dir", "--plot-load"])
def test_what_cannot_be_written_is_known_before(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    saving = ("--save-result", option, str(file / "of_a_file.png"))
    base = ("--base-url", server.url, "--model", "tiny", "--backend", SPEECH)
    with pytest.raises(SystemExit) as ended:
        command_line(*base, *SENTENCES, "2", *WAV, *saving)
    assert ended.value.code == 2 and not server.bodies
    assert f"error: {option}: " in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [file]


def test_a_full_disk_costs_the_file_alone(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = ("--save-result", "--result-filename", "/dev/full")
    base = ("--base-url", server.url, "--model", "tiny", "--backend", SPEECH)
    with pytest.raises(SystemExit) as ended:
        command_line(*base, *SENTENCES, "2", *WAV, *saving)
    told = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Omni Benchmark Result" in told and "Traceback" not in told
    assert "not written: " in told.strip().splitlines()[-1]


def test_an_interrupted_run_tells_what_it_has(server: FakeServer, tmp_path: Path) -> None:
    log, many = tmp_path / "log", (*SENTENCES, "1000", "--max-concurrency", "1")
    base = ("--base-url", server.url, "--model", "tiny", "--backend", SPEECH)
    process = started(log, *base, *many, *WAV)
    try:
        deadline = time.monotonic() + 60
        while len(server.bodies) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
    told = log.read_text()
    assert " of 1000 requests completed" in told and "Sound throughput" in told
    assert "Traceback" not in told and "Unclosed" not in told
    assert len(server.bodies) < 100
