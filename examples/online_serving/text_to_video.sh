#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make a video in one go, then one in the background. Needs curl and jq.
#   SIZE=832x480 STEPS=40 FPS=16 ./text_to_video.sh http://localhost:8000
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed --quiet '3,/^[^#]/{s/^# *//p}' "$0"
  exit
fi
url=${1:-http://localhost:8000}/v1/videos
fields=(
  --form prompt='A small robot walks through a neon city'
  --form size="${SIZE:-832x480}" --form num_frames="${FRAMES:-33}" --form fps="${FPS:-16}"
  --form num_inference_steps="${STEPS:-40}" --form guidance_scale=4.5 --form seed=1
)
call() {
  curl --silent --show-error --fail-with-body \
    --header "Authorization: Bearer ${OPENAI_API_KEY:-none}" "$@"
}

call "$url/sync" "${fields[@]}" --output sync.mp4
echo sync.mp4

id=$(call "$url" "${fields[@]}" | jq --raw-output .id)
until status=$(call "$url/$id" | jq --raw-output .status) && [[ $status == completed ]]; do
  [[ $status == failed ]] && { call "$url/$id"; exit 1; }
  sleep 1
done
call "$url/$id/content" --output background.mp4
call --request DELETE "$url/$id" > /dev/null
echo background.mp4
