# SPDX-License-Identifier: Apache-2.0
"""The metrics that exist, those that are documented and those of REFERENCE.md 2.6 are the same."""

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.conventions.sources import ROOT
from vllm_omni.metrics.catalog import CATALOG, PREFIX
from vllm_omni.metrics.overload import OverloadMetrics
from vllm_omni.metrics.pipeline import PipelineMetrics
from vllm_omni.metrics.vllm_families import stage_metric

REFERENCE = """
num_requests_running num_requests_waiting e2e_request_latency_s requests_success requests_failed
prompt_tokens generation_tokens stage_gen_time_s request_queue_wait_s stage_waiting_requests
stage_in_queue_s
audio_ttfp_s audio_duration_s audio_rtf audio_frames audio_underrun_s audio_continuity_ok
audio_skipped_requests speech_stream_aborted speech_stream_completed
transfer_size_bytes transfer_tx_s transfer_rx_s transfer_in_flight_s
"""
"""REFERENCE.md 2.6 without what does not exist here yet (KV transfers, diffusion, VAD)."""


class _Nothing:
    def gauges(self) -> dict[tuple[str, tuple[str, ...]], float]:
        return {}


def test_every_metric_of_the_reference_exists() -> None:
    assert set(REFERENCE.split()) <= CATALOG.keys()


def test_the_table_is_the_catalog() -> None:
    documented = [
        line
        for line in (ROOT / "docs" / "observability.md").read_text().splitlines()
        if line.startswith(f"| `{PREFIX}")
    ]
    assert documented == [
        f"| `{PREFIX}{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.help} |"
        for m in CATALOG.values()
    ]


def test_the_registry_has_the_catalog_and_nothing_else() -> None:
    nothing = _Nothing()
    PipelineMetrics().watch(nothing)
    text = generate_latest(REGISTRY).decode()
    found = {
        family.name.removeprefix(PREFIX): family.type
        for family in text_string_to_metric_families(text)
        if family.name.startswith(PREFIX) and not family.name.endswith("_created")
    }
    assert found == {metric.name: metric.kind for metric in CATALOG.values()}


def test_what_others_report_is_counted() -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(PREFIX + name, labels) or 0

    metrics = PipelineMetrics()
    late = value("event_loop_lag_s_sum", loop="orchestrator")
    metrics.evicted("talker")
    metrics.respawned("talker")
    metrics.retried("talker")
    metrics.loop_lag(-0.1)  # a clock's rounding
    door = OverloadMetrics()
    door.rejected("queue_full")
    door.loop_lag(0.2)
    door.waiting(3, 2)

    for name in ("replica_evictions", "replica_respawns", "request_retries"):
        assert value(f"{name}_total", stage="talker") >= 1
    assert value("requests_rejected_total", reason="queue_full") >= 1
    assert value("event_loop_lag_s_sum", loop="api") >= 0.2
    assert value("event_loop_lag_max_s") >= 0.2
    assert value("num_requests_waiting") >= 3
    assert value("num_clients_waiting") >= 2
    assert value("event_loop_lag_s_sum", loop="orchestrator") == late


def test_vllms_labels_become_ours() -> None:
    """By position and by name, a `stage` of vLLM's own, several engines in a replica."""
    from prometheus_client import Counter, Gauge

    def labels_of(name: str) -> list[dict[str, str]]:
        text = generate_latest(REGISTRY).decode()
        return [
            sample.labels
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]

    names = ["model_name", "engine"]
    gauge = stage_metric(Gauge, ("a", "1"), "vllm:test_gauge", "help", labelnames=names)
    gauge.labels("m", "0").set(1)
    again = stage_metric(Gauge, ("b", "0"), "vllm:test_gauge", "help", labelnames=names)
    again.labels(model_name="m", engine=2).set(1)
    assert labels_of("vllm:test_gauge") == [
        {"model_name": "m", "stage": "a", "replica": "1"},
        {"model_name": "m", "stage": "b", "replica": "0.2"},
    ]
    own = stage_metric(Counter, ("a", "1"), "vllm:test_own", "help", labelnames=[*names, "stage"])
    own.labels("m", "0", stage="fetch").inc()
    assert labels_of("vllm:test_own_total") == [
        {"model_name": "m", "phase": "fetch", "stage": "a", "replica": "1"}
    ]
    plain = stage_metric(Counter, ("a", "1"), "vllm:test_plain", "help", labelnames=["reason"])
    plain.labels(reason="r").inc()
    assert labels_of("vllm:test_plain_total") == [{"reason": "r"}]
