"""What scoring a prompt costs: `python -m benchmarks.scoring --url http://127.0.0.1:8100`.

Asks in turns for a prompt's prefill alone (one token) and for the same with the log-probabilities
of all its tokens (echo, logprobs 1), each time with another prompt of random ids, one request at a
time. Point it at one server, prefill or decode: through the proxy, the plain request is handed over
and the scoring one is not. The last line is one JSON document; its `ratio` is of the medians.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.load import prompt_token_ids
from benchmarks.percentiles import percentile

_SCORED = {"echo": True, "logprobs": 1}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.scoring",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8100", help="a server, without /v1")
    add("--input-len", type=int, default=1000, help="prompt length (tokens)")
    add("--num-requests", type=int, default=8, help="of each kind")
    add("--vocab-size", type=int, default=256, help="ids are drawn below this")
    add("--seed", type=int, default=0, help="of the prompts; take another for the next run")
    add("--timeout-s", type=float, default=120.0)
    return parser


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Asks, and returns the figures. Raises httpx.HTTPError when the server does not serve."""
    times: dict[str, list[float]] = {"plain": [], "scored": []}
    with httpx.Client(base_url=options.url, timeout=options.timeout_s) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for index in range(-1, options.num_requests):  # the first pair warms up
            for kind in sorted(times, reverse=index % 2 == 0):
                members = _SCORED if kind == "scored" else {}
                began = time.perf_counter()
                _ask(client, model, options, 2 * index + (kind == "scored"), members)
                if index >= 0:
                    times[kind].append(time.perf_counter() - began)
    plain, scored = (percentile(times[kind], 50) for kind in ("plain", "scored"))
    return {
        "benchmark": "scoring",
        "url": options.url,
        "input_len": options.input_len,
        "num_requests": options.num_requests,
        "plain_ms": round(plain * 1e3, 1),
        "scored_ms": round(scored * 1e3, 1),
        "ratio": round(scored / plain, 3),
    }


def _ask(
    client: httpx.Client,
    model: str,
    options: argparse.Namespace,
    index: int,
    members: dict[str, Any],
) -> None:
    prompt = prompt_token_ids(options.input_len, options.vocab_size, options.seed, index)
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **members}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    logprobs = answer["choices"][0]["logprobs"]
    told = len(logprobs["token_logprobs"]) if logprobs else 0
    if told != (options.input_len + 1 if members else 0):
        raise RuntimeError(f"{told} tokens were scored, not the prompt's and the answer's")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    options = make_parser().parse_args(argv)
    options.url = options.url.rstrip("/").removesuffix("/v1")
    try:
        figures = measure(options)
    except (httpx.HTTPError, RuntimeError) as error:
        print(f"benchmarks.scoring: error: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.input_len} tokens: {figures['plain_ms']} ms, scored {figures['scored_ms']} ms, "
        f"{figures['ratio']} times as long"
    )
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
