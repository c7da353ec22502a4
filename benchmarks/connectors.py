# SPDX-License-Identifier: Apache-2.0
"""Time to hand a tensor to another process: the shared-memory connector against a pickling pipe.

    python benchmarks/connectors.py

One round is: the producer has a tensor, a forked consumer gets it, reads a byte of every page and
answers with an empty message. Both ways run alternately in the same process pair, so that their
ratio holds on a busy machine too. The pickle baseline sends the numpy array (protocol 5), which is
several times faster than pickling a torch tensor.
"""

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch

from vllm_omni.connectors.base import make_key
from vllm_omni.connectors.segments import new_deployment_id
from vllm_omni.connectors.shm import SharedMemoryConnector, SharedMemoryOptions
from vllm_omni.handles import TensorHandle

SIZES = [1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20]
PAGE = 4096


def consume(pipe: Connection, connector: SharedMemoryConnector) -> None:
    """Receive payloads of either kind until told to stop by a None."""
    while (message := pipe.recv()) is not None:
        if isinstance(message, TensorHandle):
            array = connector.get("a", "b", message.key, message)["x"].numpy()
        else:
            array = message["x"]
        int(array[::PAGE].sum())
        pipe.send_bytes(b"")
    connector.close()


def measure(rounds: int, connector: SharedMemoryConnector, pipe: Connection, size: int):
    """Median seconds of one hand-over (connector, pickle) of `size` bytes."""
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        start = time.perf_counter()
        key = make_key("bench", f"{size}.{number}")
        handle = connector.put("a", "b", key, {"x": tensor}).handle
        pipe.send(handle)
        pipe.recv_bytes()
        middle = time.perf_counter()
        pipe.send({"x": tensor.numpy()})
        pipe.recv_bytes()
        times[0].append(middle - start)
        times[1].append(time.perf_counter() - middle)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="rounds per size")
    parser.add_argument("--inline", action="store_true", help="inline payloads below 64 KiB")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    options = SharedMemoryOptions(inline_small_payloads=arguments.inline)
    connector = SharedMemoryConnector(new_deployment_id(), options)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=consume, args=(theirs, connector), daemon=True)
    child.start()
    print(f"{'bytes':>10} {'connector us':>13} {'pickle us':>10} {'pickle / connector':>19}")
    for size in SIZES:
        fast, slow = measure(arguments.rounds, connector, ours, size)
        print(f"{size:>10} {fast * 1e6:>13.0f} {slow * 1e6:>10.0f} {slow / fast:>19.2f}")
    ours.send(None)
    child.join()
    connector.close()


if __name__ == "__main__":
    main()
