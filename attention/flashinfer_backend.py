"""The attention backend over FlashInfer's paged kernels, on NVIDIA GPUs.

The kernels take any strides, so every KVLayout is read in place through [B, H, N, D] views. The
sequences of one query token that lead a step are attended to by kernels of our own
(attention/pieces.py), the rest of the step by the prefill kernel, which is FlashAttention-3 on
Hopper, but for KV in FP8, which that reads with queries in FP8 only.

Long prompts of which nothing is stored yet need not read their keys and values back from the pool:
FlashAttention-3 reads contiguous ones faster (`_plan_fresh`), and where the pool is in FP8, it can
read these, once they have been rounded like what is stored. There the other prompts' blocks are
copied for it in 16 bits, exactly: FlashAttention-2 reads FP8 at half its speed.

A window and a soft cap are arguments of a plan, so the layers of each kind have kernels and plans
of their own. What sinks take is taken from the output afterwards, by the log-sum-exps.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import flashinfer
import numpy as np
import torch
from flashinfer.utils import is_sm90a_supported
from torch import Tensor

from attention import pieces
from attention.base import AttentionBatch, Int32s, Kind, Pages, Turn, leave_to_sinks
from attention.flashinfer_base import (
    LN_2,
    CapturedBuffers,
    FlashInferBase,
    indptr_of,
    pinned,
)
from attention.flashinfer_workspace import LEAST_INT_BYTES, Gpu, Workspace, workspace_of
from attention.kernels.store import store
from attention.kernels.widen import widen
from attention.proofs import prove_decoding, prove_storing, prove_widening
from attention.support import StepLimits
from kvcache import fp8
from kvcache.pool import KVPool

_VIEW_ORDER: Final = (
    "HND"  # of the views below; their strides say how the pool really lies
)
# Prompts that read their own keys and values, each by a launch of its own; see `_plan_fresh`.
# Several shorter ones fill the GPU better by one launch over the pool.
_FRESH_TOKENS: Final = 512
_FRESH_TOKENS_OF_EACH: Final = 2048
_MAX_FRESH: Final = 8
_MAX_COPIED: Final = 1 << 17  # tokens


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows [start, stop) of a step, and the planned kernel that attends for them."""

    start: int
    stop: int
    kernel: Any
    is_fresh: bool = False  # it attends to the step's own keys and values
    copied: tuple[Tensor, Tensor] | None = (
        None  # blocks of which it reads copies; their number
    )


@dataclass(eq=False)
class _OfKind:
    """The kernels of the layers of one kind.

    Attributes:
        options: of the plans of FlashInfer's, for the kind.
        prefill: over the pool, and over copies of its blocks, where there are any.
        fresh: made when first needed.
        parts: of the step.
    """

    options: dict[str, Any]
    decode: pieces.PieceDecode
    prefill: tuple[Any, Any]
    fresh: list[Any] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)


class FlashInferBackend(FlashInferBase):
    """See AttentionBackend. `prefill` is "auto" (fa3 where the chip has it), "fa2" or "fa3"; the
    other options are FlashInferBase's.

    Raises:
        UnsupportedPool: a device, dtype or head_dim that the kernels lack.
    """

    def __init__(self, pool: KVPool, *, prefill: str = "auto", **options: Any) -> None:
        is_fp8 = pool.tensor.dtype is fp8.DTYPE
        super().__init__(pool, **options)
        layers = range(pool.layout.num_layers)
        self._caches = [
            (pool.component(layer, 0), pool.component(layer, 1)) for layer in layers
        ]
        prove_storing(self._caches[0], self._scales(0), self.dtype, self.num_q_heads)
        prove_decoding(self._caches[0], self.dtype, self.num_q_heads, self.kinds)
        self._takes_fresh = prefill == "fa3" or (
            prefill == "auto" and is_sm90a_supported(self.device)
        )
        self._wide: Tensor | None = getattr(options.get("beside"), "_wide", None)
        most = (
            min(self._limits.max_context, _MAX_COPIED)
            if is_fp8 and self._takes_fresh
            else 0
        )
        if most and self._wide is None:
            cache = self._caches[0][0]
            shape = (2, -(-most // self.block_size), *cache.shape[1:])
            self._wide = torch.zeros(shape, dtype=self.dtype, device=self.device)
            prove_widening(cache, self._wide[0], packed=True)
        over_pool = "fa2" if is_fp8 else prefill  # fa3 reads FP8 with FP8 queries only
        self._of_kind = {kind: self._kernels_of(kind, over_pool) for kind in self.kinds}

    def _kernels_of(self, kind: Kind, prefill: str) -> _OfKind:
        options: dict[
            str, Any
        ] = {}  # so that other models' plans are called as if there were none
        if kind.window is not None:
            options["window_left"] = kind.window - 1  # itself not counted
        if kind.soft_cap:
            options["logits_soft_cap"] = kind.soft_cap
        make = partial(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper, self.workspace, _VIEW_ORDER
        )
        over_copies = None if self._wide is None else self._roomy(make(backend="fa3"))
        of_prompts = (self._roomy(make(backend=prefill)), over_copies)
        return _OfKind(options, self._decode_kernel(kind), of_prompts)

    def workspace_sizes(self, limits: StepLimits, gpu: Gpu) -> Workspace:
        sizes = workspace_of(*self.heads, limits, gpu)
        partial = pieces.partial_bytes(self.heads, limits.max_seqs, gpu.num_sms)
        return replace(sizes, floats=max(sizes.floats, partial))

    def _roomy(self, kernel: Any) -> Any:
        """A kernel that has room for the indices of the largest step: it comes with the least."""
        if self.sizes.ints > LEAST_INT_BYTES:
            ints = torch.zeros(self.sizes.ints, dtype=torch.uint8, device=self.device)
            kernel.reset_workspace_buffer(self.workspace, ints)
        return kernel

    def _decode_kernel(self, kind: Kind, **captured: Any) -> pieces.PieceDecode:
        shape = (self.heads, self.block_size, kind, self.scale, self.workspace)
        return pieces.PieceDecode(*shape, self.gpu.num_sms, **captured)

    def plan(self, batch: AttentionBatch) -> None:
        self.set_slots(batch.slot_mapping)
        num_decodes = batch.num_leading_decodes
        first_fresh = batch.num_seqs
        if self._takes_fresh:
            first_fresh -= _num_fresh(batch.query_lens, batch.context_lens)
        decodes, rest = batch.part(0, num_decodes), batch.part(num_decodes, first_fresh)
        fresh_lens = batch.query_lens[first_fresh:].tolist()
        pages = {
            kind: [part.within(kind.window, self.block_size).pages(self.block_size)
                   for part in (decodes, rest)]
            for kind in self.kinds
        }  # fmt: skip
        with self.planning():
            for kind, kernels in self._of_kind.items():
                of_decodes, of_rest = pages[kind]
                kernels.parts = []
                if num_decodes:
                    kernels.decode.plan(of_decodes)
                    kernels.parts.append(_Part(0, num_decodes, kernels.decode))
                if num_decodes < first_fresh:
                    self._plan_prefill(kernels, num_decodes, rest.query_lens, of_rest)
                self._plan_fresh(kernels, fresh_lens)

    def _plan_fresh(self, kernels: _OfKind, lens: list[int]) -> None:
        """Plans the prompts at the end of the step, of `lens` tokens, that read their own KV.

        Each has a kernel of its own, which sees its rows only: one for several prompts would read,
        before it multiplies by zero, values past a prompt's end, which are another's, perhaps NaN.
        """
        while len(kernels.fresh) < len(lens):
            kernel = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                self.workspace, backend="fa3"
            )
            kernels.fresh.append(self._roomy(kernel))
        start = kernels.parts[-1].stop if kernels.parts else 0
        for kernel, num_tokens in zip(kernels.fresh, lens, strict=False):
            indptr = torch.tensor([0, num_tokens], dtype=torch.int32)
            options = {
                "q_data_type": self.dtype,
                "sm_scale": self.scale,
                **kernels.options,
            }
            kernel.plan(indptr, indptr, *self.heads, causal=True, **options)
            kernels.parts.append(
                _Part(start, start + num_tokens, kernel, is_fresh=True)
            )
            start += num_tokens

    def _plan_prefill(
        self, kernels: _OfKind, start: int, lens: Int32s, pages: Pages
    ) -> None:
        part = _Part(start, start + int(lens.sum()), kernels.prefill[0])
        kv_dtype, count = self.kv_dtype, len(pages.indices)
        if self._wide is not None and count <= self._wide.shape[1]:
            part = replace(part, kernel=kernels.prefill[1], copied=self.listed(pages))
            kv_dtype, pages = (
                self.dtype,
                pages._replace(indices=np.arange(count, dtype=np.int32)),
            )
        indices = (indptr_of(lens), *map(pinned, pages))
        types = {
            "q_data_type": self.dtype,
            "kv_data_type": kv_dtype,
            "sm_scale": self.scale,
        }
        options = {**types, **kernels.options}
        part.kernel.plan(*indices, *self.heads, self.block_size, causal=True, **options)
        kernels.parts.append(part)

    def _copies(
        self, caches: tuple[Tensor, Tensor], blocks: Tensor, count: Tensor
    ) -> tuple[Tensor, ...]:
        """Of these blocks of a layer, one after the other, until others are made."""
        assert self._wide is not None
        for stored, wide in zip(caches, self._wide, strict=True):
            widen(stored, wide, blocks, count, 1.0, packed=True)
        return tuple(self._wide)

    def captured_kernel(
        self, kind: Kind, num_rows: int, buffers: CapturedBuffers
    ) -> Any:
        return self._decode_kernel(kind, captured=buffers, num_seqs=num_rows)

    def plan_captured_kernel(
        self, kind: Kind, kernel: Any, batch: AttentionBatch, pages: Pages
    ) -> None:
        kernel.plan(pages)
        self._of_kind[kind].parts = [_Part(0, batch.num_seqs, kernel)]

    def _scales(self, layer: int) -> tuple[float, float]:
        return self.pool.scale(layer, 0), self.pool.scale(layer, 1)

    @property
    def rotates(self) -> bool:
        return True

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor,
        *, turn: Turn | None = None, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        kind, sinks = self.layers[layer]
        parts = self._of_kind[kind].parts
        caches, scales = self._caches[layer], self._scales(layer)
        back = any(part.is_fresh for part in parts)
        store(k, v, self.slots, caches, scales, q=q, turn=turn, read_back=back)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if lse is None and sinks is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for part in parts:
            rows = slice(part.start, part.stop)
            wanted = {} if lse is None else {"lse": lse[rows], "return_lse": True}
            if part.is_fresh:
                part.kernel.run(q[rows], k[rows], v[rows], out=out[rows], **wanted)
            else:
                wanted |= {"k_scale": scales[0], "v_scale": scales[1]}
                read = self._copies(caches, *part.copied) if part.copied else caches
                part.kernel.run(q[rows], read, out=out[rows], **wanted)
        if lse is not None:
            lse.mul_(LN_2)  # the kernels count in powers of two
            if sinks is not None:
                leave_to_sinks(out, lse, sinks)
        return out


def _num_fresh(query_lens: Int32s, context_lens: Int32s) -> int:
    """How many sequences at the end of a step are long and have no tokens but this step's."""
    fresh_lens = np.where(query_lens == context_lens, query_lens, 0)
    others = np.flatnonzero(fresh_lens < _FRESH_TOKENS_OF_EACH)
    after_others = int(others[-1]) + 1 if len(others) else 0
    is_last_fresh = int(fresh_lens[-1] >= _FRESH_TOKENS)
    return min(max(len(query_lens) - after_others, is_last_fresh), _MAX_FRESH)
