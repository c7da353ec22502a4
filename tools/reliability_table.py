# SPDX-License-Identifier: Apache-2.0
"""Print docs/reliability.md's figures from what its tests measured.

VLLM_OMNI_MEASURED=measured.jsonl pytest tests/dfx/reliability --run-level full_model
python tools/reliability_table.py measured.jsonl
"""

import json
import sys
from collections import defaultdict
from pathlib import Path


def main(path: str) -> None:
    """Print the longest time of each scenario and event."""
    longest: dict[tuple[str, str], float] = defaultdict(float)
    for line in Path(path).read_text().splitlines():
        each = json.loads(line)
        if each["scenario"]:
            key = (each["scenario"], each["what"])
            longest[key] = max(longest[key], each["seconds"])
    print("| scenario | event | seconds |\n|---|---|---|")
    for (scenario, what), seconds in sorted(longest.items()):
        print(f"| {scenario} | {what} | {seconds:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1])
