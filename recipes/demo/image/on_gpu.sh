#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train, export and evaluate demo-image on this machine's GPU. Weights are copied first, so that a
# failure after the training loses none of it.
#   bash recipes/demo/image/on_gpu.sh OUT [--seconds N] [--no-compiled]
set -euo pipefail
out=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TORCHDYNAMO_SUPPRESS_ERRORS=1
work=$(mktemp -d)
python3 -m recipes.demo.image.train --out "$work/weights.safetensors" "$@" | tee "$out/train.log"
cp "$work/weights.safetensors" "$work/training.json" "$out/"
python3 -m recipes.demo.image.export --weights "$work/weights.safetensors" --out "$work/demo-image"
tar -C "$work" -cf "$out/demo-image.tar" demo-image
evaluate() { python3 -m recipes.demo.image.evaluate --model "$work/demo-image" "$@"; }
evaluate --sheet "$out/unseen.png"
evaluate --guidance 1 --sheet "$out/unguided.png"
evaluate --seen --sheet "$out/seen.png"
evaluate --steps 15
