"""The attention backend in plain torch, for pools of any layout, on CPU and GPU.

The pool is viewed as a matrix of rows of head_dim elements (attention/torch_plan.py),
so layouts and block sizes change nothing but the row indices. All sequences with a
single query token are computed together (attention/torch_decode.py). Each chunk of a
prompt is computed separately: attention over the chunk's own tokens and attention over
the cached context are merged afterwards. With a window or a soft cap, one call computes
attention over both. Layers of one kind share a plan.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionKind,
    RopeNormArgs,
    scale_for_sinks,
)
from attention.torch_decode import GatherDecode, SparseDecode, sparse_decode_works
from attention.torch_dense import causal_attention, dense_attention, merge_attention
from attention.torch_plan import RowMap, decode_groups, prefill_chunks
from kvcache import fp8
from kvcache.pool import KVPool

# SparseDecode is faster than GatherDecode up to this many query heads per KV head.
_MAX_SPARSE_GROUP = 4


class _Cache(NamedTuple):
    """One layer's keys and values, as views of the pool's rows [rows, D].

    A row index of RowMap is valid in the views of all layers. For MLA, which has one
    component, both fields are the same tensor.
    """

    k_rows: Tensor
    v_rows: Tensor


@dataclass(frozen=True, eq=False)
class _Plan:
    """The plan of a step for all layers of one kind.

    Attributes:
        chunks: For each chunk of a prompt, its rows of the step, and the pool's rows of
            the cached context that the chunk sees, or None if it sees none.
        decode: Attends for the decode rows.
        decode_rows: int64, the step's decode rows in the order of `decode`'s plan;
            None: the step has no decode rows.
        is_decode_in_order: Whether the step has decode rows only, and `decode`'s plan
            has the order of the step.
    """

    kind: AttentionKind
    chunks: list[tuple[slice, Tensor | None]]
    decode: SparseDecode | GatherDecode
    decode_rows: Tensor | None
    is_decode_in_order: bool


class TorchBackend(AttentionBackend):
    """See AttentionBackend.

    Args:
        dtype: The queries' dtype; by default the pool's.
        sizes: num_q_heads, head_dim, scale and layers, as in AttentionBackend.
    """

    def __init__(
        self, pool: KVPool, *, dtype: torch.dtype | None = None, **sizes: Any
    ) -> None:
        super().__init__(pool, **sizes)
        self._dtype = dtype or pool.tensor.dtype
        self._device = str(pool.tensor.device)
        self._rows = RowMap(pool.layout)
        self._caches = [self._cache(layer) for layer in range(pool.layout.num_layers)]
        self._decodes = {kind: self._make_decode(kind.soft_cap) for kind in self.kinds}
        self._plans: dict[AttentionKind, _Plan] = {}

    def _cache(self, layer: int) -> _Cache:
        matrix = fp8.addressable(self.pool.tensor).view(-1, self.head_dim)

        def rows_of(component: int) -> Tensor:
            start = self._rows.shift(layer, component)
            return matrix.narrow(0, start, self._rows.num_shared_rows)

        keys = rows_of(0)
        values = keys if self.pool.layout.num_components == 1 else rows_of(1)
        return _Cache(keys, values)

    def _make_decode(self, soft_cap: float) -> SparseDecode | GatherDecode:
        has_few_heads = self.num_q_heads <= _MAX_SPARSE_GROUP * self.num_kv_heads
        is_float32 = self._dtype == self.pool.tensor.dtype == torch.float32
        is_cpu = self._device == "cpu"
        if has_few_heads and is_float32 and is_cpu and sparse_decode_works():
            return SparseDecode(
                num_q_heads=self.num_q_heads,
                num_shared_rows=self._rows.num_shared_rows,
                soft_cap=soft_cap,
            )
        return GatherDecode(
            head_dim=self.head_dim,
            dtype=self._dtype,
            device=self._device,
            soft_cap=soft_cap,
        )

    def plan(self, batch: AttentionBatch) -> None:
        self._slots = self._to_device(self._rows.of_slots(batch.slot_mapping))
        self._num_tokens = batch.num_tokens
        self._plans = {kind: self._plan_kind(kind, batch) for kind in self.kinds}

    def _plan_kind(self, kind: AttentionKind, batch: AttentionBatch) -> _Plan:
        decode = self._decodes[kind]
        decode_rows = None
        is_in_order = False
        chunks = [
            (chunk, self._to_device(rows) if rows.size else None)
            for chunk, rows in prefill_chunks(batch, self._rows, kind.window)
        ]
        groups = decode_groups(batch, self._rows, decode.grouping, kind.window)
        if groups:
            rows = np.concatenate([group.query_rows for group in groups])
            decode_rows = self._to_device(rows)
            decode.plan(groups)
            is_in_order = np.array_equal(rows, np.arange(batch.num_tokens))
        return _Plan(kind, chunks, decode, decode_rows, is_in_order)

    def _to_device(
        self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ) -> Tensor:
        return torch.from_numpy(array.reshape(-1)).to(self._device)

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
        assert rope_norm is None
        assert q.shape == (self._num_tokens, self.num_q_heads, self.head_dim)
        cache = self._caches[layer]
        k_scale = self.pool.scale(layer, 0)
        v_scale = self.pool.scale(layer, -1)
        k = self._write(cache.k_rows, k, k_scale)
        v = k if cache.v_rows is cache.k_rows else self._write(cache.v_rows, v, v_scale)
        kind, sinks = self.layers[layer]
        if lse is None and sinks is not None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        scale = self.scale * k_scale
        out = self._attend(self._plans[kind], cache, q, k, v, scale=scale, lse=lse)
        if lse is not None and sinks is not None:
            scale_for_sinks(out, lse, sinks)
        return out if v_scale == 1.0 else out.mul_(v_scale)

    def forward_latent(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        # With the up-projections absorbed, all heads share the cached row as their key
        # and, except for its rope part, as their value.
        q = torch.cat([q_latent, q_rope], -1)
        row = latent.unsqueeze(1)
        return self.forward(layer, q, row, row, lse=lse)[..., : q_latent.shape[-1]]

    def _attend(
        self,
        plan: _Plan,
        cache: _Cache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        lse: Tensor | None,
    ) -> Tensor:
        """Attends for all rows of the step.

        The caller multiplies the returned output by the values' FP8 scale.
        """
        decode = plan.decode
        if plan.is_decode_in_order:
            return decode.attend(q, cache.k_rows, cache.v_rows, scale=scale, lse=lse)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if lse is not None:
            lse.zero_()
        rows = plan.decode_rows
        if rows is not None:
            row_lse = None if lse is None else lse[rows]
            row_out = decode.attend(
                q[rows], cache.k_rows, cache.v_rows, scale=scale, lse=row_lse
            )
            out.index_copy_(0, rows, row_out)
            if lse is not None and row_lse is not None:
                lse.index_copy_(0, rows, row_lse)
        for chunk, context_rows in plan.chunks:
            chunk_out, chunk_lse = self._attend_chunk(
                plan.kind, q[chunk], k[chunk], v[chunk], cache, context_rows, scale
            )
            out[chunk] = chunk_out.flatten(0, 1).transpose(0, 1)
            if lse is not None:
                lse[chunk] = chunk_lse.flatten(0, 1).transpose(0, 1)
        return out

    def _write(self, rows: Tensor, new: Tensor, scale: float) -> Tensor:
        """Stores the keys or values `new` [T, H, D] in the step's slots.

        Args:
            rows: The layer's view of the pool.
            scale: The FP8 scale; 1.0 for all other dtypes.

        Returns:
            The elements [T, H, D] as a later step reads them, without the FP8 scale.
        """
        flat = new.reshape(-1, self.head_dim)
        stored = fp8.to_stored(flat, self.pool.tensor.dtype, scale)
        rows.index_copy_(0, self._slots, fp8.addressable(stored))
        return stored.view(new.shape).to(self._dtype)

    def _attend_chunk(
        self,
        kind: AttentionKind,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: _Cache,
        context_rows: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attends for one chunk of a prompt.

        Returns:
            The output [H, Hq/H, chunk, D] and the log-sum-exp [H, Hq/H, chunk].
        """
        # Query heads are grouped by KV head: [chunk, H, Hq/H, D] becomes
        # [H, Hq/H, chunk, D].
        grouped = q.reshape(len(q), self.num_kv_heads, -1, self.head_dim)
        queries = grouped.permute(1, 2, 0, 3)

        parts = [(k.transpose(0, 1), v.transpose(0, 1))]
        if context_rows is not None:
            keys, values = (self._read(rows, context_rows) for rows in cache)
            parts.insert(0, (keys, values))
        if kind != AttentionKind():
            keys, values = (
                torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)
            )
            return causal_attention(queries, keys, values, scale=scale, kind=kind)

        def attend(
            keys: Tensor, values: Tensor, *, causal: bool
        ) -> tuple[Tensor, Tensor]:
            # [H, n, D] becomes [H, Hq/H, n, D]; query heads of a KV head share memory.
            group_size = queries.shape[1]
            expanded = (
                tensor.unsqueeze(1).expand(-1, group_size, -1, -1)
                for tensor in (keys, values)
            )
            return dense_attention(queries, *expanded, scale=scale, causal=causal)

        out, lse = attend(*parts[-1], causal=True)
        if len(parts) == 1:
            return out, lse
        return merge_attention(out, lse, *attend(*parts[0], causal=False))

    def _read(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Reads the rows `indices` [H * n] as [H, n, D] in the queries' dtype."""
        selected = fp8.from_stored(rows.index_select(0, indices), self._dtype)
        return selected.view(self.num_kv_heads, -1, self.head_dim)
