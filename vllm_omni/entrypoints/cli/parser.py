# SPDX-License-Identifier: Apache-2.0
"""vLLM's parser of command lines, which says of an unknown option what was most likely meant."""

import argparse
from collections.abc import Sequence
from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.problems import nearest
from vllm_omni.entrypoints.cli.types import EXIT_CONFIG, fail


class OmniArgumentParser(FlexibleArgumentParser):
    """vLLM's; its subparsers are of this class too."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """See `argparse.ArgumentParser`; ends the process if there is an argument nobody knows."""
        parsed, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            _refuse(unknown, parsed)
        return parsed, unknown


def _refuse(unknown: Sequence[str], parsed: argparse.Namespace) -> None:
    option = next((arg for arg in unknown if arg.startswith("-")), None)
    if option is None:
        fail(f"unexpected argument {unknown[0]!r}", EXIT_CONFIG)
    name = option.partition("=")[0]
    match = nearest(name.lstrip("-"), vars(parsed))
    hint = f"; did you mean --{match.replace('_', '-')}?" if match else ""
    fail(f"unknown option {name}{hint}", EXIT_CONFIG)
