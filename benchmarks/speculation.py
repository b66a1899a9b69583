"""Speed of one stream with and without speculation, on real answers.

    baton decode --model DIR --port 8001
    baton decode --model DIR --port 8002 --speculate ngram:8
    python -m benchmarks.speculation --url http://127.0.0.1:8001 http://127.0.0.1:8002

There are two kinds of prompts. "edit" asks for a source file with a small change, so
that the answer repeats most of the prompt. "prose" asks for a story, which repeats
nothing. The program sends every prompt to one server after the other, with greedy
decoding. It checks that the answers of all servers equal those of the first server. The
last line of output is a JSON document.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

_TIMEOUT_S = 600.0
_SOURCES = ("protocol/errors.py", "kvcache/layout.py", "engine/core/plan.py")
_ROOT = Path(__file__).resolve().parents[1]
_SUBJECTS = (
    "a lighthouse keeper who finds a letter in a bottle",
    "two children who build a raft on a river",
    "an old clock maker and her last clock",
    "a train that stops at a station without a name",
)


def make_prompts(num_edits: int, source_chars: int) -> list[tuple[str, str]]:
    """Return the prompts, as pairs of kind ("edit" or "prose") and text."""
    prompts = []
    for index in range(num_edits):
        path = _ROOT / _SOURCES[index % len(_SOURCES)]
        start = index // len(_SOURCES) * source_chars
        source = path.read_text()[start : start + source_chars]
        prompts.append(
            (
                "edit",
                "Write this Python code again, and change nothing but the name "
                f"`self`, which becomes `this`.\n\n```python\n{source}\n```",
            )
        )
    prompts += [("prose", f"Write a story about {subject}.") for subject in _SUBJECTS]
    return prompts


def measure(url: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Send a prompt, and return the text of the answer, its speed and token counts.

    The speed is in tokens per second after the first token.
    """
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = ""
    first_s = 0.0
    usage: dict[str, Any] = {}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                first_s = first_s or time.perf_counter()
    seconds = time.perf_counter() - first_s
    details = usage["completion_tokens_details"]
    return {
        "text": text,
        "tokens_per_s": (usage["completion_tokens"] - 1) / seconds,
        "tokens": usage["completion_tokens"],
        "accepted": details["accepted_prediction_tokens"],
        "rejected": details["rejected_prediction_tokens"],
    }


def summarise(rows: list[dict[str, Any]], kind: str, url: str) -> dict[str, Any]:
    """Return the figures of one server for one kind of prompts."""
    chosen = [row for row in rows if row["kind"] == kind and row["url"] == url]
    tokens = sum(row["tokens"] for row in chosen)
    accepted = sum(row["accepted"] for row in chosen)
    rejected = sum(row["rejected"] for row in chosen)
    return {
        "kind": kind,
        "url": url,
        "tokens_per_s": round(
            statistics.harmonic_mean([row["tokens_per_s"] for row in chosen]), 2
        ),
        "gain": round(statistics.geometric_mean([row["gain"] for row in chosen]), 3),
        "min_gain": round(min(row["gain"] for row in chosen), 3),
        "accepted_share_of_tokens": round(accepted / tokens, 3),
        "accepted_share_of_proposals": round(accepted / max(accepted + rejected, 1), 3),
        "equal_answers": all(row["is_equal"] for row in chosen),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit status: 1 if an answer differs from the first server's answer, 2 if a
        server did not answer.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", nargs="+", required=True, help="two or more servers")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--edits", type=int, default=6, help="number of edit prompts")
    parser.add_argument(
        "--source-chars", type=int, default=1200, help="length of the code to edit"
    )
    parser.add_argument("--repeat", type=int, default=3, help="repetitions per prompt")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for kind, prompt in make_prompts(args.edits, args.source_chars):
        for _ in range(args.repeat):
            try:
                answers = [measure(url, prompt, args.max_tokens) for url in args.url]
            except httpx.HTTPError as error:
                line = str(error).partition("\n")[0]
                print(f"benchmarks.speculation: error: {line}", file=sys.stderr)
                return 2
            for url, answer in zip(args.url, answers, strict=True):
                answer["kind"] = kind
                answer["url"] = url
                answer["gain"] = answer["tokens_per_s"] / answers[0]["tokens_per_s"]
                answer["is_equal"] = answer["text"] == answers[0]["text"]
                print(
                    f"{kind}: {url} {answer['tokens_per_s']:.1f} tokens/s", flush=True
                )
            rows += answers
    results = [
        summarise(rows, kind, url) for kind in ("edit", "prose") for url in args.url
    ]
    for result in results:
        print(result)
    print(json.dumps(results))
    return 0 if all(result["equal_answers"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
