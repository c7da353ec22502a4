# SPDX-License-Identifier: Apache-2.0
"""`vllm bench ... --omni`: vLLM's benchmarks.

This is where backends and data sets for omni-modal requests are added.
"""

import argparse
from collections.abc import Sequence

from vllm.entrypoints.cli.benchmark.main import BenchmarkSubcommand


class OmniBenchSubcommand(BenchmarkSubcommand):
    """vLLM's `bench`."""

    def run(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        """Run the chosen benchmark."""
        self.cmd(args)
