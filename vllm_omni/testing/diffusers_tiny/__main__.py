# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_omni.testing.diffusers_tiny FAMILY OUTDIR``: write one tiny checkpoint."""

import argparse
from pathlib import Path

from vllm_omni.testing.diffusers_tiny import FAMILIES, build


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_omni.testing.diffusers_tiny", description=__doc__
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("out", type=Path, metavar="OUTDIR")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(build(args.family, args.out, args.seed))


if __name__ == "__main__":
    main()
