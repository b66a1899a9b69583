"""How fast one rank prefills and decodes a model shape, beside what its memory and matrix units do.

    python -m benchmarks.engine [--shape llama-3.1-8b] [--batch 1 8 64 256] [--context 1024]
                                [--prompt 8192 1024] [--device cuda]

Weights are dummies: speed does not depend on their values. The ceilings come from the same run: a
copy between two buffers (bytes read plus bytes written) and a square matmul in the model's dtype,
both on random data. A decode step cannot be faster than reading once what it must read (weights
without the input embedding, and the KV of all contexts) at the copy's rate; a prefill not faster
than its model FLOPs (causal attention counted by half) at the matmul's.

Per step, "step" is the time from one step's drawn tokens to the next one's, a step being launched
before the last one's tokens are read; "device" is the same step's graph alone, replayed back to
back. The last line is JSON.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.benchmark import Timer

from engine.config import EngineConfig
from engine.core.batch import StepInput
from engine.worker.memory import size_pool
from engine.worker.rehearsal import kv_budget_bytes
from engine.worker.runner import ModelRunner
from model.config import ModelConfig, parse_config
from model.parallel import Parallel
from model.sizes import implied_weights
from protocol.messages import SamplingParams

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


def main(argv: list[str] | None = None) -> None:
    args = _parse_args(argv)
    started_s = time.perf_counter()
    config = parse_config({"architectures": ["LlamaForCausalLM"], **SHAPES[args.shape]})
    device = torch.device(args.device)
    ceilings = measure_ceilings(device, getattr(torch, args.dtype))
    runner, figures = _start(args, config)
    figures["ceilings"] = ceilings._asdict()
    figures["decode"] = [_decode(runner, args, ceilings, batch) for batch in args.batch]
    figures["prefill"] = [_prefill(runner, args, ceilings, tokens) for tokens in args.prompt]
    figures["total_s"] = round(time.perf_counter() - started_s, 1)
    print(json.dumps({"benchmark": "engine", "args": vars(args), **figures}))


def _told(name: str, **figures: float) -> dict[str, float]:
    """Prints figures; returns them, rounded."""
    rounded = {key: round(value, 3) for key, value in figures.items()}
    print(f"{name}: {rounded}", flush=True)
    return rounded


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
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


def _start(args: argparse.Namespace, config: ModelConfig) -> tuple[ModelRunner, dict[str, Any]]:
    started_s = time.perf_counter()
    runner = ModelRunner(_engine_config(args), config, Parallel(0, 1))
    size = size_pool(
        runner.config,
        block_bytes=runner.layout(num_blocks=2).block_bytes,
        model_max_len=config.max_position,
        free_bytes=kv_budget_bytes(runner) if runner.device.type == "cuda" else 2**30,
    )
    print(size.explanation, flush=True)
    runner.allocate(size.num_blocks)
    runner.capture_graphs()
    start_s, kv_tokens = time.perf_counter() - started_s, (size.num_blocks - 1) * args.block_size
    return runner, {**_told("start", start_s=start_s, kv_tokens=kv_tokens)}


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    told = ("device", "dtype", "block_size", "kv_layout", "kv_cache_tokens", "kv_cache_dtype",
            "attention_backend", "enforce_eager")  # fmt: skip
    return EngineConfig(
        **{name: getattr(args, name) for name in told},
        role="decode",
        engine_id="benchmark",
        incarnation="0",
        model_dir="",
        load_format="dummy",
        devices=[0],
        max_num_seqs=max([*args.batch, 1]),
        max_num_batched_tokens=max([*args.prompt, 2048]),
    )


def _tables(runner: ModelRunner, num_seqs: int, num_tokens: int) -> np.ndarray[Any, Any]:
    """Scattered blocks from the whole pool, for `num_seqs` sequences."""
    layout = runner.memory.pool.layout
    width = layout.num_blocks_for(num_tokens) * runner.groups.count
    needed = num_seqs * width
    if needed >= layout.num_blocks:
        raise SystemExit(f"{num_seqs} x {num_tokens} tokens do not fit the pool: lower --batch")
    order = 1 + np.random.default_rng(0).permutation(layout.num_blocks - 1)[:needed]
    return order.astype(np.int32).reshape(num_seqs, width)


def _step(
    runner: ModelRunner,
    tables: np.ndarray[Any, Any],
    query_len: int,
    context_len: int,
    *,
    follows: bool = False,
) -> StepInput:
    """A step of equal sequences; one that `follows` takes the tokens that the last one drew."""
    num_seqs = len(tables)
    vocab_size = runner.model_config.vocab_size
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
    tables = _tables(runner, batch, args.context + args.steps + 4)
    lens = iter(range(args.context + 1, args.context + args.steps + 5))
    for _ in range(3):
        runner.execute(_step(runner, tables, 1, next(lens)))
    step_s = statistics.median(_periods(runner, tables, list(lens)))
    device_s = step_s
    if runner.graphs is not None:  # of the graph that the last step ran
        device_s = mean_s(partial(runner.graphs.replay, batch), 50)
    kv_bytes = batch * args.context * runner.layout(num_blocks=2).token_bytes
    floor_s = (num_read_weights(config, batch) * itemsize + kv_bytes) / ceilings.copy_bytes_per_s
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
        before, last = last, runner.launch(_step(runner, tables, 1, context_len, follows=True))
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
    floor_s = flops / ceilings.matmul_flops_per_s
    return _told(
        "prefill",
        tokens=num_tokens,
        step_ms=step_s * 1e3,
        floor_ms=floor_s * 1e3,
        share_of_matmul=floor_s / step_s,
        tokens_per_s=num_tokens / step_s,
    )


def num_read_weights(config: ModelConfig, batch: int = 1) -> float:
    """Elements of weights that a decode step reads: all but the input embedding's other rows, and
    of experts those that so many tokens hit on average, if all are equally likely."""
    hit = 1.0
    if moe := config.moe:
        hit = 1 - (1 - moe.experts_per_token / moe.num_experts) ** batch
    return _num_weights(config, hit) + config.vocab_size * config.hidden_size


def _num_weights(config: ModelConfig, share_of_experts: float) -> float:
    """Elements of all layers' matrices."""
    found = 0.0
    for weights in implied_weights(config):
        if weights.name.startswith("model.layers."):
            is_expert = len(weights.shape) > 2 or ".experts." in weights.name
            found += weights.elements * (share_of_experts if is_expert else 1.0)
    return found


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Model FLOPs of one prompt: two per weight and token, causal attention, one row of logits."""
    share = config.moe.experts_per_token / config.moe.num_experts if config.moe else 1.0
    weights = 2.0 * num_tokens * _num_weights(config, share)
    pairs, dims = num_tokens * (num_tokens + 1) / 2, 2 * config.head_dim
    if config.mla:  # absorbed: over latents, whose rope part is in the keys alone
        dims = 2 * config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    attention = 2.0 * pairs * config.num_heads * dims * config.num_layers
    return weights + attention + 2.0 * config.vocab_size * config.hidden_size


if __name__ == "__main__":
    main()
