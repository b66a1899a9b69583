"""How fast one rank prefills and decodes a model shape, beside what its memory and matrix units do.

    python -m benchmarks.engine [--shape llama-3.1-8b] [--batch 1 8 64 256] [--context 1024]
                                [--prompt 8192 1024] [--device cuda] [--quantization fp8] [--tp 4]

Weights are dummies: speed does not depend on their values. The ceilings come from the same run: a
copy between two buffers (bytes read plus bytes written) and a square matmul in the model's dtype,
both on random data. A decode step cannot be faster than reading once what it must read (weights
without the input embedding, of experts those that are hit, and the KV that is seen) at the copy's
rate; a prefill not faster than its model FLOPs (causal attention counted by half) at the matmul's.
Of several ranks each has its share of both.

Per step, "step" is the time from one step's drawn tokens to the next one's, a step being launched
before the last one's tokens are read; "device" is the same step's graph alone, replayed back to
back. The last line is JSON.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.benchmark import Timer

from engine.config import EngineConfig
from engine.core.batch import StepInput
from engine.worker.memory import block_bytes, size_pool
from engine.worker.rehearsal import kv_budget_bytes
from engine.worker.runner import ModelRunner
from kvcache.blocks import NULL_BLOCK
from model.config import ModelConfig, load_config
from model.parallel import Parallel
from model.sizes import Weights, bits_of, implied_weights
from protocol.messages import SamplingParams
from protocol.settings.machine import available_cores

_RANKS_TIMEOUT_S = 600.0  # of the slowest rank behind the fastest

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    },
    # Of its layers the last three, with experts, and one before them, without.
    "deepseek-v3-4-layers": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
        "max_position_embeddings": 32768,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
    },
}


class Ceilings(NamedTuple):
    """What the device does at most, measured."""

    copy_bytes_per_s: float  # read plus written
    matmul_flops_per_s: float


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        source = args.shape
        if source in SHAPES:
            source, shape = (
                folder,
                {"architectures": ["LlamaForCausalLM"], **SHAPES[source]},
            )
            Path(source, "config.json").write_text(json.dumps(shape))
        config = load_config(source, quantization=args.quantization)
        spawn, meeting = multiprocessing.get_context("spawn"), f"{folder}/ranks"
        if args.tp == 1:
            return _run(args, config, 0, meeting)
        start = partial(spawn.Process, target=_run, daemon=True)
        ranks = [start(args=(args, config, rank, meeting)) for rank in range(args.tp)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            sys.exit(1)


def _run(
    args: argparse.Namespace, config: ModelConfig, rank: int, meeting: str
) -> None:
    """One rank; the first tells."""
    if rank:
        sys.stdout = open(os.devnull, "w")
    torch.set_num_threads(
        max(1, available_cores() // args.tp)
    )  # as a server's rank has
    started_s = time.perf_counter()
    device = torch.device(f"cuda:{rank}" if args.device == "cuda" else "cpu")
    ceilings = measure_ceilings(device, getattr(torch, args.dtype))
    ranks = Parallel.connect(
        rank,
        args.tp,
        meeting=meeting,
        device=device,
        ep=args.ep,
        timeout_s=_RANKS_TIMEOUT_S,
    )
    runner, figures = _start(args, config, ranks)
    figures["ceilings"] = ceilings._asdict()
    figures["decode"] = [_decode(runner, args, ceilings, batch) for batch in args.batch]
    figures["prefill"] = [
        _prefill(runner, args, ceilings, tokens) for tokens in args.prompt
    ]
    figures["total_s"] = round(time.perf_counter() - started_s, 1)
    print(
        json.dumps({"benchmark": "engine", "args": vars(args), **figures}), flush=True
    )
    if args.tp > 1:
        os._exit(
            0
        )  # as a rank of an engine ends: leaving a group that graphs refer to blocks


def _told(name: str, **figures: float) -> dict[str, float]:
    """Prints figures; returns them, rounded."""
    rounded = {key: round(value, 3) for key, value in figures.items()}
    print(f"{name}: {rounded}", flush=True)
    return rounded


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    add = parser.add_argument
    add(
        "--shape",
        default="llama-3.1-8b",
        help=f"{', '.join(SHAPES)}, or a config.json's folder",
    )
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--dtype", default="bfloat16")
    add("--batch", type=int, nargs="*", default=[1, 8, 64, 256])
    add("--context", type=int, default=1024, help="tokens per decoding sequence")
    add("--prompt", type=int, nargs="*", default=[8192, 1024], help="tokens")
    add("--steps", type=int, default=30, help="steps timed for each figure")
    add("--kv-layout", default="BHLCND")
    add("--block-size", type=int, default=64)
    add("--kv-cache-tokens", type=int, default=None)
    add("--kv-cache-dtype", default="auto")
    add("--attention-backend", default="auto")
    add("--quantization", choices=["fp8"])
    add("--tp", type=int, default=1, help="ranks")
    add("--ep", type=int, default=1, help="parts of the experts, over these ranks")
    add("--enforce-eager", action="store_true")
    return parser.parse_args(argv)


# -- ceilings --------------------------------------------------------------------------------


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A plain copy and a plain matmul, large enough to fill the device."""
    on_gpu = device.type == "cuda"
    nbytes, side = (4 * 2**30, 8192) if on_gpu else (64 * 2**20, 512)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = mean_s(partial(target.copy_, source), 10)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    matmul_s = mean_s(partial(torch.mm, a, b), 20)
    del source, target, a, b
    if on_gpu:
        torch.cuda.empty_cache()
    rates = 2 * nbytes / copy_s, 2 * side**3 / matmul_s
    _told("ceilings", copy_gb_per_s=rates[0] / 1e9, matmul_tflops=rates[1] / 1e12)
    return Ceilings(*rates)


def mean_s(call: Callable[[], object], repeats: int) -> float:
    """Mean seconds of `call` on the device, one right after the other, after three to warm up."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    timer.timeit(3)
    return float(timer.timeit(repeats).mean)


# -- the engine's parts ----------------------------------------------------------------------


def _start(
    args: argparse.Namespace, config: ModelConfig, ranks: Parallel
) -> tuple[ModelRunner, dict[str, Any]]:
    started_s, runner = (
        time.perf_counter(),
        ModelRunner(_engine_config(args), config, ranks),
    )
    size = size_pool(
        runner.config,
        block_bytes=block_bytes(runner.config, config),
        model_max_len=config.max_position,
        free_bytes=kv_budget_bytes(runner) if runner.device.type == "cuda" else 2**30,
        groups=runner.groups,
    )
    print(size.explanation, flush=True)
    runner.allocate(size.num_blocks)
    runner.capture_graphs()
    kv_tokens = (size.num_blocks - 1) // runner.groups.count * args.block_size
    start_s = time.perf_counter() - started_s
    return runner, {**_told("start", start_s=start_s, kv_tokens=kv_tokens)}


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    told = ("device", "dtype", "block_size", "kv_layout", "kv_cache_tokens", "kv_cache_dtype",
            "attention_backend", "enforce_eager", "quantization", "tp", "ep")  # fmt: skip
    return EngineConfig(
        **{name: getattr(args, name) for name in told},
        role="decode",
        engine_id="benchmark",
        incarnation="0",
        model_dir="",
        load_format="dummy",
        devices=list(range(args.tp)),
        max_num_seqs=max([*args.batch, 1]),
        max_num_batched_tokens=max([*args.prompt, 2048]),
    )


def _tables(
    runner: ModelRunner, num_seqs: int, num_tokens: int, reach: int = 0
) -> np.ndarray[Any, Any]:
    """Scattered blocks from the whole pool, for `num_seqs` sequences that go on from `reach`
    tokens: of windows those that they still see."""
    groups, layout = runner.groups, runner.memory.pool.layout
    places = groups.missing([], groups.spans(0, num_tokens, reach), layout.block_size)
    needed = num_seqs * len(places)
    if needed >= layout.num_blocks:
        raise SystemExit(
            f"{num_seqs} x {num_tokens} tokens do not fit the pool: lower --batch"
        )
    order = 1 + np.random.default_rng(0).permutation(layout.num_blocks - 1)[:needed]
    width = -(-num_tokens // layout.block_size) * groups.count
    tables = np.full((num_seqs, width), NULL_BLOCK, np.int32)
    tables[:, places] = order.reshape(num_seqs, -1)
    return tables


def _step(
    runner: ModelRunner,
    tables: np.ndarray[Any, Any],
    query_len: int,
    context_len: int,
    *,
    follows: bool = False,
) -> StepInput:
    """A step of equal sequences; one that `follows` takes the tokens that the last one drew."""
    num_seqs, vocab_size = len(tables), runner.model_config.vocab_size
    token_ids = np.random.default_rng(1).integers(0, vocab_size, num_seqs * query_len)
    if follows:
        token_ids = -1 - np.arange(num_seqs)
    return StepInput(
        token_ids=token_ids,
        query_lens=np.full(num_seqs, query_len, np.int32),
        context_lens=np.full(num_seqs, context_len, np.int32),
        block_tables=tables,
        sample_rows=np.arange(num_seqs, dtype=np.int32),
        sampling=[SamplingParams(temperature=0.0)] * num_seqs,
    )


def _decode(
    runner: ModelRunner, args: argparse.Namespace, ceilings: Ceilings, batch: int
) -> dict[str, float]:
    config, itemsize = runner.model_config, getattr(torch, args.dtype).itemsize
    tables = _tables(runner, batch, args.context + args.steps + 4, args.context)
    lens = iter(range(args.context + 1, args.context + args.steps + 5))
    for _ in range(3):
        runner.execute(_step(runner, tables, 1, next(lens)))
    step_s = statistics.median(_periods(runner, tables, list(lens)))
    device_s = (
        mean_s(partial(runner.graphs.replay, batch), 50) if runner.graphs else step_s
    )
    layout, on_gpu = runner.layout(num_blocks=2), runner.device.type == "cuda"
    kv_bytes = (
        batch * num_seen(config, args.context) * layout.token_bytes / layout.num_layers
    )
    weights = read_weight_bytes(config, batch, itemsize, keeps=on_gpu) / args.tp
    floor_s = (weights + kv_bytes) / ceilings.copy_bytes_per_s
    return _told(
        "decode",
        batch=batch,
        step_ms=step_s * 1e3,
        device_ms=device_s * 1e3,
        floor_ms=floor_s * 1e3,
        over_floor=step_s / floor_s,
        tokens_per_s=batch / step_s,
    )


def _periods(
    runner: ModelRunner, tables: np.ndarray[Any, Any], context_lens: list[int]
) -> list[float]:
    """Seconds from each decode step's tokens to the next one's."""
    last = runner.launch(_step(runner, tables, 1, context_lens[0]))
    ended_s = []
    for context_len in context_lens[1:]:
        if not runner.depth:
            last.result()
        before, last = (
            last,
            runner.launch(_step(runner, tables, 1, context_len, follows=True)),
        )
        if runner.depth:
            before.result()
        ended_s.append(time.perf_counter())
    last.result()
    return [second - first for first, second in itertools.pairwise(ended_s)]


def _prefill(
    runner: ModelRunner, args: argparse.Namespace, ceilings: Ceilings, num_tokens: int
) -> dict[str, float]:
    tables = _tables(runner, 1, num_tokens)
    step = _step(runner, tables, num_tokens, num_tokens)
    times = []
    for index in range(7):
        started_s = time.perf_counter()
        runner.execute(step)
        if index >= 2:
            times.append(time.perf_counter() - started_s)
    step_s = statistics.median(times)
    flops = prefill_flops(runner.model_config, num_tokens)
    floor_s = flops / args.tp / ceilings.matmul_flops_per_s
    return _told(
        "prefill",
        tokens=num_tokens,
        step_ms=step_s * 1e3,
        floor_ms=floor_s * 1e3,
        share_of_matmul=floor_s / step_s,
        tokens_per_s=num_tokens / step_s,
    )


def read_weight_bytes(
    config: ModelConfig, batch: int, itemsize: int, *, keeps: bool
) -> int:
    """Bytes of weights that a decode step reads: all but the input embedding's other rows, and of
    experts those that so many tokens hit on average, if all are equally likely. `itemsize` and
    `keeps`: of weights that are not kept quantised, and whether any are."""
    hit = 1.0
    if moe := config.moe:
        hit = 1 - (1 - moe.experts_per_token / moe.num_experts) ** batch
    bits = 0.0
    for each in implied_weights(config):
        if "embed_tokens" not in each.name or config.tie_embeddings:
            own = each.elements * bits_of(config, each.name, itemsize, keeps=keeps)
            bits += own * hit if _is_expert(each) else own
    return int(bits) // 8


def _is_expert(weights: Weights) -> bool:
    return len(weights.shape) > 2 or ".experts." in weights.name


def num_seen(config: ModelConfig, num_tokens: int) -> int:
    """Tokens that the layers together look back to after so many."""
    windows = map(config.window_of, range(config.num_layers))
    return sum(min(num_tokens, window or num_tokens) for window in windows)


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Model FLOPs of one prompt: two per weight and token, causal attention, one row of logits."""
    hit = config.moe.experts_per_token / config.moe.num_experts if config.moe else 1.0
    weights = sum(
        each.elements * (hit if _is_expert(each) else 1.0)
        for each in implied_weights(config)
        if each.name.startswith("model.layers.")
    )
    pairs = sum(num_seen(config, seen) for seen in range(1, num_tokens + 1))
    dims = 2 * config.head_dim
    if config.mla:  # absorbed: over latents, whose rope part is in the keys alone
        dims = 2 * config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    attention = 2.0 * pairs * config.num_heads * dims
    return (
        2.0 * num_tokens * weights
        + attention
        + 2.0 * config.vocab_size * config.hidden_size
    )


if __name__ == "__main__":
    main()
