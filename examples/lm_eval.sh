#!/usr/bin/env bash
# Evaluates the served model with lm_eval (pip install 'lm_eval[api]'), which downloads the
# data of its tasks. Needs curl and jq. TOKENIZER is the model that the servers were given: a hub id or a folder.
#
# usage: TOKENIZER=Qwen/Qwen3-8B ./lm_eval.sh [--tasks piqa,arc_easy] [--limit 100] ...
set -euo pipefail

base_url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
tokenizer=${TOKENIZER:?set it to the model of the servers}
model=$(curl --silent --show-error --fail "$base_url/models" \
  -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" |
  jq -r '.data[0].id')
[ $# -gt 0 ] || set -- --tasks piqa --limit 40

arguments="model=$model,base_url=$base_url/completions,tokenizer=$tokenizer"
arguments+=",tokenizer_backend=huggingface,num_concurrent=8,max_retries=3"
exec lm_eval --model local-completions --model_args "$arguments" "$@"
