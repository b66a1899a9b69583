"""The attention backend in plain torch: reads the paged pool of any layout, on CPU and GPU.

The pool is seen as a matrix of rows of head_dim elements (attention/torch_plan.py), so layouts and
block sizes differ in indices only. Rows of one query token take a decode path
(attention/torch_decode.py), all of them together; each chunk of a prompt is attended to on its
own, the new tokens causally and the cached context, if any, as a second part that is merged in;
where there is a window or a soft cap, both at once. Layers of one kind share a plan.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.base import AttentionBackend, AttentionBatch, Kind, Turn, leave_to_sinks
from attention.torch_decode import GatherDecode, SparseDecode, sparse_decode_works
from attention.torch_dense import causal_attention, dense_attention, merge_attention
from attention.torch_plan import RowMap, decode_groups, prefill_chunks
from kvcache import fp8
from kvcache.pool import KVPool

_MAX_SPARSE_GROUP = (
    4  # query heads per KV head up to which reading in place beats a copy
)


class _Cache(NamedTuple):
    """One layer's keys and values: the pool's rows shifted to them (MLA: twice the same)."""

    k_rows: Tensor
    v_rows: Tensor


@dataclass(frozen=True, eq=False)
class _Plan:
    """What a step's layers of one kind read.

    Attributes:
        chunks: rows of the step, and the pool's rows of the cached context that they see.
        decode_rows: rows of single tokens; None: no row is one.
    """

    kind: Kind
    chunks: list[tuple[slice, Tensor | None]]
    decode: SparseDecode | GatherDecode
    decode_rows: Tensor | None
    is_decode_in_order: bool


class TorchBackend(AttentionBackend):
    """See AttentionBackend. `dtype` is that of the queries; the pool's may differ."""

    def __init__(
        self, pool: KVPool, *, dtype: torch.dtype | None = None, **sizes: Any
    ) -> None:
        super().__init__(pool, **sizes)
        self._dtype = dtype or pool.tensor.dtype
        self._device = str(pool.tensor.device)
        self._rows = RowMap(pool.layout)
        self._caches = [self._cache(layer) for layer in range(pool.layout.num_layers)]
        self._decodes = {kind: self._make_decode(kind.soft_cap) for kind in self.kinds}
        self._plans: dict[Kind, _Plan] = {}

    def _cache(self, layer: int) -> _Cache:
        matrix = fp8.addressable(self.pool.tensor).view(-1, self.head_dim)

        def part(component: int) -> Tensor:
            start = self._rows.shift(layer, component)
            return matrix.narrow(0, start, self._rows.num_shared_rows)

        keys = part(0)
        return _Cache(keys, keys if self.pool.layout.num_components == 1 else part(1))

    def _make_decode(self, soft_cap: float) -> SparseDecode | GatherDecode:
        has_few_heads = self.num_q_heads <= _MAX_SPARSE_GROUP * self.num_kv_heads
        is_plain = self._dtype == self.pool.tensor.dtype == torch.float32
        if (
            has_few_heads
            and is_plain
            and self._device == "cpu"
            and sparse_decode_works()
        ):
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
        self._plans = {kind: self._plan_of(kind, batch) for kind in self.kinds}

    def _plan_of(self, kind: Kind, batch: AttentionBatch) -> _Plan:
        decode, decode_rows, is_in_order = self._decodes[kind], None, False
        chunks = [
            (chunk, self._to_device(rows) if rows.size else None)
            for chunk, rows in prefill_chunks(batch, self._rows, kind.window)
        ]
        if groups := decode_groups(batch, self._rows, decode.grouping, kind.window):
            rows = np.concatenate([g.query_rows for g in groups])
            decode_rows = self._to_device(rows)
            decode.plan(groups)
            is_in_order = np.array_equal(rows, np.arange(batch.num_tokens))
        return _Plan(kind, chunks, decode, decode_rows, is_in_order)

    def _to_device(
        self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ) -> Tensor:
        return torch.from_numpy(array.reshape(-1)).to(self._device)

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor,
        *, turn: Turn | None = None, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert turn is None and q.shape == (
            self._num_tokens,
            self.num_q_heads,
            self.head_dim,
        )
        cache = self._caches[layer]
        k_scale, v_scale = self.pool.scale(layer, 0), self.pool.scale(layer, -1)
        k = self._write(cache.k_rows, k, k_scale)
        v = k if cache.v_rows is cache.k_rows else self._write(cache.v_rows, v, v_scale)
        kind, sinks = self.layers[layer]
        if lse is None and sinks is not None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        scale = self.scale * k_scale
        out = self._attend(self._plans[kind], cache, q, k, v, scale=scale, lse=lse)
        if lse is not None and sinks is not None:
            leave_to_sinks(out, lse, sinks)
        return out if v_scale == 1.0 else out.mul_(v_scale)

    def forward_latent(
        self, layer: int, q_latent: Tensor, q_rope: Tensor, latent: Tensor,
        *, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        # With the up-projections absorbed, the cached row is the one key and, but for its rope
        # part, the one value of all heads.
        q, row = torch.cat([q_latent, q_rope], -1), latent.unsqueeze(1)
        return self.forward(layer, q, row, row, lse=lse)[..., : q_latent.shape[-1]]

    def _attend(
        self, plan: _Plan, cache: _Cache, q: Tensor, k: Tensor, v: Tensor,
        *, scale: float, lse: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attention of all rows; k and v as stored, and so the output."""
        decode = plan.decode
        if plan.is_decode_in_order:
            return decode.attend(q, cache.k_rows, cache.v_rows, scale=scale, lse=lse)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if lse is not None:
            lse.zero_()
        if (rows := plan.decode_rows) is not None:
            found = None if lse is None else lse[rows]
            part = decode.attend(
                q[rows], cache.k_rows, cache.v_rows, scale=scale, lse=found
            )
            out.index_copy_(0, rows, part)
            if lse is not None and found is not None:
                lse.index_copy_(0, rows, found)
        for chunk, context_rows in plan.chunks:
            own = q[chunk], k[chunk], v[chunk]
            part, part_lse = self._attend_chunk(
                plan.kind, *own, cache, context_rows, scale
            )
            out[chunk] = part.flatten(0, 1).transpose(0, 1)
            if lse is not None:
                lse[chunk] = part_lse.flatten(0, 1).transpose(0, 1)
        return out

    def _write(self, rows: Tensor, new: Tensor, scale: float) -> Tensor:
        """Stores [T, H, D] by slot; returns it as a later step will read it, not yet scaled."""
        stored = fp8.stored_as(
            new.reshape(-1, self.head_dim), self.pool.tensor.dtype, scale
        )
        rows.index_copy_(0, self._slots, fp8.addressable(stored))
        return stored.view(new.shape).to(self._dtype)

    def _attend_chunk(
        self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, cache: _Cache,
        context_rows: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output [H, Hq/H, chunk, D] and log-sum-exp [H, Hq/H, chunk] of one prompt chunk."""
        # Heads by KV head: [chunk, H, Hq/H, D] -> [H, Hq/H, chunk, D].
        queries = q.reshape(len(q), self.num_kv_heads, -1, self.head_dim).permute(
            1, 2, 0, 3
        )

        parts = [(k.transpose(0, 1), v.transpose(0, 1))]
        if context_rows is not None:
            keys, values = (self._read(rows, context_rows) for rows in cache)
            parts.insert(0, (keys, values))
        if kind != Kind():
            keys, values = (torch.cat(each, 1) for each in zip(*parts, strict=True))
            return causal_attention(queries, keys, values, scale=scale, kind=kind)

        def attend(
            keys: Tensor, values: Tensor, *, causal: bool
        ) -> tuple[Tensor, Tensor]:
            # [H, n, D] -> [H, Hq/H, n, D], the same memory for each query head
            each = (
                x.unsqueeze(1).expand(-1, queries.shape[1], -1, -1)
                for x in (keys, values)
            )
            return dense_attention(queries, *each, scale=scale, causal=causal)

        out, lse = attend(*parts[-1], causal=True)
        if len(parts) == 1:
            return out, lse
        return merge_attention(out, lse, *attend(*parts[0], causal=False))

    def _read(self, rows: Tensor, indices: Tensor) -> Tensor:
        """[H * n] rows as [H, n, D] in the queries' dtype."""
        found = fp8.numbers(rows.index_select(0, indices), self._dtype)
        return found.view(self.num_kv_heads, -1, self.head_dim)
