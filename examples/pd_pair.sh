#!/usr/bin/env bash
# What the proxy does for each request, by hand: a prefill server computes the prompt, and a
# decode server reads its KV and generates the answer. Needs curl and jq. Start before:
#
#   baton prefill MODEL --port 8100
#   baton decode MODEL --port 8200
#
# usage: ./pd_pair.sh [PROMPT]
set -euo pipefail

prefill=${PREFILL_URL:-http://127.0.0.1:8100}
decode=${DECODE_URL:-http://127.0.0.1:8200}
prompt=${1:-The capital of France is}

post() {  # post URL [curl options]: sends the JSON of the standard input
  curl --silent --show-error --fail-with-body "$@" \
    -H 'Content-Type: application/json' --data-binary @-
}

model=$(curl --silent --show-error --fail "$decode/v1/models" | jq -r '.data[0].id')

# 1. The prefill server computes the prompt and one token. Its answer has a signed reference
#    to the KV, which it keeps for --lease-s.
reference=$(
  jq -n --arg model "$model" --arg prompt "$prompt" \
    '{model: $model, prompt: $prompt, max_tokens: 1, temperature: 0,
      kv_transfer_params: {do_remote_decode: true}}' |
  post "$prefill/v1/completions" |
  jq '.kv_transfer_params'
)
echo "reference: $(jq -c '{remote_host, remote_port, remote_num_tokens}' <<< "$reference")"

# 2. The decode server gets the same request with the reference. It reads the KV from the
#    prefill server's memory, checks that it was held throughout, and continues.
jq -n --arg model "$model" --arg prompt "$prompt" --argjson reference "$reference" \
  '{model: $model, prompt: $prompt, max_tokens: 16, temperature: 0,
    kv_transfer_params: $reference}' |
post "$decode/v1/completions" --write-out '%{stderr}KV: %header{x-baton-kv}\n' |
jq -r '"answer: \(.choices[0].text)\nusage: \(.usage | tojson)"'
