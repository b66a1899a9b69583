"""Attention test cases, and a reference that computes their results in float64.

The reference first rounds keys and values to the pool's dtype, as the pool does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionKind,
    LayerAttention,
)
from attention.registry import create_backend
from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.pool import KVPool

NUM_LAYERS = 2
SINKS = torch.linspace(-2.0, 3.0, 6)
# Windows, soft caps and sinks of the two layers of a pool.
SPECIAL = {
    "a window in one layer": (LayerAttention(AttentionKind(5)), LayerAttention()),
    "windows of one and of two": (
        LayerAttention(AttentionKind(1)),
        LayerAttention(AttentionKind(2)),
    ),
    "soft caps": (LayerAttention(AttentionKind(soft_cap=0.7)),) * 2,
    "sinks with a window": (
        LayerAttention(AttentionKind(6), SINKS),
        LayerAttention(AttentionKind(), -SINKS),
    ),
    "soft caps, windows, sinks": (
        LayerAttention(AttentionKind(4, 0.5), SINKS),
        LayerAttention(AttentionKind(9, 2.0), -SINKS),
    ),
}
FP8 = "float8_e4m3fn"
# The part of a sequence that a step computes: (sequence, first token, last token + 1).
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention problem."""

    order: str = "BHLCND"
    block_size: int = 4
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    rope_dim: int = 0  # elements of an MLA latent that only keys use; 0: no latents
    dtype: str = "float32"  # dtype of the queries
    kv_dtype: str = ""  # dtype of the pool; empty: the queries' dtype
    scales: tuple[float, ...] = ()  # scales of the pool; empty: all 1
    steepness: float = 1.0  # factor on the scale of the softmax
    num_blocks: int = 64
    device: str = "cpu"
    layers: tuple[LayerAttention, ...] = ()

    @property
    def scale(self) -> float:
        return self.steepness / math.sqrt(self.head_dim)

    @property
    def num_components(self) -> int:
        return 1 if self.rope_dim else 2


def make_pool(shape: Shape) -> KVPool:
    """Returns a pool that is filled with NaN, including the null block."""
    layout = KVLayout(
        order=shape.order,
        num_blocks=shape.num_blocks,
        num_heads=shape.num_kv_heads,
        num_layers=NUM_LAYERS,
        num_components=shape.num_components,
        block_size=shape.block_size,
        head_dim=shape.head_dim,
        dtype=shape.kv_dtype or shape.dtype,
    )
    pool = KVPool(layout, shape.device, shape.scales)
    pool.tensor.fill_(float("nan"))
    return pool


def make(
    shape: Shape, name: str = "torch", pool: KVPool | None = None, **options: Any
) -> Any:
    """Creates the backend `name` for this shape, with `pool` or with a new pool."""
    layers = []
    for layer in shape.layers:
        sinks = None if layer.sinks is None else layer.sinks.to(shape.device)
        layers.append(layer._replace(sinks=sinks))
    return create_backend(
        name,
        pool or make_pool(shape),
        dtype=getattr(torch, shape.dtype),
        num_q_heads=shape.num_q_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
        layers=layers,
        **options,
    )


@dataclass(frozen=True)
class Sequences:
    """Complete sequences: q, k and v of all tokens and layers, and the block tables."""

    q: list[torch.Tensor]  # per sequence [L, n, Hq, D]
    k: list[torch.Tensor]  # per sequence [L, n, H, D]
    v: list[torch.Tensor]
    tables: list[list[int]]


def make_sequences(shape: Shape, lens: list[int], seed: int = 0) -> Sequences:
    rng = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def draw(num_heads: int) -> list[torch.Tensor]:
        return [
            torch.randn(NUM_LAYERS, n, num_heads, shape.head_dim, generator=rng).to(
                dtype
            )
            for n in lens
        ]

    free = (1 + torch.randperm(shape.num_blocks - 1, generator=rng)).tolist()
    tables = [[free.pop() for _ in range(-(-n // shape.block_size))] for n in lens]
    k = draw(shape.num_kv_heads)
    v = draw(shape.num_kv_heads) if shape.num_components == 2 else k
    return Sequences(draw(shape.num_q_heads), k, v, tables)


def make_batch(
    shape: Shape, seqs: Sequences, spans: Sequence[Span], num_padding: int = 0
) -> AttentionBatch:
    width = max(len(table) for table in seqs.tables) + 1
    tables = np.zeros((len(spans), width), np.int32)
    slots = []
    for row, (seq, start, stop) in enumerate(spans):
        tables[row, : len(seqs.tables[seq])] = seqs.tables[seq]
        for t in range(start, stop):
            block = seqs.tables[seq][t // shape.block_size]
            slots.append(block * shape.block_size + t % shape.block_size)
    slots += [i % shape.block_size for i in range(num_padding)]
    return AttentionBatch(
        query_lens=np.array([stop - start for _, start, stop in spans], np.int32),
        context_lens=np.array([stop for _, _, stop in spans], np.int32),
        block_tables=tables,
        slot_mapping=np.array(slots, np.int64),
    )


def rows_of(
    shape: Shape,
    seqs: Sequences,
    layer: int,
    spans: Sequence[Span],
    num_padding: int = 0,
) -> list[torch.Tensor]:
    """Returns q, k and v [T, H, D] of a step. Rows of padding are NaN."""

    def rows(parts: list[torch.Tensor]) -> torch.Tensor:
        real = torch.cat([parts[seq][layer, start:stop] for seq, start, stop in spans])
        padding_shape = (num_padding, *real.shape[1:])
        padding = torch.full(padding_shape, float("nan"), dtype=real.dtype)
        return torch.cat([real, padding]).to(shape.device)

    return [rows(parts) for parts in (seqs.q, seqs.k, seqs.v)]


def forward(
    backend: AttentionBackend,
    shape: Shape,
    layer: int,
    rows: Sequence[torch.Tensor],
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs one layer of a step that the backend has planned.

    Returns:
        [T, Hq, D] for q, k and v, or [T, Hq, D - rope_dim] for latents.
    """
    q, k, v = (part.clone() for part in rows)
    if not shape.rope_dim:
        return backend.forward(layer, q, k, v, lse=lse)
    rank = shape.head_dim - shape.rope_dim
    return backend.forward_latent(layer, q[..., :rank], q[..., rank:], k[:, 0], lse=lse)


def run_step(
    backend: AttentionBackend,
    shape: Shape,
    seqs: Sequences,
    spans: Sequence[Span],
    num_padding: int = 0,
) -> list[torch.Tensor]:
    """Runs one step through all layers.

    Returns:
        The output of each span as [L, n, Hq, D].
    """
    backend.plan(make_batch(shape, seqs, spans, num_padding))
    outs = []
    for layer in range(NUM_LAYERS):
        rows = rows_of(shape, seqs, layer, spans, num_padding)
        outs.append(forward(backend, shape, layer, rows).cpu())
    sizes = [stop - start for _, start, stop in spans]
    assert all(len(out) == sum(sizes) + num_padding for out in outs)
    return list(torch.stack(outs)[:, : sum(sizes)].split(sizes, dim=1))


def stored(shape: Shape, values: torch.Tensor, component: int) -> torch.Tensor:
    """Returns `values` [L, n, H, D] in float64, rounded as if the pool stored them."""
    scales = shape.scales or (1.0,) * (NUM_LAYERS * shape.num_components)
    by_layer = torch.tensor(scales).double().view(NUM_LAYERS, -1)
    scale = by_layer[:, component, None, None, None]
    dtype = getattr(torch, shape.kv_dtype or shape.dtype)
    scaled = values.float() * (1 / scale).float() if shape.scales else values
    return fp8.to_stored(scaled, dtype).double() * scale


def reference(
    shape: Shape, seqs: Sequences, seq: int, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes plain attention of the tokens [start, stop) of a sequence.

    Returns:
        The outputs [L, n, Hq, D] and the log-sum-exps [L, n, Hq]. With latents, the
        outputs lack the RoPE part. The log-sum-exps do not include sinks.
    """
    repeats = shape.num_q_heads // shape.num_kv_heads
    k, v = (
        stored(shape, values[seq][:, :stop], component)
        .transpose(1, 2)
        .repeat_interleave(repeats, 1)
        for values, component in ((seqs.k, 0), (seqs.v, shape.num_components - 1))
    )
    q = seqs.q[seq][:, start:stop].double().transpose(1, 2)
    scores = q @ k.mT * shape.scale
    distance = torch.arange(start, stop)[:, None] - torch.arange(stop)
    layers = shape.layers or [LayerAttention()] * NUM_LAYERS
    for layer, ((window, soft_cap), _) in enumerate(layers):
        if soft_cap:
            scores[layer] = (scores[layer] / soft_cap).tanh() * soft_cap
        is_masked = (distance < 0) | (distance >= (window or stop))
        scores[layer].masked_fill_(is_masked, float("-inf"))
    value_dim = shape.head_dim - shape.rope_dim
    out = (scores.softmax(-1) @ v).transpose(1, 2)[..., :value_dim]
    lse = scores.logsumexp(-1).transpose(1, 2)
    for layer, (_, sinks) in enumerate(shape.layers):
        if sinks is not None:
            out[layer] *= (1 / (1 + (sinks.double() - lse[layer]).exp()))[..., None]
    return out, lse


def check_step(
    backend: AttentionBackend,
    shape: Shape,
    seqs: Sequences,
    spans: Sequence[Span],
    num_padding: int = 0,
    tolerance: float = 5e-6,
    with_lse: bool = True,
) -> None:
    """Asserts that a step's outputs and log-sum-exps equal the reference's.

    It also asserts that the outputs are the same with and without log-sum-exps.
    """
    outs = run_step(backend, shape, seqs, spans, num_padding)
    for span, out in zip(spans, outs, strict=True):
        assert out.dtype == getattr(torch, shape.dtype)
        expected, _ = reference(shape, seqs, *span)
        torch.testing.assert_close(
            out.double(), expected, atol=tolerance, rtol=tolerance
        )
    if not with_lse:
        return
    rows = rows_of(shape, seqs, 1, spans, num_padding)
    lse = torch.empty(rows[0].shape[:2], dtype=torch.float32, device=shape.device)
    again = forward(backend, shape, 1, rows, lse).double().cpu()
    num_tokens = len(again) - num_padding
    before = torch.cat([out[1] for out in outs]).double()
    torch.testing.assert_close(
        again[:num_tokens], before, atol=tolerance, rtol=tolerance
    )
    expected = torch.cat([reference(shape, seqs, *span)[1][1] for span in spans])
    actual = lse[:num_tokens].double().cpu()
    torch.testing.assert_close(actual, expected, atol=2 * tolerance, rtol=2 * tolerance)


def check_steps(
    backend: AttentionBackend,
    shape: Shape,
    seqs: Sequences,
    *steps: Sequence[Span],
    **options: Any,
) -> None:
    """Calls check_step for several steps, one after the other."""

    for spans in steps:
        check_step(backend, shape, seqs, spans, **options)
