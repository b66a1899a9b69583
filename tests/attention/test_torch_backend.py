"""The torch backend equals a naive dense reference, whatever the layout and the batch."""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.base import AttentionBackend, AttentionBatch
from attention.torch_backend import TorchBackend
from kvcache.layout import NAMED_ORDERS, KVLayout
from kvcache.pool import KVPool

NUM_LAYERS = 2
Span = tuple[int, int, int]  # a sequence, its first token of a step, past its last


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention problem."""

    order: str = "BHLCND"
    block_size: int = 4
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    num_components: int = 2
    dtype: str = "float32"
    num_blocks: int = 64
    device: str = "cpu"


def make_pool(shape: Shape) -> KVPool:
    """A pool in which every row that no test wrote is NaN, the null block included."""
    heads = (shape.num_blocks, shape.num_kv_heads, NUM_LAYERS, shape.num_components)
    sizes = (*heads, shape.block_size, shape.head_dim)
    pool = KVPool(KVLayout(shape.order, *sizes, shape.dtype), shape.device)
    pool.tensor.fill_(float("nan"))
    return pool


def make_backend(shape: Shape, pool: KVPool, decode: str = "auto") -> TorchBackend:
    return TorchBackend(
        pool,
        num_q_heads=shape.num_q_heads,
        head_dim=shape.head_dim,
        scale=1 / math.sqrt(shape.head_dim),
        decode=decode,
    )


@dataclass(frozen=True)
class Sequences:
    """Whole sequences: q, k, v per token and layer, and the blocks in which each lies."""

    q: list[torch.Tensor]  # per sequence [L, n, Hq, D]
    k: list[torch.Tensor]  # per sequence [L, n, H, D]
    v: list[torch.Tensor]
    tables: list[list[int]]


def make_sequences(shape: Shape, lens: list[int], seed: int = 0) -> Sequences:
    rng = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def draw(num_heads: int) -> list[torch.Tensor]:
        return [
            torch.randn(NUM_LAYERS, n, num_heads, shape.head_dim, generator=rng).to(dtype)
            for n in lens
        ]

    free = (1 + torch.randperm(shape.num_blocks - 1, generator=rng)).tolist()
    tables = [[free.pop() for _ in range(-(-n // shape.block_size))] for n in lens]
    k = draw(shape.num_kv_heads)
    v = draw(shape.num_kv_heads) if shape.num_components == 2 else k
    return Sequences(draw(shape.num_q_heads), k, v, tables)


def with_lse(
    backend: AttentionBackend, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward of the backend, and the log-sum-exps that it fills."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return backend.forward(layer, q, k, v, lse=lse), lse


def make_batch(
    shape: Shape, seqs: Sequences, spans: list[Span], num_padding: int = 0
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


def run_step(
    backend, shape: Shape, seqs: Sequences, spans: list[Span], num_padding: int = 0
) -> list[torch.Tensor]:
    """One step through all layers; the output of each span as [L, n, Hq, D]."""
    backend.plan(make_batch(shape, seqs, spans, num_padding))

    def rows(parts: list[torch.Tensor], layer: int) -> torch.Tensor:
        real = torch.cat([parts[seq][layer, start:stop] for seq, start, stop in spans])
        padding = torch.full((num_padding, *real.shape[1:]), float("nan"), dtype=real.dtype)
        return torch.cat([real, padding]).to(shape.device)

    outs = [
        backend.forward(i, rows(seqs.q, i), rows(seqs.k, i), rows(seqs.v, i)).cpu()
        for i in range(NUM_LAYERS)
    ]
    out = torch.stack(outs)
    assert out.shape[1] == sum(stop - start for _, start, stop in spans) + num_padding
    sizes = [stop - start for _, start, stop in spans]
    return list(out[:, : sum(sizes)].split(sizes, dim=1))


def reference(shape: Shape, seqs: Sequences, seq: int, start: int, stop: int) -> torch.Tensor:
    """Plain softmax attention in float64 over the sequence's own tokens."""
    v = _each_head(shape, seqs.v[seq][:, :stop])
    return (_scores(shape, seqs, seq, start, stop).softmax(-1) @ v).transpose(1, 2)


def reference_lse(shape: Shape, seqs: Sequences, seq: int, start: int, stop: int) -> torch.Tensor:
    """Of layer 0."""
    return _scores(shape, seqs, seq, start, stop)[0].logsumexp(-1).transpose(0, 1).float()


def _scores(shape: Shape, seqs: Sequences, seq: int, start: int, stop: int) -> torch.Tensor:
    q = seqs.q[seq][:, start:stop].double().transpose(1, 2)
    scores = q @ _each_head(shape, seqs.k[seq][:, :stop]).mT / math.sqrt(shape.head_dim)
    is_future = torch.arange(stop) > torch.arange(start, stop)[:, None]
    return scores.masked_fill(is_future, float("-inf"))


def _each_head(shape: Shape, kv: torch.Tensor) -> torch.Tensor:
    repeats = shape.num_q_heads // shape.num_kv_heads
    return kv.double().transpose(1, 2).repeat_interleave(repeats, 1)


def check_step(
    backend, shape: Shape, seqs: Sequences, spans: list[Span], num_padding=0, tolerance=2e-6
) -> None:
    outs = run_step(backend, shape, seqs, spans, num_padding)
    for span, out in zip(spans, outs, strict=True):
        expected = reference(shape, seqs, *span)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def check_steps(backend: TorchBackend, shape: Shape, seqs: Sequences, *steps, **options) -> None:
    for spans in steps:
        check_step(backend, shape, seqs, spans, **options)


both_ways = pytest.mark.parametrize("decode", ["sparse", "gather"])


@both_ways
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("order", NAMED_ORDERS)
def test_mixed_steps_equal_the_reference(order: str, block_size: int, decode: str) -> None:
    shape = Shape(order=order, block_size=block_size)
    seqs = make_sequences(shape, [11, 3, 17, 1])
    backend = make_backend(shape, make_pool(shape), decode)
    mixed = [(0, 10, 11), (2, 0, 7), (3, 0, 1), (1, 2, 3)]
    check_steps(backend, shape, seqs, [(0, 0, 10), (1, 0, 2)], mixed)
    check_steps(backend, shape, seqs, [(2, 7, 16)], [(2, 16, 17)], num_padding=3)


@both_ways
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (14, 2)])
def test_any_ratio_of_query_to_kv_heads(num_q_heads: int, num_kv_heads: int, decode: str) -> None:
    shape = Shape(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    seqs = make_sequences(shape, [9, 6])
    backend = make_backend(shape, make_pool(shape), decode)
    check_steps(backend, shape, seqs, [(0, 0, 8), (1, 0, 5)], [(0, 8, 9), (1, 5, 6)])


@both_ways
def test_lengths_far_apart_share_a_step(decode: str) -> None:
    shape = Shape(block_size=8, num_blocks=400)
    lens = [1500, 2, 40, 41, 300, 1, 290]
    seqs = make_sequences(shape, lens)
    backend = make_backend(shape, make_pool(shape), decode)
    run_step(backend, shape, seqs, [(i, 0, n - 1) for i, n in enumerate(lens) if n > 1])
    check_step(backend, shape, seqs, [(i, n - 1, n) for i, n in enumerate(lens)])


def test_contexts_of_several_chunks() -> None:
    """Long enough that the keys of one head do not fit a core's cache and are taken in chunks."""
    shape = Shape(head_dim=128, block_size=64, num_blocks=80)
    lens = [1100, 1031, 1500, 513, 512, 30]
    seqs = make_sequences(shape, lens)
    backend = make_backend(shape, make_pool(shape), "sparse")
    run_step(backend, shape, seqs, [(i, 0, n - 1) for i, n in enumerate(lens)])
    lasts = [(i, n - 1, n) for i, n in enumerate(lens)]
    check_steps(backend, shape, seqs, lasts, [(2, 1499, 1500)])


@settings(deadline=None, max_examples=15)
@given(
    order=st.sampled_from(NAMED_ORDERS),
    block_size=st.integers(1, 9),
    lens=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    decode=st.sampled_from(["sparse", "gather"]),
    seed=st.integers(0, 1000),
)
def test_any_division_of_sequences_into_steps(
    order: str, block_size: int, lens: list[int], decode: str, seed: int
) -> None:
    """Property: a token's output is the reference's, in whatever steps the prompt arrives."""
    shape, rng = Shape(order=order, block_size=block_size), random.Random(seed)
    seqs = make_sequences(shape, lens, seed)
    backend = make_backend(shape, make_pool(shape), decode)
    done = [0] * len(lens)
    while done != lens:
        sizes = [min(rng.choice([0, 1, 1, 2, 5]), n - d) for d, n in zip(done, lens, strict=True)]
        spans = [(i, d, d + n) for i, (d, n) in enumerate(zip(done, sizes, strict=True)) if n]
        if spans:
            check_step(backend, shape, seqs, spans, num_padding=rng.randrange(3))
        done = [d + n for d, n in zip(done, sizes, strict=True)]


def test_a_decode_row_does_not_depend_on_its_neighbours() -> None:
    shape = Shape(num_blocks=100)
    lens = [50, 49, 3, 48, 20]
    seqs = make_sequences(shape, lens)
    alone, together = make_backend(shape, make_pool(shape)), make_backend(shape, make_pool(shape))
    prompts = [(i, 0, n - 1) for i, n in enumerate(lens)]
    for backend in (alone, together):
        run_step(backend, shape, seqs, prompts)
    spans = [(i, n - 1, n) for i, n in enumerate(lens)]
    batched = run_step(together, shape, seqs, spans)
    for span, out in zip(spans, batched, strict=True):
        single = run_step(alone, shape, seqs, [span])[0]
        torch.testing.assert_close(out, single, atol=1e-6, rtol=1e-6)


def test_a_sequence_of_nan_harms_no_other_and_no_later_step() -> None:
    shape = Shape()
    seqs = make_sequences(shape, [6, 6])
    seqs.q[0][:, 5] = float("nan")
    backend = make_backend(shape, make_pool(shape))
    run_step(backend, shape, seqs, [(0, 0, 5), (1, 0, 5)])
    outs = run_step(backend, shape, seqs, [(0, 5, 6), (1, 5, 6)])
    assert outs[0].isnan().all()
    torch.testing.assert_close(outs[1].double(), reference(shape, seqs, 1, 5, 6), atol=2e-6, rtol=0)
    check_step(backend, shape, seqs, [(1, 5, 6)])


def test_a_step_writes_its_own_slots_only() -> None:
    shape = Shape(order="LBCNHD")
    pool, seqs = make_pool(shape), make_sequences(shape, [7])
    run_step(make_backend(shape, pool), shape, seqs, [(0, 0, 7)], num_padding=1)
    written = torch.zeros(shape.num_blocks, shape.block_size, dtype=torch.bool)
    for t in range(7):
        written[seqs.tables[0][t // 4], t % 4] = True
    for layer in range(NUM_LAYERS):
        for component, values in enumerate((seqs.k, seqs.v)):
            rows = pool.component(layer, component).transpose(1, 2)  # [B, N, H, D]
            stored = torch.stack([rows[seqs.tables[0][t // 4], t % 4] for t in range(7)])
            assert torch.equal(stored, values[0][layer])
            assert rows[~written].isnan().all()


@both_ways
def test_inputs_may_be_slices_of_one_projection(decode: str) -> None:
    shape = Shape()
    seqs = make_sequences(shape, [6, 4])
    backend = make_backend(shape, make_pool(shape), decode)
    for spans in ([(0, 0, 5), (1, 0, 3)], [(0, 5, 6), (1, 3, 4)]):
        backend.plan(make_batch(shape, seqs, spans))
        parts = [torch.cat([x[i][0, a:b] for i, a, b in spans]) for x in (seqs.q, seqs.k, seqs.v)]
        sliced = torch.cat(parts, dim=1).split([x.shape[1] for x in parts], dim=1)
        assert not sliced[0].is_contiguous()
        out = backend.forward(0, *sliced)
        expected = torch.cat([reference(shape, seqs, *span)[0] for span in spans])
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str) -> None:
    shape = Shape(dtype=dtype)
    seqs = make_sequences(shape, [30, 12])
    backend = make_backend(shape, make_pool(shape))
    steps = ([(0, 0, 20), (1, 0, 11)], [(0, 20, 29), (1, 11, 12)], [(0, 29, 30)])
    check_steps(backend, shape, seqs, *steps, num_padding=1, tolerance=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("order", ["BHLCND", "LBCNHD"])
def test_on_a_gpu(order: str, dtype: str, tolerance: float) -> None:
    shape = Shape(order=order, dtype=dtype, head_dim=64, block_size=16, device="cuda")
    lens = [70, 300, 17, 1, 40]
    seqs = make_sequences(shape, lens)
    backend = make_backend(shape, make_pool(shape))
    firsts = [(i, 0, n // 2) for i, n in enumerate(lens) if n > 1]
    seconds = [(i, n // 2, n - 1) for i, n in enumerate(lens) if n > 1]
    lasts = [(i, n - 1, n) for i, n in enumerate(lens)]
    check_steps(backend, shape, seqs, firsts, seconds, lasts, num_padding=3, tolerance=tolerance)


def test_a_cache_of_another_dtype_than_the_queries() -> None:
    shape = Shape(dtype="bfloat16")
    exact = make_sequences(Shape(), [9])
    rounded = Sequences(
        exact.q, *([x[0].bfloat16().float()] for x in (exact.k, exact.v)), exact.tables
    )
    backend = TorchBackend(
        make_pool(shape), num_q_heads=6, head_dim=16, scale=0.25, dtype=torch.float32
    )
    for span in [(0, 0, 5), (0, 5, 8), (0, 8, 9)]:
        out = run_step(backend, shape, exact, [span])[0]
        assert out.dtype == torch.float32
        torch.testing.assert_close(
            out.double(), reference(shape, rounded, *span), atol=2e-6, rtol=2e-6
        )


@both_ways
def test_log_sum_exp(decode: str) -> None:
    shape = Shape()
    seqs = make_sequences(shape, [9, 5])
    backend = make_backend(shape, make_pool(shape), decode)
    spans = [(0, 0, 6), (1, 0, 4)], [(0, 6, 8), (1, 4, 5)]
    for step in spans:
        run_step(backend, shape, seqs, step)  # layer 1 as well
        backend.plan(make_batch(shape, seqs, step))
        q, k, v = (
            torch.cat([x[seq][0, a:b] for seq, a, b in step]) for x in (seqs.q, seqs.k, seqs.v)
        )
        out, lse = with_lse(backend, 0, q, k, v)
        torch.testing.assert_close(out, backend.forward(0, q, k, v))
        expected = torch.cat([reference_lse(shape, seqs, *span) for span in step])
        torch.testing.assert_close(lse, expected, atol=1e-5, rtol=1e-5)


def check_latents(backend: TorchBackend, shape: Shape, exact: Sequences, stored: Sequences) -> None:
    """Steps of two sequences of latents; `stored` is what the pool holds of them."""
    rank = 16
    for spans in ([(0, 0, 9), (1, 0, 5)], [(0, 9, 12), (1, 5, 6)], [(0, 12, 13)]):
        backend.plan(make_batch(shape, exact, spans))
        for layer in range(NUM_LAYERS):
            q, k = (
                torch.cat([x[seq][layer, a:b] for seq, a, b in spans]) for x in (exact.q, exact.k)
            )
            out = backend.forward_latent(layer, q[..., :rank], q[..., rank:], k[:, 0])
            expected = torch.cat([reference(shape, stored, *span)[layer] for span in spans])
            torch.testing.assert_close(out.double(), expected[..., :rank], atol=5e-6, rtol=5e-6)


LATENT = {"num_kv_heads": 1, "num_components": 1, "num_q_heads": 5, "head_dim": 24}


def test_mla_attends_over_its_latents() -> None:
    shape = Shape(**LATENT)
    seqs = make_sequences(shape, [13, 6])
    check_latents(make_backend(shape, make_pool(shape)), shape, seqs, seqs)


def test_a_dtype_it_cannot_read_is_refused_by_name() -> None:
    pool = make_pool(Shape())
    pool.tensor = torch.zeros(pool.tensor.shape, dtype=torch.float64)
    with pytest.raises(ValueError, match="torch attention backend"):
        make_backend(Shape(), pool)


@pytest.mark.parametrize(("num_q_heads", "head_dim"), [(5, 16), (6, 8)])
def test_sizes_that_do_not_fit_the_pool_are_refused(num_q_heads: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match="pool's"):
        TorchBackend(make_pool(Shape()), num_q_heads=num_q_heads, head_dim=head_dim, scale=1.0)
