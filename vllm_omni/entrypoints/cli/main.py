# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni` command, and what `vllm ... --omni` calls.

vLLM's CLI imports `main` of exactly this module when `--omni` is among its arguments. Heavy imports
wait until it is known that they are needed.
"""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError

from vllm_omni.entrypoints.cli.others import MODULES as OTHERS
from vllm_omni.entrypoints.cli.quiet import quiet_signals
from vllm_omni.entrypoints.cli.types import EXIT_CONFIG, EXIT_START, OmniSubcommand, fail

SUBCOMMANDS = ("serve", "bench")
FLAG = "--omni"
EXIT_INTERRUPTED = 130
HELP = f"""usage: vllm-omni [-h] [-v] {{{",".join(SUBCOMMANDS)}}} ...

Serving for omni-modal models, on vLLM.

  serve MODEL    Serve a multi-stage, multi-modal pipeline over HTTP (OpenAI-compatible).
  bench          Benchmark a server.

  -h, --help     This text; after a command, its options.
  -v, --version  The version.

The same as `vllm {{{",".join(SUBCOMMANDS)}}} ... --omni`. These commands are vLLM's as they are:
{", ".join(OTHERS)}.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line: `argv`, by default that of this process, without the program's name."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = next((arg for arg in argv if not arg.startswith("-")), None)
    if command in SUBCOMMANDS:
        _run(command, argv)
    elif command is None:
        _no_command(argv)
    elif command not in OTHERS:
        near = get_close_matches(command, (*SUBCOMMANDS, *OTHERS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see vllm-omni --help"
        fail(f"unknown command {command!r}; {hint}", EXIT_CONFIG)
    elif FLAG in argv:
        fail(f"{FLAG} works with {', '.join(SUBCOMMANDS)}, not {command!r}", EXIT_CONFIG)
    else:
        _run(command, argv)


def _no_command(argv: list[str]) -> None:
    from vllm_omni import __version__

    options = [arg for arg in argv if arg != FLAG]
    unknown = [arg for arg in options if arg not in ("-h", "--help", "-v", "--version")]
    if unknown:
        fail(f"unknown option {unknown[0]}; see vllm-omni --help", EXIT_CONFIG)
    print(__version__ if options and options[0] in ("-v", "--version") else HELP)


def _run(command: str, argv: list[str]) -> None:
    """Parse and dispatch a command."""
    # torch reads it once, at its first tensor. To free 100 MB in small pages takes 10 ms, with
    # Python's lock held; in large ones that, and to fill them, is a fraction of it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with quiet_signals():  # all of this takes seconds of imports
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.logger import configure_logging_from_args

        from vllm_omni.entrypoints.cli.parser import OmniArgumentParser
        from vllm_omni.errors import OmniConfigError
        from vllm_omni.logs import log_as_vllm

        cli_env_setup()
        parser = OmniArgumentParser(prog="vllm-omni")
        subparsers = parser.add_subparsers(required=True, dest="subparser")
        subcommand = _subcommand(command)
        subcommand.subparser_init(subparsers)
        if command == "bench":
            argv = [arg for arg in argv if arg != FLAG]  # vLLM's parsers do not know it
        args = parser.parse_args(argv)
        configure_logging_from_args(args)
        log_as_vllm()
    try:
        subcommand.validate(args)
        subcommand.run(args, argv[argv.index(command) + 1 :])
    except OmniConfigError as error:
        fail(str(error), EXIT_CONFIG)
    except PackageNotFoundError as error:
        fail(f"vLLM's {command!r} needs the package {error.name!r} by that name", EXIT_START)
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)


def _subcommand(command: str) -> OmniSubcommand:
    if command in OTHERS:
        from vllm_omni.entrypoints.cli.others import VllmSubcommand

        return VllmSubcommand(command)
    if command == "bench":
        from vllm_omni.entrypoints.cli.bench import OmniBenchSubcommand

        return OmniBenchSubcommand()
    from vllm_omni.entrypoints.cli.serve import OmniServeSubcommand

    return OmniServeSubcommand()


if __name__ == "__main__":
    main()
