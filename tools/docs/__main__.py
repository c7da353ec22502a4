# SPDX-License-Identifier: Apache-2.0
"""Write the generated pages of `docs/`, or say which are stale.

Usage: python -m tools.docs [--check]
"""

import argparse
import sys

from tools.docs.pages import PAGES, page


def main() -> int:
    """Write or check; 1 if a page was stale and is to be checked only."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if one is stale")
    check = parser.parse_args().check
    stale = [path for path in PAGES if not path.is_file() or path.read_text("utf-8") != page(path)]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page(path), encoding="utf-8")
        print(f"{path} {'is stale: run python -m tools.docs' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
