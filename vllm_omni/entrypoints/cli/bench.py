# SPDX-License-Identifier: Apache-2.0
"""`vllm bench ... --omni`: vLLM's benchmarks; `serve` knows sounds, pictures and videos too."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.cli.benchmark.base import BenchmarkSubcommandBase
from vllm.entrypoints.cli.benchmark.latency import BenchmarkLatencySubcommand
from vllm.entrypoints.cli.benchmark.main import BenchmarkSubcommand
from vllm.entrypoints.cli.benchmark.mm_processor import BenchmarkMMProcessorSubcommand
from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
from vllm.entrypoints.cli.benchmark.startup import BenchmarkStartupSubcommand
from vllm.entrypoints.cli.benchmark.sweep import BenchmarkSweepSubcommand
from vllm.entrypoints.cli.benchmark.throughput import BenchmarkThroughputSubcommand
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.benchmarks import serve
from vllm_omni.benchmarks.backends import register
from vllm_omni.benchmarks.options import add_options
from vllm_omni.entrypoints.cli.types import EXIT_START, fail


class OmniBenchmarkServing(BenchmarkServingSubcommand):
    """vLLM's `bench serve` with our backends, datasets and figures."""

    @classmethod
    def add_cli_args(cls, parser: FlexibleArgumentParser) -> None:
        """vLLM's options and ours."""
        register()
        super().add_cli_args(parser)
        add_options(parser)

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run it."""
        try:
            serve.main(args)
        except serve.BenchmarkFailedError as error:
            fail(str(error), EXIT_START)


BENCHMARKS: tuple[type[BenchmarkSubcommandBase], ...] = (
    BenchmarkLatencySubcommand,
    BenchmarkMMProcessorSubcommand,
    OmniBenchmarkServing,
    BenchmarkStartupSubcommand,
    BenchmarkSweepSubcommand,
    BenchmarkThroughputSubcommand,
)


class OmniBenchSubcommand(BenchmarkSubcommand):
    """vLLM's `bench`, whose `serve` is ours."""

    def subparser_init(self, subparsers: Any) -> FlexibleArgumentParser:
        """A parser for each benchmark, as vLLM makes them; some take a second, so only the chosen.

        The command line is looked at for that, as in vLLM.
        """
        parser = subparsers.add_parser(
            self.name, help=self.help, description=self.help, usage="vllm bench <bench_type> --omni"
        )
        kinds = parser.add_subparsers(required=True, dest="bench_type")
        chosen = [kind for kind in BENCHMARKS if kind.name in sys.argv]
        for kind in chosen or BENCHMARKS:
            # Options of ours take the place of vLLM's of the same name.
            each = kinds.add_parser(
                kind.name,
                help=kind.help,
                description=kind.help,
                usage=f"vllm bench {kind.name} --omni [options]",
                conflict_handler="resolve",
            )
            each.set_defaults(dispatch_function=kind.cmd)
            kind.add_cli_args(each)
            each.epilog = VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=f"bench {kind.name}")
        return parser

    def run(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        """Run the chosen benchmark."""
        self.cmd(args)
