"""Whichever heads a model has and however its ranks are grouped, a query meets its own KV head."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.base import AttentionBatch
from attention.dcp import ContextParallelBackend
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.plan.endpoint import heads_of
from model.config import parse_config
from model.errors import InvalidParallelism
from model.sizes import check_parallelism
from tests.attention.test_dcp import SCALE, Ranks, make_batch, make_torch

HEAD_DIM, BLOCK_SIZE = 4, 2
# Queries and contexts: two prompts, one more part of the second, a token for each.
STEPS = (([3, 6], [3, 6]), ([1, 2], [4, 8]), ([1, 1], [5, 9]))


def is_admitted(q_heads: int, kv_heads: int, tp: int, dcp: int) -> bool:
    model = parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": tp,
            "num_hidden_layers": 1,
            "num_attention_heads": q_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
        }
    )
    try:
        check_parallelism(model, tp, dcp)
    except InvalidParallelism:
        return False
    return True


class Whole:
    """One server's attention, and that of all ranks of another whose groups share tokens."""

    def __init__(self, q_heads: int, kv_heads: int, tp: int, dcp: int) -> None:
        self.q_heads, self.kv_heads, self.tp, self.dcp = q_heads, kv_heads, tp, dcp
        self.backend = make_torch(_pool(kv_heads, BLOCK_SIZE * dcp), q_heads)
        self.groups = [Ranks(dcp) for _ in range(tp // dcp)]
        self.ranks = [[self._rank(g, r) for r in range(dcp)] for g in range(tp // dcp)]

    def _heads(self, group: int) -> range:
        return heads_of(group, self.tp // self.dcp, self.kv_heads)

    def _rank(self, group: int, rank: int) -> ContextParallelBackend:
        return ContextParallelBackend(
            Stripe(rank, self.dcp, BLOCK_SIZE),
            self.groups[group].member(rank),
            _pool(len(self._heads(group)), BLOCK_SIZE),
            make_torch,
            num_q_heads=self.q_heads // self.tp,
            head_dim=HEAD_DIM,
            scale=SCALE,
            scratch_tokens=32,
        )

    def check(self, batch: AttentionBatch, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(batch.num_tokens, heads, HEAD_DIM, generator=generator)
            for heads in (self.q_heads, self.kv_heads, self.kv_heads)
        )
        self.backend.plan(batch)
        expected = self.backend.forward(0, q, k.clone(), v.clone())
        found = []
        for index, (group, ranks) in enumerate(zip(self.groups, self.ranks, strict=True)):
            heads = self._heads(index)
            kv = [x[:, heads.start : heads.stop] for x in (k, v)]
            queries = q.chunk(self.tp, 1)[index * self.dcp :]

            def attend(rank: int, ranks=ranks, queries=queries, kv=kv) -> torch.Tensor:
                ranks[rank].plan(batch)
                return ranks[rank].forward(0, queries[rank], *(x.clone() for x in kv))

            found += group.run(attend)
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)


def _pool(kv_heads: int, block_size: int) -> KVPool:
    pool = KVPool(KVLayout("BHLCND", 9, kv_heads, 1, 2, block_size, HEAD_DIM, "float32"))
    pool.tensor.fill_(float("nan"))
    return pool


ADMITTED = [
    (per_kv_head * kv_heads, kv_heads, tp, dcp)
    for per_kv_head in range(1, 13)
    for kv_heads in (1, 2, 3, 4, 6, 8)
    for tp in range(2, 13)
    for dcp in range(2, tp + 1)
    if tp % dcp == 0 and is_admitted(per_kv_head * kv_heads, kv_heads, tp, dcp)
]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ADMITTED))
def test_a_query_meets_its_own_kv_head(sizes: tuple[int, int, int, int]) -> None:
    whole = Whole(*sizes)
    tokens_per_block = BLOCK_SIZE * whole.dcp
    tables = np.array([[3, 1, 7, 4], [2, 5, 8, 6]])
    for seed, (queries, contexts) in enumerate(STEPS):
        whole.check(make_batch(queries, contexts, tables, tokens_per_block), seed)
