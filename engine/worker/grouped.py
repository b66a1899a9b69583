"""Attention for models with several KV groups (kvcache/groups.py): groups of layers
that each have their own blocks.

Each group has its own backend. All backends use the same pool. A backend receives the
block tables and slots of its group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from attention.base import AttentionBackend, AttentionBatch, LayerAttention
from kvcache.pool import KVPool

MakeBackend = Callable[
    [Sequence[LayerAttention], AttentionBackend | None], AttentionBackend
]


class GroupedBackend(AttentionBackend):
    """The backend of a model with several KV groups. In a batch, each block table
    interleaves the blocks of all groups (see kvcache/groups.py), and the slots are
    those of the first group.

    Layer n of the pool (a "pool layer") stores the KV of the n-th layer of every group.

    Args:
        group_layers: the model's layers in each group, in the order of the pool layers.
        layers: the attention options of each of the model's layers.
        make: makes the backend of a group. Its arguments are the attention options of
            the group's pool layers, and the first group's backend, whose workspace the
            new backend can use. The second argument is None for the first group.
        sizes: further arguments of AttentionBackend.
    """

    def __init__(
        self,
        pool: KVPool,
        group_layers: Sequence[Sequence[int]],
        layers: Sequence[LayerAttention],
        make: MakeBackend,
        **sizes: Any,
    ) -> None:
        super().__init__(pool, **sizes)
        # The group and the pool layer of each of the model's layers.
        self._pool_layers: dict[int, tuple[int, int]] = {}
        self._backends: list[AttentionBackend] = []
        num_pool_layers = pool.layout.num_layers
        for group, members in enumerate(group_layers):
            for pool_layer, layer in enumerate(members):
                self._pool_layers[layer] = (group, pool_layer)
            # A group with fewer layers than the pool has the options of its first layer
            # for the unused pool layers.
            padding = [members[0]] * (num_pool_layers - len(members))
            first_backend = self._backends[0] if self._backends else None
            attentions = [layers[layer] for layer in (*members, *padding)]
            self._backends.append(make(attentions, first_backend))

    @property
    def num_groups(self) -> int:
        return len(self._backends)

    @property
    def workspace_bytes(self) -> int:
        return self._backends[0].workspace_bytes

    @property
    def applies_rope(self) -> bool:
        return all(backend.applies_rope for backend in self._backends)

    def plan(self, batch: AttentionBatch) -> None:
        for group, backend in enumerate(self._backends):
            backend.plan(self._batch_of_group(batch, group))

    def reserve_graph_buffers(self, max_seqs: int, max_blocks: int) -> None:
        for backend in self._backends:
            backend.reserve_graph_buffers(max_seqs, max_blocks)

    @property
    def finds_runs(self) -> bool:
        return any(backend.finds_runs for backend in self._backends)

    def plan_for_graph(
        self, batch: AttentionBatch, num_rows: int, *, captures_runs: bool = False
    ) -> bool:
        has_runs = [
            backend.plan_for_graph(
                self._batch_of_group(batch, group),
                num_rows,
                captures_runs=captures_runs,
            )
            for group, backend in enumerate(self._backends)
        ]
        return any(has_runs)

    def _batch_of_group(self, batch: AttentionBatch, group: int) -> AttentionBatch:
        """The batch with the block tables and slots of one group."""
        block_size = self.pool.layout.block_size
        query_lens = batch.query_lens
        tables = np.ascontiguousarray(batch.block_tables[:, group :: self.num_groups])
        rows = np.arange(len(query_lens))
        if batch.num_tokens == batch.num_seqs:  # each sequence computes one token
            positions = batch.context_lens.astype(np.int64) - 1
        else:
            rows = np.repeat(rows, query_lens)
            ends = np.cumsum(query_lens, dtype=np.int64)
            starts = np.repeat(batch.context_lens - ends, query_lens)
            positions = np.arange(len(rows)) + starts
        # The slots of padding rows are in the null block, which has the number 0.
        slots = batch.slot_mapping % block_size
        blocks = tables[rows, positions // block_size].astype(np.int64)
        slots[: len(rows)] += blocks * block_size
        return AttentionBatch(query_lens, batch.context_lens, tables, slots)

    def forward(self, layer: int, *args: Any, **options: Any) -> Tensor:
        group, pool_layer = self._pool_layers[layer]
        return self._backends[group].forward(pool_layer, *args, **options)
