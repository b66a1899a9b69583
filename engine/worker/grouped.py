"""Attention for layers in groups that have blocks of their own (kvcache/groups.py).

Each group has a backend over the same pool, with the tables and slots of that group.
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
    """Batches have the tables of all groups side by side, and the slots of the first
    group.

    Args:
        group_layers: the model's layers in each group, in the order of their places.
        layers: how each of the model's layers attends.
        make: makes the backend of a group. Its arguments are how the layers in the
            group's places attend, and the backend of another group.
        sizes: arguments of AttentionBackend.
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
        self._places: dict[int, tuple[int, int]] = {}  # group and place of each layer
        self._backends: list[AttentionBackend] = []
        num_places = pool.layout.num_layers
        for group, members in enumerate(group_layers):
            for place, layer in enumerate(members):
                self._places[layer] = (group, place)
            # A group with fewer layers repeats its first one in the unused places.
            unused = [members[0]] * (num_places - len(members))
            first_backend = self._backends[0] if self._backends else None
            attentions = [layers[layer] for layer in (*members, *unused)]
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
            backend.plan(self._of_group(batch, group))

    def reserve_graph_buffers(self, max_seqs: int, max_blocks: int) -> None:
        for backend in self._backends:
            backend.reserve_graph_buffers(max_seqs, max_blocks)

    def plan_for_graph(self, batch: AttentionBatch, num_rows: int) -> None:
        for group, backend in enumerate(self._backends):
            backend.plan_for_graph(self._of_group(batch, group), num_rows)

    def _of_group(self, batch: AttentionBatch, group: int) -> AttentionBatch:
        block_size = self.pool.layout.block_size
        query_lens = batch.query_lens
        tables = np.ascontiguousarray(batch.block_tables[:, group :: self.num_groups])
        rows = np.repeat(np.arange(len(query_lens)), query_lens)
        ends = np.cumsum(query_lens, dtype=np.int64)
        starts = np.repeat(batch.context_lens - ends, query_lens)
        positions = np.arange(len(rows)) + starts
        # The slots of padding are in the null block, whose number is 0.
        slots = batch.slot_mapping % block_size
        blocks = tables[rows, positions // block_size].astype(np.int64)
        slots[: len(rows)] += blocks * block_size
        return AttentionBatch(query_lens, batch.context_lens, tables, slots)

    def forward(self, layer: int, *args: Any, **options: Any) -> Tensor:
        group, place = self._places[layer]
        return self._backends[group].forward(place, *args, **options)
