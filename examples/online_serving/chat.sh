#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Text, text and sound, and streamed sound. Needs curl, jq and base64.
#   ./chat.sh http://localhost:8000
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed --quiet '3,/^[^#]/{s/^# *//p}' "$0"
  exit
fi
url=${1:-http://localhost:8000}/v1/chat/completions
question='"messages": [{"role": "user", "content": "Tell me a short story."}]'

ask() {
  curl --silent --show-error --fail-with-body --no-buffer "$url" \
    --header 'Content-Type: application/json' \
    --header "Authorization: Bearer ${OPENAI_API_KEY:-none}" --data "{$question, $1}"
}

echo "Text:"
ask '"modalities": ["text"]' | jq --raw-output '.choices[0].message.content'

echo "Text and sound (story.wav):"
ask '"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}' > story.json
jq --raw-output '.choices[0].message.audio.transcript' story.json
jq --raw-output '.choices[0].message.audio.data' story.json | base64 --decode > story.wav
rm story.json

echo "Streamed sound (story.mp3):"
ask '"stream": true, "modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "mp3"}' |
  sed --unbuffered --quiet 's/^data: {/{/p' |
  jq --raw-output --unbuffered '.choices[0].delta.audio.data // empty' |
  while read -r piece; do base64 --decode <<< "$piece"; done > story.mp3
