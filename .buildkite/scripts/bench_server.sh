#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a model, measure it by `vllm bench serve --omni`, stop it; the exit code is the measurement's.
# Usage: bench_server.sh MODEL FLAG...   Figures go to $BENCHMARK_DIR, $VLLM is the program.
set -euo pipefail
model=$1
shift
vllm=${VLLM:-.venv-cuda/bin/vllm}
url=http://127.0.0.1:${PORT:-8000}
mkdir -p "$BENCHMARK_DIR"

"$vllm" serve "$model" --omni --port "${PORT:-8000}" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true' EXIT
until curl --silent --fail --output /dev/null "$url/health"; do
  kill -0 "$server" 2>/dev/null || { echo "the server did not start" >&2; exit 1; }
  sleep 1
done
"$vllm" bench serve --omni --base-url "$url" --model "$model" \
  --save-result --result-dir "$BENCHMARK_DIR" "$@"
