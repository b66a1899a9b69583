"""What logprobs of a prompt and shaped draws cost beside a plain prefill and a plain decode step.

    python -m benchmarks.scoring_steps --model DIRECTORY [--threads 2] [--tokens 1000] [--batch 8]

Steps of one model on this CPU, float32, taken in turn so that what else runs disturbs all alike.
The last line is JSON: milliseconds, the least and the median of `--repeats`.
"""

import argparse
import itertools
import json
import statistics
import time

import numpy as np
import torch

from engine.batch import ScoredRows, StepInput
from engine.config import EngineConfig
from engine.runner import ModelRunner
from engine.shaping import RowSetup, StepShapes
from model.config import load_config
from model.parallel import Parallel
from protocol.messages import SamplingParams

_CONTEXT = 400  # tokens, of a decode step
_BLOCK_SIZE = 64


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="directory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a decode step")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    runner = _runner(args)
    figures = _measure(runner, _prompt_steps(runner, args.tokens), args.repeats)
    figures |= _measure(runner, _decode_steps(runner, args.batch), 5 * args.repeats)
    for name, figure in figures.items():
        print(f"{name:24}", figure)
    print(json.dumps({"benchmark": "scoring_steps", "args": vars(args), "ms": figures}))


def _runner(args: argparse.Namespace) -> ModelRunner:
    config = EngineConfig(
        role="decode",
        engine_id="benchmark",
        incarnation="0",
        model_dir=args.model,
        block_size=_BLOCK_SIZE,
        http_address="",
        control_address="",
        transfer_address="",
    )
    runner = ModelRunner(config, load_config(args.model), Parallel())
    widest = max(args.tokens, args.batch * (_CONTEXT + _BLOCK_SIZE))
    runner.allocate(2 + -(-widest // _BLOCK_SIZE))
    return runner


def _prompt_steps(runner: ModelRunner, num_tokens: int) -> dict[str, StepInput]:
    ids = _token_ids(runner, num_tokens)

    def step(num_top: int | None) -> StepInput:
        lens = np.array([num_tokens], np.int32)
        targets = ids[1:].tolist()
        return StepInput(
            token_ids=ids,
            query_lens=lens,
            context_lens=lens,
            block_tables=np.arange(1, 1 + -(-num_tokens // _BLOCK_SIZE), dtype=np.int32)[None],
            sample_rows=np.zeros(1, np.int32),
            sampling=[SamplingParams(temperature=0.0)],
            scores=[] if num_top is None else [ScoredRows(0, targets, num_top)],
        )

    return {"prefill": step(None), "prefill, scored": step(0), "prefill, scored, top 5": step(5)}


def _decode_steps(runner: ModelRunner, batch: int) -> dict[str, StepInput]:
    width = -(-(_CONTEXT + 1) // _BLOCK_SIZE)
    setups = [
        RowSetup(row, list(range(100)), [], (0.5, 0.5, 1.1), {5: 1.0}, []) for row in range(batch)
    ]

    def step(temperature: float, shapes: StepShapes | None = None) -> StepInput:
        return StepInput(
            token_ids=_token_ids(runner, batch),
            query_lens=np.ones(batch, np.int32),
            context_lens=np.full(batch, _CONTEXT, np.int32),
            block_tables=np.arange(1, 1 + batch * width, dtype=np.int32).reshape(batch, width),
            sample_rows=np.arange(batch, dtype=np.int32),
            sampling=[SamplingParams(temperature=temperature)] * batch,
            shapes=shapes,
        )

    rows, bans = list(range(batch)), [False] * batch
    runner.execute(step(1.0, StepShapes(rows, bans, setups)))
    return {
        "decode, greedy": step(0.0),
        "decode, sampled": step(1.0),
        "decode, shaped": step(1.0, StepShapes(rows, bans, [])),
    }


def _token_ids(runner: ModelRunner, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(1).integers(0, min(runner.model_config.vocab_size, 500), count)


def _measure(
    runner: ModelRunner, steps: dict[str, StepInput], repeats: int
) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in itertools.chain.from_iterable([steps.items()] * (repeats + 1)):
        start = time.perf_counter()
        runner.execute(step)
        times[name].append(1000 * (time.perf_counter() - start))
    return {
        name: {"min": round(min(t[1:]), 2), "median": round(statistics.median(t[1:]), 2)}
        for name, t in times.items()
    }


if __name__ == "__main__":
    main()
