"""Attention of a rank that stores a part of every sequence's tokens.

This is decode context parallelism (DCP). The ranks of a group hold the same KV heads
and share the tokens (kvcache/stripe.py).

A decode step has few queries, so ranks exchange the queries:

1. Every rank gathers the query heads of the whole group.
2. It attends with all these heads over its own tokens.
3. It sends each rank the partial results of that rank's heads.
4. Each rank merges the partial results that it received, by their log-sum-exps.

"Helix Parallelism" (arXiv:2507.07120) uses the same exchange.

A prompt has about as many queries as keys, and fewer key heads than query heads, so
ranks exchange the keys and values. Each rank collects the cached blocks of the prompt's
context in a separate pool, `scratch`. The rank then attends over `scratch` with its own
query heads, as without context parallelism.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention.base import AttentionBackend, AttentionBatch, Int32s, RopeNormArgs
from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.stripe import IntArray, Stripe


class ContextGroup(Protocol):
    """The ranks among which the tokens of every sequence are divided."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns [size, ...] on every rank: the `tensor` [...] of each rank."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends `tensor[i]` to rank i; returns [size, ...], a part from each rank."""


# Makes a backend from a pool and a number of query heads.
MakeBackend = Callable[[KVPool, int], AttentionBackend]

# Maximum number of bytes of scratch that one exchange fills. An exchange takes about
# four times as much temporary memory, which must be left free when the KV pool is
# sized. With this maximum, the temporary memory does not grow with the context.
_EXCHANGED_BYTES: Final = 32 * 2**20


@dataclass(frozen=True, eq=False)
class _Prompts:
    """A group of a step's prompts with contexts that fit into scratch together.

    Attributes:
        rows: The group's rows of the step.
        batch: The group's sequences, with block tables and slots of scratch.
        cached_blocks: int64 [n], the blocks of this rank's pool that hold the group's
            cached context. The other ranks use the same block ids.
        targets: int64 [size, n]; row r has the blocks of scratch into which the cached
            blocks of rank r are copied.
    """

    rows: slice
    batch: AttentionBatch
    cached_blocks: Tensor
    targets: Tensor


class ContextParallelBackend(AttentionBackend):
    """Attention of a rank of a DCP group; see AttentionBackend.

    A block of a batch that is passed to `plan` has `stripe.tokens_per_block` tokens,
    counted over all ranks.

    Args:
        stripe: The tokens of a sequence that this rank stores in `pool`.
        group: The ranks that share every sequence's tokens.
        pool: This rank's KV, with all KV heads of the group.
        make: Makes the two backends that compute attention: one over `pool` for decode
            rows, and one over `scratch` for prompts.
        num_q_heads: Query heads of this rank.
        scratch_tokens: Capacity of scratch in context tokens; at least the longest
            sequence.
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
        group_heads = num_q_heads * group.size
        # The query heads of each rank read either several KV heads that no other rank
        # reads, or one KV head that several ranks read.
        q_per_kv_head = group_heads // pool.layout.num_heads
        first_heads = np.arange(group.size) * num_q_heads // q_per_kv_head
        head_offsets = np.arange(max(1, num_q_heads // q_per_kv_head))
        scratch_blocks = -(-scratch_tokens // stripe.tokens_per_block) * stripe.size
        self.scratch = KVPool(
            KVLayout(
                order="LBCHND",
                num_blocks=1 + scratch_blocks,
                num_heads=len(head_offsets),
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
        self._local_pool = pool
        # [size, heads of a rank]
        self._heads_by_rank = _upload(first_heads[:, None] + head_offsets, pool.device)
        self._decode_backend = make(pool, group_heads)
        self._decode_backend.require_lse()
        self._prefill_backend = make(self.scratch, num_q_heads)
        self._num_decodes = 0
        self._prompts: list[_Prompts] = []
        self._is_absent = torch.empty(0, device=pool.device)
        # Three tensors, each int64 [n]: the rows of prompts that this rank stores, the
        # rows' blocks, and the rows' offsets in the blocks.
        self._stored = [torch.empty(0, dtype=torch.int64)] * 3

    @property
    def workspace_bytes(self) -> int:
        return (
            self._decode_backend.workspace_bytes + self._prefill_backend.workspace_bytes
        )

    # -- plans

    def plan(self, batch: AttentionBatch) -> None:
        num_decodes = batch.num_leading_decodes
        self._num_decodes = num_decodes
        if num_decodes:
            decodes = batch.select_sequences(0, num_decodes)
            self._decode_backend.plan(self._local_batch(decodes))
            is_absent = self._absent_sequences(batch.context_lens[:num_decodes])
            self._is_absent = is_absent.to(self.pool.device, non_blocking=True)
        self._plan_stores(batch)
        self._prompts = self._group_prompts(batch)
        if len(self._prompts) == 1:
            self._prefill_backend.plan(self._prompts[0].batch)

    def reserve_graph_buffers(self, max_seqs: int, max_blocks: int) -> None:
        self._decode_backend.reserve_graph_buffers(max_seqs, max_blocks)
        self._captured_absent = torch.zeros(
            max_seqs, dtype=torch.bool, device=self.pool.device
        )

    @property
    def finds_runs(self) -> bool:
        return self._decode_backend.finds_runs

    def plan_for_graph(
        self, batch: AttentionBatch, num_rows: int, *, captures_runs: bool = False
    ) -> bool:
        padded = batch.padded_to(num_rows, self._stripe.tokens_per_block)
        has_runs = self._decode_backend.plan_for_graph(
            self._local_batch(padded), num_rows, captures_runs=captures_runs
        )
        is_absent = self._absent_sequences(padded.context_lens)
        self._is_absent = self._captured_absent[:num_rows]
        self._is_absent.copy_(is_absent, non_blocking=True)
        self._num_decodes = num_rows
        self._prompts = []
        return has_runs

    def _absent_sequences(self, context_lens: Int32s) -> Tensor:
        """Returns for each sequence whether this rank stores none of its tokens.

        The result is bool [S], on the host.
        """
        return _to_host_tensor(
            self._stripe.num_local(context_lens) == 0, self.pool.device
        )

    def _local_batch(self, batch: AttentionBatch) -> AttentionBatch:
        """Returns the decode step `batch` over the tokens that this rank stores.

        Kernels need contexts of at least one token. A sequence without tokens on this
        rank gets a context of one token, and `_merge` ignores the result.
        """
        local_lens = self._stripe.num_local(batch.context_lens)
        return AttentionBatch(
            query_lens=batch.query_lens,
            context_lens=np.maximum(local_lens, 1).astype(np.int32),
            block_tables=batch.block_tables,
            slot_mapping=self._stripe.local_slots(batch.slot_mapping),
        )

    def _plan_stores(self, batch: AttentionBatch) -> None:
        """Sets the rows of prompts that `_store` writes to this rank's pool."""
        slots = self._stripe.local_slots(batch.slot_mapping)
        blocks, offsets = np.divmod(slots, self._stripe.block_size)
        rows = np.arange(len(slots))
        is_stored = (blocks != 0) & (rows >= self._num_decodes)
        self._stored = [
            _upload(array[is_stored], self.pool.device)
            for array in (rows, blocks, offsets)
        ]

    def _group_prompts(self, batch: AttentionBatch) -> list[_Prompts]:
        """Divides the step's prompts, in order, into groups that fit into scratch."""
        cached = batch.context_lens - batch.query_lens
        cached_blocks = -(-cached // self._stripe.tokens_per_block)
        context_blocks = -(-batch.context_lens // self._stripe.block_size)
        needed_blocks = np.maximum(cached_blocks * self._stripe.size, context_blocks)
        capacity = self.scratch.layout.num_blocks - 1
        groups = []
        first = self._num_decodes
        free_blocks = capacity
        for seq in range(first, batch.num_seqs):
            if needed_blocks[seq] > free_blocks:
                groups.append(
                    self._make_prompts(batch, first, seq, cached_blocks, needed_blocks)
                )
                first = seq
                free_blocks = capacity
            free_blocks -= needed_blocks[seq]
        if first < batch.num_seqs:
            last = batch.num_seqs
            groups.append(
                self._make_prompts(batch, first, last, cached_blocks, needed_blocks)
            )
        return groups

    def _make_prompts(
        self,
        batch: AttentionBatch,
        first: int,
        last: int,
        cached_blocks: Int32s,
        needed_blocks: Int32s,
    ) -> _Prompts:
        """Makes a group of sequences [first, last), which are consecutive in scratch.

        Args:
            cached_blocks: [S], blocks of cached context on each rank.
            needed_blocks: [S], blocks of scratch that each sequence needs.
        """
        size = self._stripe.size
        needed_blocks = needed_blocks[first:last]
        first_blocks = 1 + np.cumsum(needed_blocks) - needed_blocks
        tables = first_blocks[:, None] + np.arange(int(needed_blocks.max()))
        tables[np.arange(tables.shape[1]) >= needed_blocks[:, None]] = 0
        prompts = batch.select_sequences(first, last)
        counts = cached_blocks[first:last]
        sources = [
            table[:count]
            for table, count in zip(prompts.block_tables, counts, strict=True)
        ]
        targets = [
            first_block + np.arange(count) * size
            for first_block, count in zip(first_blocks, counts, strict=True)
        ]
        # A block of a table becomes `size` consecutive blocks of scratch: the parts of
        # all ranks, in the order of the ranks.
        targets_by_rank = np.concatenate(targets) + np.arange(size)[:, None]
        source_blocks = np.concatenate(sources).astype(np.int64)
        start = int(batch.query_lens[:first].sum())
        return _Prompts(
            rows=slice(start, start + prompts.num_tokens),
            batch=AttentionBatch(
                query_lens=prompts.query_lens,
                context_lens=prompts.context_lens,
                block_tables=tables.astype(np.int32),
                slot_mapping=self._scratch_slots(prompts, first_blocks),
            ),
            cached_blocks=_upload(source_blocks, self.pool.device),
            targets=_upload(targets_by_rank, self.pool.device),
        )

    def _scratch_slots(
        self, prompts: AttentionBatch, first_blocks: IntArray
    ) -> IntArray:
        """Returns the slots in scratch of the prompts' query tokens.

        A sequence's blocks are consecutive in scratch, and so are its slots.

        Args:
            first_blocks: The first block of each prompt in scratch.
        """
        num_preceding = prompts.context_lens - np.cumsum(prompts.query_lens)
        first_slots = first_blocks * self._stripe.block_size + num_preceding
        num_tokens = int(prompts.query_lens.sum())
        return np.repeat(first_slots, prompts.query_lens) + np.arange(num_tokens)

    # -- attention

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rope_norm: RopeNormArgs | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        assert rope_norm is None and lse is None
        out = q.new_empty(q.shape)
        count = self._num_decodes
        if count:
            queries = self._gather_heads(q[:count])
            part_lse = queries.new_empty(queries.shape[:2], dtype=torch.float32)
            part = self._decode_backend.forward(
                layer, queries, k[:count], v[:count], lse=part_lse
            )
            out[:count] = self._merge(part, part_lse)
        for rows in self._filled_prompts(layer):
            rank_k = self._heads_of_rank(k[rows])
            rank_v = self._heads_of_rank(v[rows])
            out[rows] = self._prefill_backend.forward(0, q[rows], rank_k, rank_v)
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
        count = self._num_decodes
        if count:
            latent_dim = q_latent.shape[-1]
            q = torch.cat([q_latent[:count], q_rope[:count]], -1)
            queries = self._gather_heads(q)
            part_lse = queries.new_empty(queries.shape[:2], dtype=torch.float32)
            part = self._decode_backend.forward_latent(
                layer,
                queries[..., :latent_dim],
                queries[..., latent_dim:],
                latent[:count],
                lse=part_lse,
            )
            out[:count] = self._merge(part, part_lse)
        for rows in self._filled_prompts(layer):
            out[rows] = self._prefill_backend.forward_latent(
                0, q_latent[rows], q_rope[rows], latent[rows]
            )
        self._store(layer, (latent[:, None],))
        return out

    def _gather_heads(self, q: Tensor) -> Tensor:
        """Gathers the heads [n, heads, D] of all ranks: [n, size * heads, D]."""
        return self._group.all_gather(q.contiguous()).transpose(0, 1).flatten(1, 2)

    def _merge(self, out: Tensor, lse: Tensor) -> Tensor:
        """Merges partial results of the group into the results of this rank's heads.

        Args:
            out: [n, size * heads, D], the outputs of the group's heads over this rank's
                tokens.
            lse: float32 [n, size * heads], the log-sum-exps of `out`.

        Returns:
            [n, heads, D], the outputs of this rank's heads over the tokens of all
            ranks.
        """
        num_rows = len(out)
        size = self._group.size
        if out.device.type == "cuda" and out.element_size() == 2:
            # Imported here, because it needs Triton, which only GPU machines have.
            from attention.kernels import dcp

            packed = dcp.pack(out.contiguous(), lse, self._is_absent, size)
            return dcp.merge(self._group.all_to_all(packed))
        lse = lse.masked_fill(self._is_absent[:, None], float("-inf"))
        # The parts are sent in float32, so that the result is rounded only once.
        parts = torch.cat([out.float(), lse.unsqueeze(-1)], -1)
        parts = parts.view(num_rows, size, self.num_q_heads, -1).transpose(0, 1)
        parts = self._group.all_to_all(parts.contiguous())
        outs = parts[..., :-1]
        lses = parts[..., -1:]
        # At least one rank has tokens, so not all log-sum-exps are -inf.
        weights = torch.softmax(lses, dim=0)
        # The output of a rank without tokens may be NaN, and 0 * NaN would not be 0.
        return torch.where(weights > 0, outs * weights, 0).sum(0).to(out.dtype)

    def _filled_prompts(self, layer: int) -> Iterator[slice]:
        """Plans each group of prompts and copies its cached context to scratch.

        Yields:
            For each group, its rows of the step, once scratch holds the group's cached
            context. The next group replaces that context.
        """
        for prompts in self._prompts:
            if len(self._prompts) > 1:
                self._prefill_backend.plan(prompts.batch)
            self._exchange(layer, prompts)
            yield prompts.rows

    def _exchange(self, layer: int, prompts: _Prompts) -> None:
        """Copies one layer's cached blocks from all ranks of the group to scratch.

        FP8 elements are sent without conversion. Each rank receives only the heads that
        its queries read.
        """
        components = range(self._local_pool.layout.num_components)
        scales = [self._local_pool.scale(layer, component) for component in components]
        self.scratch.scales = tuple(scales)
        bytes_per_block = self._stripe.size * self.scratch.layout.block_bytes
        max_blocks = max(1, _EXCHANGED_BYTES // bytes_per_block)
        cache = fp8.addressable(self._local_pool.view(layer))
        scratch = fp8.addressable(self.scratch.view(0))
        for start in range(0, len(prompts.cached_blocks), max_blocks):
            chunk = slice(start, start + max_blocks)
            blocks = cache[prompts.cached_blocks[chunk]]
            # [n, C, size, H, N, D] -> [size, n, C, H, N, D]
            parts = blocks[:, :, self._heads_by_rank].permute(2, 0, 1, 3, 4, 5)
            received = self._group.all_to_all(parts.contiguous())
            scratch[prompts.targets[:, chunk]] = received

    def _heads_of_rank(self, kv: Tensor) -> Tensor:
        """Selects from the group's KV heads [n, H, D] those that this rank reads."""
        first = self._group.rank * self.num_q_heads * kv.shape[1]
        first //= self._group.size * self.num_q_heads
        return kv[:, first : first + self.num_kv_heads]

    def _store(self, layer: int, components: tuple[Tensor, ...]) -> None:
        """Stores the KV of those prompt tokens that belong to this rank.

        Args:
            components: Keys and values, or latents, of the step: each [T, H, D].
        """
        rows, blocks, offsets = self._stored
        if not self._prompts or not len(rows):
            return
        for component, new in enumerate(components):
            target = self._local_pool.component(layer, component)
            scale = self._local_pool.scale(layer, component)
            stored = fp8.to_stored(new[rows], target.dtype, scale)
            fp8.addressable(target)[blocks, :, offsets] = fp8.addressable(stored)


def _to_host_tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns a host tensor over the memory of `array`.

    If `device` is a GPU, the tensor is a copy in pinned memory instead, so that uploads
    are asynchronous.
    """
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def _upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return _to_host_tensor(array, device).to(device, non_blocking=True)
