"""Layers in groups that have blocks of their own (kvcache/groups.py): a backend for each group over
the same pool, with the tables and slots of that group."""

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
    """Batches come with the tables of all groups side by side, and with slots of the first one.

    Args:
        dealt: the model's layers in each group, in the order of their places.
        layers: how each of the model's layers attends.
        make: makes the backend of a group, given how the layers in its places attend, and that of
            another group.
        sizes: as of AttentionBackend.
    """

    def __init__(
        self,
        pool: KVPool,
        dealt: Sequence[Sequence[int]],
        layers: Sequence[LayerAttention],
        make: MakeBackend,
        **sizes: Any,
    ) -> None:
        super().__init__(pool, **sizes)
        self._places = {
            layer: (group, place)
            for group, found in enumerate(dealt)
            for place, layer in enumerate(found)
        }
        size = pool.layout.num_layers
        self._backends: list[AttentionBackend] = []
        for found in dealt:
            filled = [*found, *[found[0]] * (size - len(found))]
            first = self._backends[0] if self._backends else None
            self._backends.append(make([layers[layer] for layer in filled], first))

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

    def reserve_captured(self, max_seqs: int, max_blocks: int) -> None:
        for backend in self._backends:
            backend.reserve_captured(max_seqs, max_blocks)

    def plan_captured(self, batch: AttentionBatch, num_rows: int) -> None:
        for group, backend in enumerate(self._backends):
            backend.plan_captured(self._of_group(batch, group), num_rows)

    def _of_group(self, batch: AttentionBatch, group: int) -> AttentionBatch:
        size, lens = self.pool.layout.block_size, batch.query_lens
        tables = np.ascontiguousarray(batch.block_tables[:, group :: self.num_groups])
        rows = np.repeat(np.arange(len(lens)), lens)
        ends = np.cumsum(lens, dtype=np.int64)
        positions = np.arange(len(rows)) + np.repeat(batch.context_lens - ends, lens)
        slots = (
            batch.slot_mapping % size
        )  # of padding that is all: it is in the null block
        slots[: len(rows)] += tables[rows, positions // size].astype(np.int64) * size
        return AttentionBatch(lens, batch.context_lens, tables, slots)

    def forward(self, layer: int, *args: Any, **options: Any) -> Tensor:
        group, place = self._places[layer]
        return self._backends[group].forward(place, *args, **options)
