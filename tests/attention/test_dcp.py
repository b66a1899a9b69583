"""Decode context parallelism: ranks that share the tokens of sequences compute the same
attention as one rank that has all tokens.

Each rank is a thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from attention.base import AttentionBackend, AttentionBatch
from attention.dcp import ContextParallelBackend
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.plan.endpoint import heads_of
from model.config import parse_config
from model.errors import InvalidParallelism
from model.sizes import check_parallelism
from tests.attention.reference import FP8, NUM_LAYERS, Shape, forward, make, make_pool
from tests.model.test_config import LLAMA
from tests.rigs.examples import examples

NUM_BLOCKS = 24


class Ranks:
    """`size` ranks that run in threads. `member` returns a rank's ContextGroup."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[torch.Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)
        self.max_exchanged = 0  # maximum number of elements that a rank sent at once

    def member(self, rank: int) -> "Member":
        return Member(self, rank)

    def exchange(self, rank: int, tensor: torch.Tensor, pick: Callable) -> torch.Tensor:
        self._slots[rank] = tensor
        self._barrier.wait()
        received = torch.stack([pick(part) for part in self._slots])
        self._barrier.wait()
        return received

    def run(self, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """Runs `work` on each rank. Returns the results by rank.

        If a rank raises, the barrier breaks and all other ranks raise too. The original
        error is raised.
        """

        def run_rank(rank: int) -> torch.Tensor:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(run_rank, rank) for rank in range(self.size)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


class Member:
    """The ContextGroup of one rank."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.rank = rank
        self.size = ranks.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ranks.exchange(self.rank, tensor, lambda part: part)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        self.ranks.max_exchanged = max(self.ranks.max_exchanged, tensor.numel())
        return self.ranks.exchange(self.rank, tensor, lambda part: part[self.rank])


class Bench:
    """Compares ranks that share the tokens of sequences with one torch backend that has
    complete sequences.

    Args:
        size: Number of ranks. Together, they have the query heads of `shape`.
        scratch: Number of context tokens that are collected at once for prompts.
        name: The attention backend of the ranks.
    """

    def __init__(
        self,
        size: int,
        shape: Shape,
        *,
        scratch: int,
        name: str = "torch",
        tolerance: float = 1e-5,
    ) -> None:
        self.size = size
        self.tolerance = tolerance
        self.shape = shape = replace(shape, order="BHLCND", num_blocks=NUM_BLOCKS)
        self.tokens_per_block = size * shape.block_size
        self.whole = make(replace(shape, block_size=self.tokens_per_block))
        self.ranks = Ranks(size)
        self.pools = [make_pool(shape) for _ in range(size)]

        def make_part(pool: KVPool, num_q_heads: int) -> AttentionBackend:
            return make(replace(shape, num_q_heads=num_q_heads), name, pool)

        self.parts = [
            ContextParallelBackend(
                Stripe(rank, size, shape.block_size),
                self.ranks.member(rank),
                pool,
                make_part,
                num_q_heads=shape.num_q_heads // size,
                head_dim=shape.head_dim,
                scale=shape.scale,
                scratch_tokens=scratch,
            )
            for rank, pool in enumerate(self.pools)
        ]
        for part in self.parts:
            part.scratch.tensor.fill_(float("nan"))
        self.generator = torch.Generator().manual_seed(5)

    def check_step(
        self, query_lens: list[int], context_lens: list[int], tables: np.ndarray
    ) -> None:
        batch = make_batch(query_lens, context_lens, tables, self.tokens_per_block)
        for backend in (self.whole, *self.parts):
            backend.plan(batch)
        self._compare(batch.num_tokens)

    def check_captured_step(
        self, context_lens: list[int], tables: np.ndarray, num_rows: int
    ) -> None:
        """Checks a decode step that is planned as if for a CUDA graph."""
        ones = [1] * len(context_lens)
        batch = make_batch(ones, context_lens, tables, self.tokens_per_block)
        self.whole.plan(batch)
        for part in self.parts:
            part.plan_for_graph(batch, num_rows)
        self._compare(batch.num_tokens, num_rows - batch.num_tokens)

    def _compare(self, num_tokens: int, num_padding: int = 0) -> None:
        shape = self.shape
        for layer in range(NUM_LAYERS):
            q, k, v = (
                torch.randn(
                    num_tokens, heads, shape.head_dim, generator=self.generator
                ).to(shape.device, getattr(torch, shape.dtype))
                for heads in (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
            )
            expected = forward(self.whole, shape, layer, (q, k, v))
            padded = [F.pad(x, (0, 0, 0, 0, 0, num_padding)) for x in (q, k, v)]
            outs = self.ranks.run(partial(self._forward_part, layer, *padded))
            actual = torch.cat(outs, 1)[:num_tokens]
            torch.testing.assert_close(
                actual, expected, atol=self.tolerance, rtol=self.tolerance
            )

    def _forward_part(self, layer, q, k, v, rank) -> torch.Tensor:
        rank_q = q.chunk(self.size, 1)[rank]
        return forward(self.parts[rank], self.shape, layer, (rank_q, k, v))


def make_batch(query_lens, context_lens, tables, block_size) -> AttentionBatch:
    slots = []
    for table, query, context in zip(tables, query_lens, context_lens, strict=True):
        positions = np.arange(context - query, context)
        slots.append(
            table[positions // block_size] * block_size + positions % block_size
        )
    return AttentionBatch(
        query_lens=np.array(query_lens, np.int32),
        context_lens=np.array(context_lens, np.int32),
        block_tables=tables.astype(np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int64),
    )


def check_growing_sequences(bench: Bench) -> None:
    """Checks steps that mix complete prompts, chunks of prompts and single tokens.

    The steps end when all sequences have three blocks of tokens.
    """
    block_size = bench.shape.block_size
    longest = 3 * bench.tokens_per_block
    random = np.random.default_rng(3)
    tables = random.permutation(np.arange(1, NUM_BLOCKS))[:20].reshape(5, 4)
    lens = [0] * 5
    while min(lens) < longest:
        sizes = random.choice([1, 1, 3, block_size, 2 * block_size + 1], 5)
        queries = [
            min(int(size), longest - length)
            for size, length in zip(sizes, lens, strict=True)
        ]
        # Sequences with a single token are first, as in the scheduler's steps.
        sorted_seqs = np.argsort([n > 1 for n in queries], kind="stable")
        order = [i for i in sorted_seqs if queries[i]]
        for i in order:
            lens[i] += queries[i]
        query_lens = [queries[i] for i in order]
        context_lens = [lens[i] for i in order]
        bench.check_step(query_lens, context_lens, tables[order])


def shape_of(kv_heads: int, q_heads: int, rope_dim: int = 0) -> Shape:
    return Shape(num_kv_heads=kv_heads, num_q_heads=q_heads, rope_dim=rope_dim)


def in_8_bits(shape: Shape) -> Shape:
    """Returns the shape with an FP8 pool. The pool's scales differ, and one scale is so
    small that large keys are clamped.
    """
    scales = (0.02, 0.5, 0.003, 1.0) if shape.num_components == 2 else (0.02, 0.003)
    return replace(shape, kv_dtype=FP8, scales=scales)


# Groups: (ranks, KV heads, query heads, rope dimensions of latents).
GQA = [(2, 1, 4, 0), (2, 2, 4, 0), (2, 4, 4, 0), (4, 2, 8, 0), (4, 1, 4, 0)]
MLA = [(2, 1, 4, 4), (4, 1, 8, 4)]


@pytest.mark.parametrize("group", GQA + MLA, ids=str)
@pytest.mark.parametrize("scratch", [64, 1000], ids=["in-turns", "at-once"])
@pytest.mark.parametrize("kv_dtype", ["", FP8])
def test_ranks_that_share_tokens_compute_the_outputs_of_one_rank(
    group, scratch, kv_dtype
):
    size, *heads = group
    shape = in_8_bits(shape_of(*heads)) if kv_dtype else shape_of(*heads)
    bench = Bench(size, shape, scratch=scratch)
    check_growing_sequences(bench)
    for layer, component in np.ndindex(NUM_LAYERS, shape.num_components):
        parts = [pool.component(layer, component)[1:].float() for pool in bench.pools]
        whole = bench.whole.pool.component(layer, component)[1:].float()
        torch.testing.assert_close(
            torch.cat(parts, 2), whole, rtol=0, atol=0, equal_nan=True
        )


def test_long_context_is_collected_in_several_exchanges(monkeypatch):
    """A long context is collected in parts, because the temporary memory of an exchange
    is limited.
    """
    bench = Bench(2, shape_of(2, 4), scratch=64)
    tables = np.arange(1, 9).reshape(1, 8)
    bench.check_step([60], [60], tables)
    two_blocks = 2 * bench.size * bench.parts[0].scratch.layout.block_bytes
    monkeypatch.setattr("attention.dcp._EXCHANGED_BYTES", two_blocks)
    bench.check_step([3], [63], tables)
    assert bench.ranks.max_exchanged * 4 == two_blocks


def test_sequence_shorter_than_a_stripe_is_stored_on_one_rank():
    bench = Bench(2, shape_of(1, 4), scratch=64)
    tables = np.array([[3], [7]])
    bench.check_step([2, 3], [2, 3], tables)
    bench.check_step([1, 1], [3, 4], tables)  # rank 1 still has no tokens
    bench.check_step([1, 1], [4, 5], tables)
    first, second = (pool.component(0, 0) for pool in bench.pools)
    assert not first[3].isnan().any()
    assert second[3].isnan().all()
    assert second[7].isnan().all(-1).tolist() == [[False, True, True, True]]


def is_admitted(q_heads: int, kv_heads: int, tp: int, dcp: int) -> bool:
    sizes = {
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "intermediate_size": tp,
    }
    model = parse_config({**LLAMA, **sizes})
    try:
        check_parallelism(model, tp, dcp)
    except InvalidParallelism:
        return False
    return True


ADMITTED = [
    (per_kv_head * kv_heads, kv_heads, tp, dcp)
    for per_kv_head in range(1, 13)
    for kv_heads in (1, 2, 3, 4, 6, 8)
    for tp in range(2, 13)
    for dcp in range(2, tp + 1)
    if tp % dcp == 0 and is_admitted(per_kv_head * kv_heads, kv_heads, tp, dcp)
]


@examples(25)
@given(st.sampled_from(ADMITTED))
def test_queries_meet_their_kv_heads_for_every_grouping_of_ranks(sizes):
    q_heads, kv_heads, tp, dcp = sizes
    num_groups = tp // dcp
    group_heads = q_heads * dcp // tp
    for group in range(num_groups):
        group_kv_heads = heads_of(group, num_groups, kv_heads)
        for head in range(group_heads):
            expected = (group * group_heads + head) * kv_heads // q_heads
            actual = group_kv_heads[head * len(group_kv_heads) // group_heads]
            assert actual == expected
    bench = Bench(dcp, shape_of(len(group_kv_heads), group_heads), scratch=32)
    tables = np.array([[3, 1, 7, 4], [2, 5, 8, 6]])
    # Steps of two sequences: query lengths and context lengths.
    for queries, contexts in (([5, 9], [5, 9]), ([1, 5], [6, 14]), ([1, 1], [7, 15])):
        bench.check_step(queries, contexts, tables)
