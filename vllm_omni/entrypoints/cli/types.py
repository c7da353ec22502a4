# SPDX-License-Identifier: Apache-2.0
"""What the subcommands of `vllm-omni` have in common."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

EXIT_START = 1
EXIT_CONFIG = 2


class OmniSubcommand(Protocol):
    """A subcommand."""

    name: str

    def subparser_init(self, subparsers: Any) -> Any:
        """Add the subcommand's parser and return it."""

    def validate(self, args: argparse.Namespace) -> None:
        """Check parsed flags; raises `OmniConfigError`."""

    def run(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        """Do it. `argv` is everything after the subcommand's name."""


def fail(message: str, code: int) -> NoReturn:
    """End the process with one line on stderr."""
    print(f"vllm-omni: error: {message}", file=sys.stderr)
    sys.exit(code)
