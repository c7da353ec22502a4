# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with a line break at its end; a bar in a cell becomes a broken one."""
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join(f"| {' | '.join(cell.replace('|', '¦') for cell in row)} |" for row in lines)
        + "\n"
    )
