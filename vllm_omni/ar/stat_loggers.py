# SPDX-License-Identifier: Apache-2.0
"""vLLM's statistics of an AR stage's replica, for Prometheus and for the log."""

from functools import partial

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.perf import PerfMetricsProm
from vllm.v1.spec_decode.metrics import SpecDecodingProm

from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.metrics.vllm_families import stage_metric


class StagePrometheusLogger(PrometheusStatLogger):
    """vLLM's metrics with `stage` and `replica` in the place of `engine`."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        config = ArStageConfig.of(vllm_config)
        place = (config.stage, str(config.replica))
        gauge, counter, histogram = (
            partial(stage_metric, kind, place) for kind in (Gauge, Counter, Histogram)
        )

        class SpecDecoding(SpecDecodingProm):
            _counter_cls = counter

        class KVConnector(KVConnectorProm):
            _gauge_cls, _counter_cls, _histogram_cls = gauge, counter, histogram

        class ECConnector(ECConnectorProm):
            _gauge_cls, _counter_cls, _histogram_cls = gauge, counter, histogram

        class Perf(PerfMetricsProm):
            _counter_cls = counter

        self._gauge_cls, self._counter_cls, self._histogram_cls = gauge, counter, histogram
        self._spec_decoding_cls = SpecDecoding
        self._kv_connector_cls = KVConnector
        self._ec_connector_cls = ECConnector
        self._perf_metrics_cls = Perf
        super().__init__(vllm_config, engine_indexes)


class StageLogLogger(LoggingStatLogger):
    """vLLM's line of statistics, named after the stage."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        config = ArStageConfig.of(vllm_config)
        self._place = f"Stage {config.stage} replica {config.replica}: "
        super().__init__(vllm_config, engine_index)

    @property
    def log_prefix(self) -> str:
        """The start of each line."""
        return self._place
