#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train and evaluate demo-tts on this machine's GPU; what it makes is saved every minute.
# Needs torch, transformers, pocketsphinx 5.0.4, espeakng-loader 0.2.4, and the word list of
# pyspellchecker (`spellchecker/resources/en.json.gz`).
#   bash recipes/demo/tts/on_gpu.sh OUT WORDS [--codec-seconds N] [--talker-seconds N] [--shards N]
set -euo pipefail
out=$1 words=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
python3 -m recipes.demo.tts.train --out "$out" --weights-only --words "$words" \
  --corpus "$(mktemp -d)" "$@" 2>&1 | tee "$out/log"
