"""What transformers' own generate does: `python -m benchmarks.generate_baseline --model DIR`.

One static batch of --concurrency prompts of equal length, outputs forced to full length, greedy.
Every step is timed where generate picks its token, so decode tokens/s leaves the prompts out as
benchmarks.serve does. Compare with benchmarks.serve at the same --concurrency, --input-len,
--output-len, dtype and threads. The last line is one JSON document.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks.load import prompt_token_ids
from benchmarks.percentiles import LEVELS, percentile


class StepClock(transformers.LogitsProcessor):  # type: ignore[misc]
    """Notes the time at which each token's logits are there; changes nothing."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [batch, tokens]; scores float [batch, vocab], returned as they are."""
        if scores.is_cuda:
            torch.cuda.synchronize(scores.device)
        self.times_s.append(time.perf_counter())
        return scores


@dataclass(frozen=True)
class Run:
    """One batch. Times are seconds."""

    prefill_s: float
    gaps_s: list[float]
    total_s: float

    @property
    def decode_s(self) -> float:
        return sum(self.gaps_s)


def run_batch(model: Any, prompts: torch.Tensor, output_len: int) -> Run:
    """Generates `output_len` tokens for each row of `prompts` (int64 [batch, tokens])."""
    clock = StepClock()
    began = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
            logits_processor=transformers.LogitsProcessorList([clock]),
        )
    total_s = time.perf_counter() - began
    if output.shape[1] != prompts.shape[1] + output_len:
        raise RuntimeError(f"generate made {output.shape[1] - prompts.shape[1]} tokens")
    times = clock.times_s
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return Run(times[0] - began, gaps, total_s)


def _best(runs: Sequence[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the fastest run: the least disturbed by whatever else the machine did."""
    best = min(runs, key=lambda run: run.total_s)
    decoded = options.concurrency * (options.output_len - 1)
    output = options.concurrency * options.output_len
    return {
        "prefill_ms": round(best.prefill_s * 1e3, 3),
        "step_ms": {
            f"p{level}": round(percentile(best.gaps_s, level) * 1e3, 3) for level in LEVELS
        },
        "decode_tokens_per_s": round(decoded / best.decode_s, 3),
        "output_tokens_per_s": round(output / best.total_s, 3),
        "decode_tokens_per_s_of_runs": [round(decoded / run.decode_s, 3) for run in runs],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Loads the model and runs the batches."""
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    model = model.to(options.device).eval()
    vocab_size = min(options.vocab_size, model.config.vocab_size)

    def prompts(run: int) -> torch.Tensor:
        rows = [
            prompt_token_ids(
                options.input_len, vocab_size, options.seed, run * options.concurrency + i
            )
            for i in range(options.concurrency)
        ]
        return torch.tensor(rows, device=options.device)

    run_batch(model, prompts(-1), min(4, options.output_len))
    runs = [run_batch(model, prompts(run), options.output_len) for run in range(options.num_runs)]
    return {
        "benchmark": "generate_baseline",
        "model": options.model,
        "dtype": options.dtype,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "concurrency": options.concurrency,
        "input_len": options.input_len,
        "output_len": options.output_len,
        **_best(runs, options),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.generate_baseline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="a directory that transformers loads")
    add("--concurrency", type=int, default=1, help="rows of the static batch")
    add("--input-len", type=int, default=256, help="prompt length (tokens)")
    add("--output-len", type=int, default=64, help="output length (tokens), at least 2")
    add("--num-runs", type=int, default=3, help="batches; the fastest counts")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--vocab-size", type=int, default=256, help="ids are drawn below this")
    add("--seed", type=int, default=0, help="of the prompts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.output_len < 2 or min(options.concurrency, options.num_runs, options.input_len) < 1:
        parser.error("--output-len must be at least 2, other counts at least 1")
    result = measure(options)
    print(
        f"transformers generate, batch {result['concurrency']}: "
        f"prefill {result['prefill_ms']:.1f} ms, step p50 {result['step_ms']['p50']:.1f} ms, "
        f"{result['decode_tokens_per_s']:.1f} tokens/s while decoding"
    )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
