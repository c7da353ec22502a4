# SPDX-License-Identifier: Apache-2.0
"""What the rows of a decode step cost the host, all at once and one at a time.

    python benchmarks/row_messages.py

64 requests, whose rows are those of Qwen3-Omni-30B-A3B's thinker (two tensors of width 2048 in
bfloat16): written to the connector by the stage that emits them, and read by the one that they
drive. The baseline writes and reads each request's rows by itself, as was done before.
"""

import statistics
import time
from collections.abc import Callable

import torch
from common import Report

from vllm_omni.ar.row_reading import RowReader, selected
from vllm_omni.connectors.base import make_key
from vllm_omni.connectors.shm import SharedMemoryConnector, SharedMemoryOptions
from vllm_omni.handles import RowSpan, TensorHandle
from vllm_omni.inputs import RowInput

REQUESTS = 64
WIDTH = 2048
ROUNDS = 200


def median_ms(run: Callable[[], object]) -> float:
    """Of many rounds."""
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


def message(handle: TensorHandle | None) -> RowInput:
    """A text token's row, on its way to the stage that it drives."""
    assert handle is not None
    return RowInput(spans=[RowSpan(0, 1, handle)], index=[0], kinds=b"\x01")


def main() -> None:
    torch.set_num_threads(1)
    options = SharedMemoryOptions(inline_small_payloads=True, shm_threshold_bytes=262144)
    connector = SharedMemoryConnector("row-messages", options)
    reader = RowReader(connector, "thinker", "talker")
    names = ("embeds", "hidden")
    rows = {name: torch.randn(REQUESTS, WIDTH).bfloat16() for name in names}
    keys = [make_key(f"request-{i}", "rows.0") for i in range(REQUESTS)]

    def write_each() -> list[RowInput]:
        parts = [{name: each[i : i + 1] for name, each in rows.items()} for i in range(REQUESTS)]
        pairs = zip(keys, parts, strict=True)
        return [message(connector.put("a", "b", key, part).handle) for key, part in pairs]

    def write_all() -> list[RowInput]:
        return [message(each.handle) for each in connector.put_rows("a", "b", keys, rows)]

    messages = write_all()
    report = Report("row_messages")
    for what, all_at_once, one_at_a_time in (
        ("writing", write_all, write_each),
        (
            "reading",
            lambda: reader.read_alike(messages),
            lambda: [selected(reader.read(each), each.index) for each in messages],
        ),
    ):
        together, apart = median_ms(all_at_once), median_ms(one_at_a_time)
        report.add(f"{what} a step's rows", together, "ms", note=f"one at a time {apart:.2f} ms")
        report.add(f"{what}: over one at a time", together / apart, "", 0.25)
    connector.close()
    report.finish()


if __name__ == "__main__":
    main()
