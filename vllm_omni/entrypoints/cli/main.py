# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni` command, and what `vllm ... --omni` calls.

vLLM's CLI imports `main` of exactly this module when `--omni` is among its arguments.
"""

import sys

SUBCOMMANDS = ("serve", "bench")
FLAG = "--omni"


def main() -> None:
    """Run the command line in `sys.argv`."""
    command = next((arg for arg in sys.argv[1:] if not arg.startswith("-")), None)
    if command is None or command in SUBCOMMANDS:
        _run(command)
    elif FLAG in sys.argv:
        known = ", ".join(SUBCOMMANDS)
        print(f"vllm-omni: error: {FLAG} works with {known}, not {command!r}", file=sys.stderr)
        sys.exit(2)
    else:
        from vllm.entrypoints.cli.main import main as vllm_main

        vllm_main()


def _run(command: str | None) -> None:
    """Parse and dispatch. Imports are lazy: `--help` and `--version` need none of them."""
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_omni import __version__

    parser = FlexibleArgumentParser(
        prog="vllm-omni", description="Serving for omni-modal models, on vLLM."
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=False, dest="subparser", metavar="{serve,bench}")
    cli_env_setup()
    commands = {}
    if command in (None, "serve"):
        from vllm_omni.entrypoints.cli.serve import OmniServeSubcommand

        commands["serve"] = OmniServeSubcommand()
    if command in (None, "bench"):
        from vllm_omni.entrypoints.cli.bench import OmniBenchSubcommand

        commands["bench"] = OmniBenchSubcommand()
    for each in commands.values():
        each.subparser_init(subparsers)
    args = parser.parse_args([arg for arg in sys.argv[1:] if arg != FLAG or command != "bench"])
    if args.subparser is None:
        parser.print_help()
        return
    configure_logging_from_args(args)
    _dispatch(commands[args.subparser], args)


def _dispatch(subcommand, args) -> None:
    from vllm_omni.entrypoints.cli.serve import EXIT_CONFIG, fail
    from vllm_omni.errors import OmniConfigError

    try:
        subcommand.validate(args)
        subcommand.cmd(args)
    except OmniConfigError as error:
        fail(str(error), EXIT_CONFIG)


if __name__ == "__main__":
    main()
