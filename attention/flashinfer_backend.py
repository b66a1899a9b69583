"""The attention backend over FlashInfer's paged kernels, on NVIDIA GPUs.

The kernels take any strides, so every KVLayout is read in place through [B, H, N, D]
views. A step is divided among three kinds of kernels:

- The sequences at the front of the step that have a single query token use Baton's own
  decode kernels (attention/pieces.py).
- Long prompts without stored KV at the end of the step (fresh prompts) read the step's
  own contiguous keys and values (`_plan_fresh`). FlashAttention-3 reads contiguous
  tensors faster than the pool.
- All other sequences use the prefill kernel over the pool: FlashAttention-3 on Hopper.

FlashAttention-3 reads FP8 KV only with FP8 queries, so a pool in FP8 is treated
differently. Fresh prompts read the step's own keys and values, rounded to FP8. For all
other prompts, the blocks are copied to 16 bits without loss, and FlashAttention-3 reads
the copies. FlashAttention-2 reads FP8 in place, but has half the speed. It is used if
the blocks exceed the buffer for copies, or if the GPU does not support
FlashAttention-3.

A window and a soft cap are arguments of a plan, so each kind of layers has its own
kernels and plans. Baton's decode kernels include attention sinks in the softmax.
FlashInfer's kernels do not, so their output is multiplied by the share of the softmax
that the sinks leave. This share is computed from the log-sum-exps.
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
from attention.base import (
    AttentionBatch,
    AttentionKind,
    Int32s,
    Pages,
    RopeNormArgs,
)
from attention.flashinfer_base import (
    LN_2,
    CapturedBuffers,
    FlashInferBase,
    GraphPlan,
    indptr_of,
    pinned,
)
from attention.flashinfer_workspace import (
    DEFAULT_INT_BYTES,
    Gpu,
    Workspace,
    workspace_of,
)
from attention.kernels.sinks import scale_for_sinks
from attention.kernels.store import store
from attention.kernels.widen import widen
from attention.self_test import check_decoding, check_storing, check_widening
from attention.support import StepLimits
from kvcache import fp8
from kvcache.pool import KVPool

# FlashInfer's name for views [B, H, N, D], which may have any strides.
_VIEW_ORDER: Final = "HND"
# A fresh prompt has no cached context and gets a launch of its own; see `_plan_fresh`.
# The last prompts of a step are fresh if each has at least _MIN_FRESH_TOKENS_EACH
# tokens. If the last prompt is shorter, only this prompt is fresh, provided that it has
# at least _MIN_FRESH_TOKENS tokens. All other prompts share one launch over the pool,
# because short prompts fill the GPU better in a shared launch.
_MIN_FRESH_TOKENS: Final = 512
_MIN_FRESH_TOKENS_EACH: Final = 2048
_MAX_FRESH: Final = 8  # maximum number of fresh prompts of a step
_HOPPER: Final = 9  # the major compute capability of Hopper GPUs
_MAX_COPIED_TOKENS: Final = 1 << 17  # capacity of the buffer for 16-bit copies


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows [start, stop) of a step, and the planned kernel that attends for them.

    Attributes:
        is_fresh: Whether the kernel reads the step's own keys and values.
        takes_sinks: Whether the kernel includes attention sinks in the softmax.
        copied: The FP8 blocks to copy to 16 bits for the kernel, and their number;
            None: the kernel reads the pool or the step's own keys and values.
    """

    start: int
    stop: int
    kernel: Any
    is_fresh: bool = False
    takes_sinks: bool = False
    copied: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class _KindKernels:
    """The kernels of the layers of one kind.

    Attributes:
        options: The window and the soft cap, as arguments of FlashInfer's plans.
        prefill: The kernel over the pool, and the kernel over 16-bit copies of its
            blocks; the latter is None if no blocks are copied.
        fresh: Kernels of fresh prompts, one for each; made when first needed.
        parts: The parts of the planned step.
    """

    options: dict[str, Any]
    decode: pieces.PieceDecode
    prefill: tuple[Any, Any]
    fresh: list[Any] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)


class FlashInferBackend(FlashInferBase):
    """See AttentionBackend.

    Args:
        prefill: FlashInfer's backend of prefill kernels: "fa2", "fa3", or "auto" (fa3
            if the GPU supports it, else fa2). Kernels that read an FP8 pool in place
            are always fa2.
        options: See FlashInferBase.

    Raises:
        UnsupportedPool: The kernels do not support the device, a dtype or the head_dim.
    """

    def __init__(self, pool: KVPool, *, prefill: str = "auto", **options: Any) -> None:
        super().__init__(pool, **options)
        self._caches = [
            (pool.component(layer, 0), pool.component(layer, 1))
            for layer in range(pool.layout.num_layers)
        ]
        check_storing(self._caches[0], self._scales(0), self.dtype, self.num_q_heads)
        check_decoding(
            self._caches[0], self.dtype, self.num_q_heads, self.layers, self._max_rows
        )
        self._takes_fresh = prefill == "fa3" or (
            prefill == "auto" and is_sm90a_supported(self.device)
        )
        # Copies [2, blocks, H, N, D] of a layer's keys and values in 16 bits.
        self._wide: Tensor | None = getattr(options.get("shared_with"), "_wide", None)
        num_copied = 0
        if self._is_fp8 and self._takes_fresh:
            num_copied = min(self._limits.max_context, _MAX_COPIED_TOKENS)
        if num_copied and self._wide is None:
            cache = self._caches[0][0]
            shape = (2, -(-num_copied // self.block_size), *cache.shape[1:])
            self._wide = torch.zeros(shape, dtype=self.dtype, device=self.device)
            check_widening(cache, self._wide[0], packed=True)
        # FlashAttention-3 reads FP8 KV only with FP8 queries.
        over_pool = "fa2" if self._is_fp8 else prefill
        self._kernels = {
            kind: self._make_kernels(kind, over_pool) for kind in self.kinds
        }

    @property
    def _is_fp8(self) -> bool:
        return self.kv_dtype is fp8.DTYPE

    @property
    def _max_rows(self) -> int:
        """The maximum number of rows that read a context together.

        Only Hopper GPUs have a kernel for several rows. For Blackwell, Triton 3.6 does
        not compile it.
        """
        if not self._limits.has_proposals or self.gpu.capability != _HOPPER:
            return 1
        num_q_heads, num_kv_heads, _ = self.heads
        return pieces.max_run_rows(num_q_heads, num_kv_heads)

    def _make_kernels(self, kind: AttentionKind, prefill: str) -> _KindKernels:
        # Without these options, FlashInfer's kernels have no window and no cap.
        options: dict[str, Any] = {}
        if kind.window is not None:
            options["window_left"] = kind.window - 1  # the token itself is not counted
        if kind.soft_cap:
            options["logits_soft_cap"] = kind.soft_cap
        make = partial(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper, self.workspace, _VIEW_ORDER
        )
        over_copies = None
        if self._wide is not None:
            over_copies = self._with_int_workspace(make(backend="fa3"))
        over_pool = self._with_int_workspace(make(backend=prefill))
        decode = self._make_decode_kernel(kind)
        return _KindKernels(options, decode, (over_pool, over_copies))

    def workspace_sizes(self, limits: StepLimits, gpu: Gpu) -> Workspace:
        sizes = workspace_of(*self.heads, limits, gpu)
        decode_bytes = pieces.partial_bytes(
            self.heads, limits.max_seqs, gpu.num_sms, self._max_rows
        )
        return replace(sizes, floats=max(sizes.floats, decode_bytes))

    def _with_int_workspace(self, kernel: Any) -> Any:
        """Gives a kernel enough int workspace for the largest step; returns the kernel.

        FlashInfer creates kernels with DEFAULT_INT_BYTES of int workspace.
        """
        if self.sizes.ints > DEFAULT_INT_BYTES:
            ints = torch.zeros(self.sizes.ints, dtype=torch.uint8, device=self.device)
            kernel.reset_workspace_buffer(self.workspace, ints)
        return kernel

    def _make_decode_kernel(
        self, kind: AttentionKind, **captured: Any
    ) -> pieces.PieceDecode:
        return pieces.PieceDecode(
            self.heads,
            self.block_size,
            kind,
            self.scale,
            self.workspace,
            self.gpu.num_sms,
            max_rows=self._max_rows,
            **captured,
        )

    def plan(self, batch: AttentionBatch) -> None:
        self.set_slots(batch.slot_mapping)
        num_decodes = batch.num_leading_decodes
        first_fresh = batch.num_seqs
        if self._takes_fresh:
            first_fresh -= _num_fresh(batch.query_lens, batch.context_lens)
        decodes = batch.select_sequences(0, num_decodes)
        prefills = batch.select_sequences(num_decodes, first_fresh)
        fresh_lens = batch.query_lens[first_fresh:].tolist()
        with self.planning():
            for kind, kernels in self._kernels.items():
                kernels.parts = []
                if num_decodes:
                    seen, pages = self._seen_by(kind, decodes)
                    kernels.decode.plan(seen, pages)
                    kernels.parts.append(_decode_part(num_decodes, kernels.decode))
                if num_decodes < first_fresh:
                    seen, pages = self._seen_by(kind, prefills)
                    self._plan_prefill(kernels, num_decodes, seen.query_lens, pages)
                self._plan_fresh(kernels, fresh_lens)

    def _seen_by(
        self, kind: AttentionKind, batch: AttentionBatch
    ) -> tuple[AttentionBatch, Pages]:
        """Returns a step without the blocks that layers of `kind` do not see, and its
        pages."""
        seen = batch.limit_to_window(kind.window, self.block_size)
        return seen, seen.pages(self.block_size)

    def _plan_fresh(self, kernels: _KindKernels, lens: list[int]) -> None:
        """Plans the fresh prompts, which read the step's own keys and values.

        Each prompt has its own kernel, which sees that prompt's rows only. A kernel for
        several prompts would read values past a prompt's end and multiply them by zero.
        Those values belong to the next prompt and may be NaN, and 0 * NaN is NaN.

        Args:
            lens: Tokens of each fresh prompt.
        """
        while len(kernels.fresh) < len(lens):
            kernel = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                self.workspace, backend="fa3"
            )
            kernels.fresh.append(self._with_int_workspace(kernel))
        start = kernels.parts[-1].stop if kernels.parts else 0
        for kernel, num_tokens in zip(kernels.fresh, lens, strict=False):
            indptr = torch.tensor([0, num_tokens], dtype=torch.int32)
            kernel.plan(
                indptr,
                indptr,
                *self.heads,
                causal=True,
                q_data_type=self.dtype,
                sm_scale=self.scale,
                **kernels.options,
            )
            stop = start + num_tokens
            kernels.parts.append(_Part(start, stop, kernel, is_fresh=True))
            start = stop

    def _plan_prefill(
        self, kernels: _KindKernels, start: int, lens: Int32s, pages: Pages
    ) -> None:
        """Plans the prefill kernel over the pool, or over copies of FP8 blocks.

        Args:
            start: The first row of the step that the kernel computes.
            lens: Query tokens of each sequence.
            pages: The sequences' blocks.
        """
        part = _Part(start, start + int(lens.sum()), kernels.prefill[0])
        kv_dtype = self.kv_dtype
        num_blocks = len(pages.indices)
        if self._wide is not None and num_blocks <= self._wide.shape[1]:
            copied = self.upload_block_list(pages)
            part = replace(part, kernel=kernels.prefill[1], copied=copied)
            kv_dtype = self.dtype
            pages = pages._replace(indices=np.arange(num_blocks, dtype=np.int32))
        part.kernel.plan(
            indptr_of(lens),
            *map(pinned, pages),
            *self.heads,
            self.block_size,
            causal=True,
            q_data_type=self.dtype,
            kv_data_type=kv_dtype,
            sm_scale=self.scale,
            **kernels.options,
        )
        kernels.parts.append(part)

    def _widen_blocks(
        self, caches: tuple[Tensor, Tensor], blocks: Tensor, count: Tensor
    ) -> tuple[Tensor, ...]:
        """Copies the listed FP8 blocks of a layer to 16 bits.

        Args:
            caches: The layer's keys and values.
            blocks, count: As returned by `upload_block_list`.

        Returns:
            The copies of keys and of values, in the order of the list. The next call
            overwrites them.
        """
        assert self._wide is not None
        for stored, wide in zip(caches, self._wide, strict=True):
            widen(stored, wide, blocks, count, 1.0, packed=True)
        return tuple(self._wide)

    def graph_plan_size(self, max_seqs: int) -> int:
        return pieces.plan_size(max_seqs, self.num_kv_heads, self.gpu.num_sms)

    def make_graph_kernel(
        self, kind: AttentionKind, num_rows: int, buffers: CapturedBuffers
    ) -> Any:
        return self._make_decode_kernel(kind, captured=buffers, num_seqs=num_rows)

    def plan_graph_kernel(
        self, kind: AttentionKind, kernel: Any, batch: AttentionBatch, pages: Pages
    ) -> GraphPlan:
        self._kernels[kind].parts = [_decode_part(batch.num_seqs, kernel)]
        return GraphPlan(kernel.plan_for_graph(batch, pages), kernel.has_runs)

    @property
    def finds_runs(self) -> bool:
        return self._max_rows > 1

    def _scales(self, layer: int) -> tuple[float, float]:
        return self.pool.scale(layer, 0), self.pool.scale(layer, 1)

    @property
    def applies_rope(self) -> bool:
        return True

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
        kind, sinks = self.layers[layer]
        parts = self._kernels[kind].parts
        caches = self._caches[layer]
        scales = self._scales(layer)
        has_fresh = any(part.is_fresh for part in parts)
        store(
            k,
            v,
            self.slots,
            caches,
            scales,
            q=q,
            rope_norm=rope_norm,
            read_back=has_fresh,
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        returns_lse = lse is not None
        if lse is None and sinks is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for part in parts:
            rows = slice(part.start, part.stop)
            options: dict[str, Any] = {}
            if lse is not None:
                options = {"lse": lse[rows], "return_lse": True}
            if part.takes_sinks:
                options["sinks"] = sinks
            if part.is_fresh:
                part.kernel.run(q[rows], k[rows], v[rows], out=out[rows], **options)
            else:
                options |= {"k_scale": scales[0], "v_scale": scales[1]}
                read: tuple[Tensor, ...] = caches
                if part.copied:
                    read = self._widen_blocks(caches, *part.copied)
                part.kernel.run(q[rows], read, out=out[rows], **options)
            if lse is not None and sinks is not None and not part.takes_sinks:
                # `lse` is in base 2, as this `scale_for_sinks` expects. The caller's
                # `lse` is converted to natural logarithms afterwards.
                scale_for_sinks(out[rows], lse[rows], sinks)
        if lse is not None and returns_lse:
            lse.mul_(LN_2)
        return out


def _decode_part(num_decodes: int, kernel: pieces.PieceDecode) -> _Part:
    """Returns the part with a step's first `num_decodes` rows."""
    return _Part(0, num_decodes, kernel, takes_sinks=True)


def _num_fresh(query_lens: Int32s, context_lens: Int32s) -> int:
    """Returns the number of fresh prompts, which are the last sequences of a step.

    _MIN_FRESH_TOKENS and _MIN_FRESH_TOKENS_EACH define which prompts are fresh.
    """
    fresh_lens = np.where(query_lens == context_lens, query_lens, 0)
    others = np.flatnonzero(fresh_lens < _MIN_FRESH_TOKENS_EACH)
    after_others = int(others[-1]) + 1 if len(others) else 0
    is_last_fresh = int(fresh_lens[-1] >= _MIN_FRESH_TOKENS)
    return min(max(len(query_lens) - after_others, is_last_fresh), _MAX_FRESH)
