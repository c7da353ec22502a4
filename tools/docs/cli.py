# SPDX-License-Identifier: Apache-2.0
"""docs/reference/cli.md, from the parsers of the command line."""

import argparse
from collections.abc import Callable, Collection, Iterator

from tools.docs.tables import table
from vllm_omni.benchmarks.options import add_options
from vllm_omni.config.cli import add_omni_args
from vllm_omni.config.idle import FLAG_IDLE, STAGE_IDLE
from vllm_omni.entrypoints.cli.main import HELP
from vllm_omni.entrypoints.cli.serve import add_frontend_args

INTRO = f"""\
# Command line

`vllm ... --omni` and `vllm-omni ...` are the same program:

```text
{HELP.strip()}
```

Below are the flags of this project. Every flag of vLLM's is taken too; `vllm serve --omni
--help=all` shows both. What a flag does for one stage alone is said in a
[deploy file or by `--stage-overrides`](../configuration.md).
"""


def render() -> str:
    """The page."""
    idle = FLAG_IDLE.keys() | {name for name, entry in STAGE_IDLE.items() if entry.flag}
    parts = [
        INTRO,
        "## `vllm serve MODEL --omni`\n",
        "Stages and requests:\n",
        flags(add_omni_args, idle),
        "The HTTP server and its limits:\n",
        flags(add_frontend_args, idle),
        "Flags that are [accepted without effect](../configuration.md#on-the-command-line) are "
        "listed with their reasons.\n",
        "## `vllm bench serve --omni`\n",
        "[How to measure a server](../benchmarks.md#how-to-measure-a-server) shows them at work.\n",
        flags(add_options),
    ]
    return "\n".join(parts)


def flags(add: Callable[[argparse.ArgumentParser], object], without: Collection[str] = ()) -> str:
    """A table of the flags that a function adds to a parser.

    Args:
        add: The function.
        without: Names (`dest`) of those to leave out.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    return table(("flag", "meaning"), _rows(parser, without))


def _rows(parser: argparse.ArgumentParser, without: Collection[str]) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if action.dest in without:
            continue
        names = ", ".join(f"`{option}`" for option in action.option_strings)
        default = "" if action.default in (None, False, []) else f" Default: {action.default}."
        yield names, (action.help or "").replace("%%", "%") + default
