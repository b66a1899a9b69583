"""Attention of a rank that keeps a part of every sequence's tokens: decode context parallelism.

The ranks of a group hold the same KV heads and share the tokens (kvcache/stripe.py). In a decode
step queries are few, so they are exchanged: every rank gathers the query heads of the
whole group, attends with them over its own tokens, and sends each rank its heads' partial results,
which that one merges by their log-sum-exps ("Helix Parallelism", arXiv:2507.07120, has the same
exchange). A prompt has as many queries as keys, so there the keys are exchanged: the cached blocks
of its context are collected in `scratch`, where the rank attends with its own heads, as without
context parallelism.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention.base import AttentionBackend, AttentionBatch, Int32s, Turn
from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.stripe import IntArray, Stripe


class ContextGroup(Protocol):
    """The ranks that share every sequence's tokens."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] of each rank -> [size, ...] on every rank."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """[size, ...], a part for each rank -> [size, ...], the part for this one of each."""


MakeBackend = Callable[
    [KVPool, int], AttentionBackend
]  # from a pool and a number of query heads

# Of scratch, put together at once: so that a long context needs no memory besides, which sizing a
# KV pool would have to leave free. Some four times as much is taken in passing.
_EXCHANGED_BYTES: Final = 32 * 2**20


@dataclass(frozen=True, eq=False)
class _Prompts:
    """Sequences of a step whose contexts fit into scratch together."""

    rows: slice  # of the step
    batch: AttentionBatch  # over scratch
    cached_blocks: Tensor  # i64 [n] blocks of this rank's pool
    targets: Tensor  # i64 [size, n] blocks of scratch, by the rank they come from


class ContextParallelBackend(AttentionBackend):
    """See AttentionBackend. Batches come as if one pool held blocks of `stripe.tokens_per_block`.

    Args:
        stripe: which tokens `pool` holds.
        pool: this rank's KV, of all KV heads of the group.
        make: makes the backends that do the work, over `pool` and over `scratch`.
        num_q_heads: query heads of this rank.
        scratch_tokens: context of the prompts that are attended to at once; that of the longest
            sequence, or more.
    """

    def __init__(
        self,
        stripe: Stripe,
        group: ContextGroup,
        pool: KVPool,
        make: MakeBackend,
        *,
        num_q_heads: int,
        head_dim: int,
        scale: float,
        scratch_tokens: int,
    ) -> None:
        group_heads, kv_heads = num_q_heads * group.size, pool.layout.num_heads
        # The KV heads that a rank's own query heads read: a share of the group's, or a shared one.
        per_kv_head = group_heads // kv_heads
        firsts = np.arange(group.size) * num_q_heads // per_kv_head
        needed = np.arange(max(1, num_q_heads // per_kv_head))
        self.scratch = KVPool(
            KVLayout(
                order="LBCHND",
                num_blocks=1
                + -(-scratch_tokens // stripe.tokens_per_block) * stripe.size,
                num_heads=len(needed),
                num_layers=1,
                num_components=pool.layout.num_components,
                block_size=stripe.block_size,
                head_dim=pool.layout.head_dim,
                dtype=pool.layout.dtype,
            ),
            pool.device,
        )
        super().__init__(
            self.scratch, num_q_heads=num_q_heads, head_dim=head_dim, scale=scale
        )
        self._stripe = stripe
        self._group = group
        self._own = pool
        self._heads = _upload(firsts[:, None] + needed, pool.device)  # [size, needed]
        self._shared = make(pool, group_heads)
        self._shared.always_with_lse()
        self._alone = make(self.scratch, num_q_heads)
        self._num_decodes = 0
        self._prompts: list[_Prompts] = []
        self._absent_rows = torch.empty(0, device=pool.device)
        # Rows of prompts that this rank keeps, their blocks, and offsets in these: all i64 [n].
        self._stored = [torch.empty(0, dtype=torch.int64)] * 3

    @property
    def workspace_bytes(self) -> int:
        return self._shared.workspace_bytes + self._alone.workspace_bytes

    # -- plans -------------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        self._num_decodes = count = batch.num_leading_decodes
        if count:
            decodes = self._local(batch.part(0, count))
            self._shared.plan(decodes)
            absent = self._absent(batch.context_lens[:count])
            self._absent_rows = absent.to(self.pool.device, non_blocking=True)
        self._plan_stores(batch)
        self._prompts = self._group_prompts(batch)
        if len(self._prompts) == 1:
            self._alone.plan(self._prompts[0].batch)

    def reserve_captured(self, max_seqs: int, max_blocks: int) -> None:
        self._shared.reserve_captured(max_seqs, max_blocks)
        self._captured_absent = torch.zeros(
            max_seqs, dtype=torch.bool, device=self.pool.device
        )

    def plan_captured(self, batch: AttentionBatch, num_rows: int) -> None:
        padded = batch.padded_to(num_rows, self._stripe.tokens_per_block)
        self._shared.plan_captured(self._local(padded), num_rows)
        self._absent_rows = self._captured_absent[:num_rows]
        self._absent_rows.copy_(self._absent(padded.context_lens), non_blocking=True)
        self._num_decodes, self._prompts = num_rows, []

    def _absent(self, context_lens: Int32s) -> Tensor:
        """bool [S], where the device can take it: whether none of a sequence's tokens is here."""
        return _host(self._stripe.num_local(context_lens) == 0, self.pool.device)

    def _local(self, batch: AttentionBatch) -> AttentionBatch:
        """Single queries over the tokens that are here; over one that counts for nothing where
        none is, as kernels want some."""
        local_lens = self._stripe.num_local(batch.context_lens)
        return AttentionBatch(
            query_lens=batch.query_lens,
            context_lens=np.maximum(local_lens, 1).astype(np.int32),
            block_tables=batch.block_tables,
            slot_mapping=self._stripe.local_slots(batch.slot_mapping),
        )

    def _plan_stores(self, batch: AttentionBatch) -> None:
        slots = self._stripe.local_slots(batch.slot_mapping)
        blocks, offsets = np.divmod(slots, self._stripe.block_size)
        rows = np.arange(len(slots))
        kept = (blocks != 0) & (rows >= self._num_decodes)
        self._stored = [
            _upload(x[kept], self.pool.device) for x in (rows, blocks, offsets)
        ]

    def _group_prompts(self, batch: AttentionBatch) -> list[_Prompts]:
        """The sequences after the decodes, in order, as many at once as scratch holds."""
        cached = batch.context_lens - batch.query_lens
        cached_blocks = -(-cached // self._stripe.tokens_per_block)
        filled = -(-batch.context_lens // self._stripe.block_size)
        room = np.maximum(cached_blocks * self._stripe.size, filled)
        groups, first, free = [], self._num_decodes, self.scratch.layout.num_blocks - 1
        for seq in range(first, batch.num_seqs):
            if room[seq] > free:
                groups.append(self._prompts_of(batch, first, seq, cached_blocks, room))
                first, free = seq, self.scratch.layout.num_blocks - 1
            free -= room[seq]
        if first < batch.num_seqs:
            groups.append(
                self._prompts_of(batch, first, batch.num_seqs, cached_blocks, room)
            )
        return groups

    def _prompts_of(
        self,
        batch: AttentionBatch,
        first: int,
        last: int,
        cached_blocks: Int32s,
        room: Int32s,
    ) -> _Prompts:
        """Sequences [first, last) laid out in scratch one after the other."""
        room = room[first:last]
        begins = 1 + np.cumsum(room) - room
        tables = begins[:, None] + np.arange(int(room.max()))
        tables[np.arange(tables.shape[1]) >= room[:, None]] = 0
        part = batch.part(first, last)
        counts, size = cached_blocks[first:last], self._stripe.size
        cached = [table[:n] for table, n in zip(part.block_tables, counts, strict=True)]
        targets = [b + np.arange(n) * size for b, n in zip(begins, counts, strict=True)]
        start = int(batch.query_lens[:first].sum())
        return _Prompts(
            rows=slice(start, start + part.num_tokens),
            batch=AttentionBatch(
                query_lens=part.query_lens,
                context_lens=part.context_lens,
                block_tables=tables.astype(np.int32),
                slot_mapping=self._scratch_slots(part, begins),
            ),
            cached_blocks=_upload(
                np.concatenate(cached).astype(np.int64), self.pool.device
            ),
            targets=_upload(
                np.concatenate(targets) + np.arange(size)[:, None], self.pool.device
            ),
        )

    def _scratch_slots(self, part: AttentionBatch, begins: IntArray) -> IntArray:
        """A sequence's blocks follow each other in scratch, so its tokens do."""
        before = part.context_lens - np.cumsum(part.query_lens)
        firsts = begins * self._stripe.block_size + before
        return np.repeat(firsts, part.query_lens) + np.arange(
            int(part.query_lens.sum())
        )

    # -- attention ---------------------------------------------------------------------------

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        turn: Turn | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        assert turn is None and lse is None
        out = q.new_empty(q.shape)
        if count := self._num_decodes:
            queries = self._gather_heads(q[:count])
            found = queries.new_empty(queries.shape[:2], dtype=torch.float32)
            part = self._shared.forward(layer, queries, k[:count], v[:count], lse=found)
            out[:count] = self._merge(part, found)
        for rows in self._filled(layer):
            own_k, own_v = (self._own_heads(x[rows]) for x in (k, v))
            out[rows] = self._alone.forward(0, q[rows], own_k, own_v)
        self._store(layer, (k, v))
        return out

    def forward_latent(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        assert lse is None
        out = q_latent.new_empty(q_latent.shape)
        if count := self._num_decodes:
            rank = q_latent.shape[-1]
            queries = self._gather_heads(
                torch.cat([q_latent[:count], q_rope[:count]], -1)
            )
            found = queries.new_empty(queries.shape[:2], dtype=torch.float32)
            part = self._shared.forward_latent(
                layer,
                queries[..., :rank],
                queries[..., rank:],
                latent[:count],
                lse=found,
            )
            out[:count] = self._merge(part, found)
        for rows in self._filled(layer):
            out[rows] = self._alone.forward_latent(
                0, q_latent[rows], q_rope[rows], latent[rows]
            )
        self._store(layer, (latent[:, None],))
        return out

    def _gather_heads(self, q: Tensor) -> Tensor:
        """[n, heads, D] of this rank -> [n, size * heads, D] of the group."""
        return self._group.all_gather(q.contiguous()).transpose(0, 1).flatten(1, 2)

    def _merge(self, out: Tensor, lse: Tensor) -> Tensor:
        """The group's heads [n, size * heads, D] over this rank's tokens -> this rank's heads
        [n, heads, D] over all tokens."""
        num_rows, size = len(out), self._group.size
        if out.device.type == "cuda" and out.element_size() == 2:
            from attention.kernels import (
                dcp,  # needs Triton, which only GPU machines have
            )

            packed = dcp.pack(out.contiguous(), lse, self._absent_rows, size)
            return dcp.merge(self._group.all_to_all(packed))
        lse = lse.masked_fill(self._absent_rows[:, None], float("-inf"))
        parts = torch.cat(
            [out.float(), lse.unsqueeze(-1)], -1
        )  # as float32: merged only once
        parts = parts.view(num_rows, size, self.num_q_heads, -1).transpose(0, 1)
        parts = self._group.all_to_all(parts.contiguous())
        outs, lses = parts[..., :-1], parts[..., -1:]
        weights = torch.softmax(lses, dim=0)  # some rank has tokens: not all are -inf
        # Where nothing was read, the output may be anything, and 0 * NaN would not be 0.
        return torch.where(weights > 0, outs * weights, 0).sum(0).to(out.dtype)

    def _filled(self, layer: int) -> Iterator[slice]:
        """Rows of the step's prompts, whose cached context is in scratch and planned then."""
        for prompts in self._prompts:
            if len(self._prompts) > 1:
                self._alone.plan(prompts.batch)
            self._exchange(layer, prompts)
            yield prompts.rows

    def _exchange(self, layer: int, prompts: _Prompts) -> None:
        """Puts together the cached blocks that the group's ranks keep, of one layer, as they are
        stored: to each rank the heads that its queries read."""
        components = range(self._own.layout.num_components)
        self.scratch.scales = tuple(self._own.scale(layer, c) for c in components)
        at_once = max(
            1, _EXCHANGED_BYTES // (self._stripe.size * self.scratch.layout.block_bytes)
        )
        for start in range(0, len(prompts.cached_blocks), at_once):
            some = slice(start, start + at_once)
            blocks = fp8.addressable(self._own.view(layer))[prompts.cached_blocks[some]]
            parts = blocks[:, :, self._heads].permute(
                2, 0, 1, 3, 4, 5
            )  # of [n, C, H, N, D]
            found = self._group.all_to_all(parts.contiguous())
            fp8.addressable(self.scratch.view(0))[prompts.targets[:, some]] = found

    def _own_heads(self, kv: Tensor) -> Tensor:
        """[n, H, D] of the group's KV heads -> those that this rank's queries read."""
        first = self._group.rank * self.num_q_heads * kv.shape[1]
        first //= self._group.size * self.num_q_heads
        return kv[:, first : first + self.num_kv_heads]

    def _store(self, layer: int, components: tuple[Tensor, ...]) -> None:
        """Keeps the prompt rows' [T, H, D] that belong here."""
        rows, blocks, offsets = self._stored
        if self._prompts and len(rows):
            for component, new in enumerate(components):
                target = self._own.component(layer, component)
                scale = self._own.scale(layer, component)
                stored = fp8.stored_as(new[rows], target.dtype, scale)
                fp8.addressable(target)[blocks, :, offsets] = fp8.addressable(stored)


def _host(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """What a GPU can take without anybody waiting."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def _upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return _host(array, device).to(device, non_blocking=True)
