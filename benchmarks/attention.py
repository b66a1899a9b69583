"""What attention over the paged cache costs on this CPU, beside torch's own over dense tensors.

    python -m benchmarks.attention [--threads N] [--layers 30] [--heads 9] [--kv-heads 3] ...

Each case is one step through all layers of a pool of scattered blocks; figures are the median over
`--repeats` steps, per layer, in ms. "dense" is scaled_dot_product_attention over contiguous K and V
of the same lengths, which needs no cache, no writing and no indices. The last line is JSON.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from attention.base import AttentionBatch
from attention.torch_backend import TorchBackend
from kvcache.layout import KVLayout
from kvcache.pool import KVPool


@dataclass(frozen=True)
class Case:
    """One step: sequences of (context length, query length) tokens."""

    name: str
    context_lens: list[int]
    query_len: int = 1


CASES = (
    Case("decode 1 x 600", [600]),
    Case("decode 8 x 600", [600] * 8),
    Case("decode 8 x 100..1500", [100, 300, 500, 700, 900, 1100, 1300, 1500]),
    Case("decode 1 x 8000", [8000]),
    Case("decode 8000 + 7 x 200", [8000, *[200] * 7]),
    Case("prefill 512", [512], 512),
    Case("prefill 512 after 1536", [2048], 512),
)


def main() -> None:
    args = _parse_args()
    torch.set_num_threads(args.threads)
    figures = {}
    with torch.inference_mode():
        for case in CASES:
            figures[case.name] = _measure(case, args)
            print(f"{case.name:24}", figures[case.name], flush=True)
    print(json.dumps({"benchmark": "attention", "args": vars(args), "ms_per_layer": figures}))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64, help="tokens")
    parser.add_argument("--layout", default="BHLCND")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", default="wall", help="wall, or cpu where others use the cores")
    parser.add_argument("--decode", default="auto", help="auto, sparse or gather")
    return parser.parse_args()


def _measure(case: Case, args: argparse.Namespace) -> dict[str, float]:
    backend, batch = _make_backend(case, args)
    dtype = getattr(torch, args.dtype)
    num_tokens = batch.num_tokens

    def draw(num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, args.head_dim).to(dtype)

    q, k, v = draw(args.heads), draw(args.kv_heads), draw(args.kv_heads)

    def paged() -> None:
        for layer in range(args.layers):
            backend.forward(layer, q, k, v)

    plan_ms = _median_ms(lambda: backend.plan(batch), args)
    return {
        "paged": round(_median_ms(paged, args) / args.layers, 3),
        "dense": round(_dense_ms(case, args, dtype), 3),
        "plan_per_step": round(plan_ms, 3),
    }


def _make_backend(case: Case, args: argparse.Namespace) -> tuple[TorchBackend, AttentionBatch]:
    block_size = args.block_size
    needs = [-(-n // block_size) for n in case.context_lens]
    layout = KVLayout(
        order=args.layout,
        num_blocks=sum(needs) + 1,
        num_heads=args.kv_heads,
        num_layers=args.layers,
        num_components=2,
        block_size=block_size,
        head_dim=args.head_dim,
        dtype=args.dtype,
    )
    pool = KVPool(layout)
    pool.tensor.normal_()
    ids = 1 + np.random.default_rng(0).permutation(sum(needs)).astype(np.int32)
    tables = np.zeros((len(needs), max(needs)), np.int32)
    slots = []
    for row, (length, num) in enumerate(zip(case.context_lens, needs, strict=True)):
        tables[row, :num], ids = ids[:num], ids[num:]
        positions = np.arange(length - case.query_len, length)
        slots.append(
            tables[row, positions // block_size].astype(np.int64) * block_size
            + positions % block_size
        )
    batch = AttentionBatch(
        query_lens=np.full(len(needs), case.query_len, np.int32),
        context_lens=np.array(case.context_lens, np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots),
    )
    backend = TorchBackend(
        pool,
        num_q_heads=args.heads,
        head_dim=args.head_dim,
        scale=1 / math.sqrt(args.head_dim),
        decode=args.decode,
    )
    return backend, batch


def _dense_ms(case: Case, args: argparse.Namespace, dtype: torch.dtype) -> float:
    """Per layer. Sequences of equal length share a call, as in a static batch."""
    calls = []
    for length in sorted(set(case.context_lens)):
        num = case.context_lens.count(length)
        # Several copies, so that a call finds its K and V in memory, as another layer's would be.
        kv_shape = (args.layers, 2, num, args.kv_heads, length, args.head_dim)
        q = torch.randn(num, args.heads, case.query_len, args.head_dim).to(dtype)
        calls.append((q, torch.randn(kv_shape).to(dtype), _causal_mask(case.query_len, length)))

    def step() -> None:
        for layer in range(args.layers):
            for q, kv, mask in calls:
                F.scaled_dot_product_attention(
                    q, kv[layer, 0], kv[layer, 1], attn_mask=mask, enable_gqa=True
                )

    return float(_median_ms(step, args) / args.layers)


def _causal_mask(query_len: int, length: int) -> torch.Tensor | None:
    if query_len == 1:
        return None
    return torch.ones(query_len, length, dtype=torch.bool).tril(length - query_len)


def _median_ms(function: Callable[[], object], args: argparse.Namespace) -> float:
    clock: Callable[[], float] = time.perf_counter if args.clock == "wall" else time.process_time
    function()
    times: list[float] = []
    for _ in range(args.repeats):
        start = clock()
        function()
        times.append(clock() - start)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
