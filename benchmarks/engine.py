"""Speed of one engine: decode and prefill steps, compared with the device's limits.

    python -m benchmarks.engine [--shape llama-3.1-8b] [--batch 1 8 64 256]
                                [--context 1024] [--prompt 8192 1024] [--device cuda]
                                [--chunk 2048 --behind 16384 32768 98304]
                                [--proposals 1 3 7]
                                [--quantization fp8] [--tp 4]

Weights are random, because speed does not depend on their values. The device's limits
are measured in the same run: a copy between two buffers (bytes read plus bytes written)
and a square matmul in the model's dtype, both on random data.

The floor of a decode step is the time to read its data once at the copy's rate. These
data are the KV that the step attends to, and the weights without the input embedding
and without experts that no token selects. The floor of a prefill is the time of its
model FLOPs at the matmul's rate; causal attention counts as half of full attention. A
chunk is a part of a prompt; earlier steps have computed the KV of the preceding tokens.
With several ranks, a floor is for the share of one rank.

"step" is the time from the tokens of one step to the tokens of the next step. A step is
launched before the tokens of the previous step are read. "device" is the time of the
same step's CUDA graph alone, replayed back to back. The last line of output is JSON.

With --proposals, each step verifies this number of proposed tokens per sequence, and
accepts a random part of them. As in a server, a step is launched after the result of
the preceding step, so its duration includes the time of the host. "gain_50" is the
ratio of tokens per second to those of decode steps. It assumes that each proposal is
accepted with a probability of 50 % if all proposals before it were accepted.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_limits import (
    Ceilings,
    mean_s,
    measure_ceilings,
    num_attended_tokens,
    prefill_flops,
    weight_bytes_per_step,
)
from benchmarks.shapes import SHAPES
from engine.config import EngineConfig
from engine.core.batch import StepInput
from engine.worker.memory import block_bytes, size_pool
from engine.worker.runner import ModelRunner
from engine.worker.warm_up import kv_budget_bytes
from kvcache.blocks import NULL_BLOCK
from model.config import ModelConfig, load_config
from model.parallel import Parallel
from protocol.messages import SamplingParams
from protocol.settings.machine import available_cores
from protocol.settings.speculation import MAX_PROPOSALS

# The fastest rank waits at most this long for the slowest rank to start.
_CONNECT_TIMEOUT_S = 600.0
# Assumed probabilities that a proposal is accepted, if all before it were accepted.
_ACCEPTANCE_RATES = (0.5, 0.7, 0.9)
_ENGINE_OPTIONS = (
    "device",
    "dtype",
    "block_size",
    "kv_layout",
    "kv_cache_tokens",
    "kv_cache_dtype",
    "attention_backend",
    "enforce_eager",
    "quantization",
    "tp",
    "ep",
)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        source = args.shape
        if source in SHAPES:
            shape = {"architectures": ["LlamaForCausalLM"], **SHAPES[source]}
            source = folder
            Path(source, "config.json").write_text(json.dumps(shape))
        config = load_config(source, quantization=args.quantization)
        rendezvous = f"{folder}/ranks"
        if args.tp == 1:
            _run(args, config, 0, rendezvous)
        else:
            _run_ranks(args, config, rendezvous)


def _run_ranks(args: argparse.Namespace, config: ModelConfig, rendezvous: str) -> None:
    """Run one process per rank. Exit with status 1 if any process fails."""
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(args.tp):
        rank_args = (args, config, rank, rendezvous)
        process = spawn.Process(target=_run, args=rank_args, daemon=True)
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def _run(
    args: argparse.Namespace, config: ModelConfig, rank: int, rendezvous: str
) -> None:
    """Run all measurements of one rank. Only rank 0 prints them.

    Args:
        rendezvous: path of the file through which the ranks find each other.
    """
    if rank:
        sys.stdout = open(os.devnull, "w")
    # This is the number of threads that a rank of a server uses.
    torch.set_num_threads(max(1, available_cores() // args.tp))
    started_at = time.perf_counter()
    device = torch.device(f"cuda:{rank}" if args.device == "cuda" else "cpu")
    ceilings = measure_ceilings(device, getattr(torch, args.dtype))
    _print_figures(
        "ceilings",
        copy_gb_per_s=ceilings.copy_bytes_per_s / 1e9,
        matmul_tflops=ceilings.matmul_flops_per_s / 1e12,
    )
    ranks = Parallel.connect(
        rank,
        args.tp,
        rendezvous_file=rendezvous,
        device=device,
        ep=args.ep,
        timeout_s=_CONNECT_TIMEOUT_S,
    )
    runner, start_figures = _start_runner(args, config, ranks)
    figures: dict[str, Any] = {"benchmark": "engine", "args": vars(args)}
    figures |= start_figures
    figures["ceilings"] = ceilings._asdict()
    figures["decode"] = [_measure_decode(runner, args, ceilings, n) for n in args.batch]
    figures["verify"] = [
        _measure_verification(runner, args, decode, num_proposals)
        for decode, num_proposals in itertools.product(
            figures["decode"], args.proposals
        )
    ]
    figures["prefill"] = [
        _measure_prefill(runner, args, ceilings, n) for n in args.prompt
    ]
    figures["chunks"] = [
        _measure_prefill(runner, args, ceilings, chunk, behind)
        for chunk, behind in itertools.product(args.chunk, args.behind)
    ]
    figures["total_s"] = round(time.perf_counter() - started_at, 1)
    print(json.dumps(figures), flush=True)
    if args.tp > 1:
        # Closing the process group would block, because CUDA graphs refer to it. A rank
        # of an engine exits in the same way.
        os._exit(0)


def _print_figures(name: str, **figures: float) -> dict[str, float]:
    """Round the figures to three decimals, print them and return them."""
    rounded = {key: round(value, 3) for key, value in figures.items()}
    print(f"{name}: {rounded}", flush=True)
    return rounded


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    shapes = ", ".join(SHAPES)
    add(
        "--shape",
        default="llama-3.1-8b",
        help=f"{shapes}, or a folder with a config.json",
    )
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--dtype", default="bfloat16")
    add(
        "--batch",
        type=int,
        nargs="*",
        default=[1, 8, 64, 256],
        help="numbers of sequences in a decode step",
    )
    add("--context", type=int, default=1024, help="tokens per decoding sequence")
    add(
        "--prompt",
        type=int,
        nargs="*",
        default=[8192, 1024],
        help="prompt lengths of the prefills (tokens)",
    )
    add(
        "--chunk",
        type=int,
        nargs="*",
        default=[],
        help="lengths of chunks of a prompt (tokens)",
    )
    add(
        "--behind",
        type=int,
        nargs="*",
        default=[16384],
        help="tokens of the prompt before each chunk",
    )
    add(
        "--proposals",
        type=int,
        nargs="*",
        choices=range(1, MAX_PROPOSALS + 1),
        metavar="N",
        default=[],
        help="numbers of proposed tokens that a step verifies for each sequence",
    )
    add("--steps", type=int, default=30, help="timed decode steps for each --batch")
    add("--kv-layout", default="BHLCND")
    add("--block-size", type=int, default=64, help="tokens per KV block")
    add("--kv-cache-tokens", type=int, default=None)
    add("--kv-cache-dtype", default="auto")
    add("--attention-backend", default="auto")
    add("--quantization", choices=["fp8"])
    add("--tp", type=int, default=1, help="number of ranks")
    add("--ep", type=int, default=1, help="parts into which the experts are divided")
    add("--enforce-eager", action="store_true")
    return parser.parse_args(argv)


# -- the engine's parts


def _start_runner(
    args: argparse.Namespace, config: ModelConfig, ranks: Parallel
) -> tuple[ModelRunner, dict[str, float]]:
    """Start a model runner.

    Return the runner and two figures: the seconds of the start, and the KV capacity in
    tokens.
    """
    started_at = time.perf_counter()
    runner = ModelRunner(_engine_config(args), config, ranks)
    is_gpu = runner.device.type == "cuda"
    size = size_pool(
        runner.config,
        block_bytes=block_bytes(runner.config, config),
        model_max_len=config.max_position,
        free_bytes=kv_budget_bytes(runner) if is_gpu else 2**30,
        groups=runner.groups,
    )
    print(size.explanation, flush=True)
    runner.allocate(size.num_blocks)
    runner.capture_graphs()
    kv_tokens = (size.num_blocks - 1) // runner.groups.count * args.block_size
    start_s = time.perf_counter() - started_at
    return runner, _print_figures("start", start_s=start_s, kv_tokens=kv_tokens)


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    max_rows = max([*args.batch, 1]) * (1 + max([*args.proposals, 0]))
    # With a drafter, a step has as many rows for proposals as for sequences.
    max_num_seqs = -(-max_rows // 2) if args.proposals else max_rows
    return EngineConfig(
        **{name: getattr(args, name) for name in _ENGINE_OPTIONS},
        role="decode",
        engine_id="benchmark",
        incarnation="0",
        model_dir="",
        load_format="dummy",
        devices=list(range(args.tp)),
        speculate=f"ngram:{max(args.proposals)}" if args.proposals else "off",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max([*args.prompt, *args.chunk, 2048]),
    )


def _block_tables(
    runner: ModelRunner, num_seqs: int, num_tokens: int, num_computed: int = 0
) -> np.ndarray[Any, Any]:
    """Return block tables, int32 [num_seqs, blocks], of blocks scattered over the pool.

    For layers with a sliding window, tables contain only blocks within the window.

    Args:
        num_tokens: length up to which each sequence has blocks.
        num_computed: tokens of each sequence that have KV before the first measured
            step.

    Raises:
        SystemExit: the pool has too few blocks.
    """
    groups = runner.groups
    layout = runner.memory.pool.layout
    token_ranges = groups.token_ranges(0, num_tokens, num_computed)
    columns = groups.missing_entries([], token_ranges, layout.block_size)
    num_needed = num_seqs * len(columns)
    if num_needed >= layout.num_blocks:
        raise SystemExit(
            f"{num_seqs} sequences of {num_tokens} tokens need {num_needed} KV blocks; "
            f"the pool has {layout.num_blocks - 1}. Lower --batch, --context, "
            "--prompt, --chunk or --behind."
        )
    shuffled = 1 + np.random.default_rng(0).permutation(layout.num_blocks - 1)
    width = -(-num_tokens // layout.block_size) * groups.count
    tables = np.full((num_seqs, width), NULL_BLOCK, np.int32)
    tables[:, columns] = shuffled[:num_needed].reshape(num_seqs, -1)
    return tables


def _make_step(
    runner: ModelRunner,
    tables: np.ndarray[Any, Any],
    query_len: int,
    context_len: int | np.ndarray[Any, Any],
    *,
    uses_last_tokens: bool = False,
) -> StepInput:
    """Return a step of sequences of equal length.

    Args:
        query_len: tokens of each sequence that the step computes.
        context_len: tokens of each sequence after the step; one number for all
            sequences, or one number per sequence.
        uses_last_tokens: True if the step computes the tokens that the preceding step
            sampled, False if it computes random tokens.
    """
    num_seqs = len(tables)
    vocab_size = runner.model_config.vocab_size
    if uses_last_tokens:
        token_ids = -1 - np.arange(num_seqs)
    else:
        rng = np.random.default_rng(1)
        token_ids = rng.integers(0, vocab_size, num_seqs * query_len)
    return StepInput(
        token_ids=token_ids,
        query_lens=np.full(num_seqs, query_len, np.int32),
        context_lens=np.full(num_seqs, context_len, np.int32),
        block_tables=tables,
        sampled_sequences=np.arange(num_seqs, dtype=np.int32),
        sampling=[SamplingParams(temperature=0.0)] * num_seqs,
    )


def _measure_decode(
    runner: ModelRunner, args: argparse.Namespace, ceilings: Ceilings, batch: int
) -> dict[str, float]:
    """Measure decode steps of `batch` sequences."""
    config = runner.model_config
    itemsize = getattr(torch, args.dtype).itemsize
    is_gpu = runner.device.type == "cuda"
    tables = _block_tables(runner, batch, args.context + args.steps + 4, args.context)
    context_lens = iter(range(args.context + 1, args.context + args.steps + 5))
    for _ in range(3):  # warm up
        runner.execute(_make_step(runner, tables, 1, next(context_lens)))
    step_s = statistics.median(_step_times_s(runner, tables, list(context_lens)))
    device_s = step_s
    if runner.graphs:
        device_s = mean_s(partial(runner.graphs.replay, batch), 50)
    layout = runner.layout(num_blocks=2)
    layer_token_bytes = layout.token_bytes / layout.num_layers
    kv_bytes = batch * num_attended_tokens(config, args.context) * layer_token_bytes
    weight_bytes = (
        weight_bytes_per_step(config, batch, itemsize, keep_quantised=is_gpu) / args.tp
    )
    floor_s = (weight_bytes + kv_bytes) / ceilings.copy_bytes_per_s
    return _print_figures(
        "decode",
        batch=batch,
        step_ms=step_s * 1e3,
        device_ms=device_s * 1e3,
        floor_ms=floor_s * 1e3,
        over_floor=step_s / floor_s,
        tokens_per_s=batch / step_s,
    )


def _measure_verification(
    runner: ModelRunner,
    args: argparse.Namespace,
    decode: dict[str, float],
    num_proposals: int,
) -> dict[str, float]:
    """Measure steps that verify `num_proposals` tokens for each sequence.

    Args:
        decode: the figures of decode steps with the same number of sequences.
    """
    batch = int(decode["batch"])
    num_rows = 1 + num_proposals
    num_tokens = args.context + args.steps * num_rows + num_rows
    tables = _block_tables(runner, batch, num_tokens, args.context)
    tables = np.repeat(tables, num_rows, axis=0)
    rng = np.random.default_rng(2)
    lens = np.full(batch, args.context)
    times = []
    for _ in range(args.steps):
        started_at = time.perf_counter()
        context_lens = (lens[:, None] + 1 + np.arange(num_rows)).reshape(-1)
        step = _make_step(runner, tables, 1, context_lens.astype(np.int32))
        runner.execute(step)
        times.append(time.perf_counter() - started_at)
        # Each sequence grows by one token, plus a random number of accepted proposals.
        lens += rng.integers(1, num_rows, batch, endpoint=True)
    step_ms = statistics.median(times[3:]) * 1e3
    gains = {
        f"gain_{rate:.0%}".rstrip("%"): _mean_tokens(rate, num_proposals)
        * decode["step_ms"]
        / step_ms
        for rate in _ACCEPTANCE_RATES
    }
    return _print_figures(
        "verify",
        batch=batch,
        proposals=num_proposals,
        step_ms=step_ms,
        over_decode=step_ms / decode["step_ms"],
        **gains,
    )


def _mean_tokens(rate: float, num_proposals: int) -> float:
    """Return the mean number of tokens that a step yields per sequence.

    A proposal is accepted with probability `rate` if all before it were accepted."""
    return sum(rate**count for count in range(num_proposals + 1))


def _step_times_s(
    runner: ModelRunner, tables: np.ndarray[Any, Any], context_lens: list[int]
) -> list[float]:
    """Return the seconds between the tokens of consecutive decode steps."""
    pending = runner.launch(_make_step(runner, tables, 1, context_lens[0]))
    ended_at = []
    for context_len in context_lens[1:]:
        if not runner.depth:
            pending.result()
        step = _make_step(runner, tables, 1, context_len, uses_last_tokens=True)
        previous = pending
        pending = runner.launch(step)
        if runner.depth:
            previous.result()
        ended_at.append(time.perf_counter())
    pending.result()
    return [second - first for first, second in itertools.pairwise(ended_at)]


def _measure_prefill(
    runner: ModelRunner,
    args: argparse.Namespace,
    ceilings: Ceilings,
    num_tokens: int,
    num_before: int = 0,
) -> dict[str, float]:
    """Measure the prefill of one prompt, or of a chunk with KV before it.

    Args:
        num_tokens: tokens that the step computes.
        num_before: tokens of the prompt that precede the computed tokens.
    """
    context_len = num_before + num_tokens
    tables = _block_tables(runner, 1, context_len, num_before)
    step = _make_step(runner, tables, num_tokens, context_len)
    times = []
    for index in range(7):
        started_at = time.perf_counter()
        runner.execute(step)
        if index >= 2:  # the first two warm up
            times.append(time.perf_counter() - started_at)
    step_s = statistics.median(times)
    flops = prefill_flops(runner.model_config, num_tokens, num_before)
    floor_s = flops / args.tp / ceilings.matmul_flops_per_s
    figures: dict[str, float] = {"tokens": num_tokens}
    if num_before:
        figures["behind"] = num_before
    return _print_figures(
        "chunk" if num_before else "prefill",
        **figures,
        step_ms=step_s * 1e3,
        floor_ms=floor_s * 1e3,
        share_of_matmul=floor_s / step_s,
        tokens_per_s=num_tokens / step_s,
    )


if __name__ == "__main__":
    main()
