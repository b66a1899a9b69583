"""Multi-head latent attention (MLA) over FlashInfer's kernels.

The kernels serve latents as in DeepSeek's models: 512 elements and a rope part of 64.

One kernel serves prefill and decode. It reads latents in place in any layout, but in 16
bits only. For a pool in FP8, the blocks that a step reads are first copied to 16 bits,
layer by layer, into one buffer that all layers share.
"""

from typing import Any

import flashinfer
import numpy as np
import torch
from flashinfer.mla._core import MLAPlanMetadata
from flashinfer.utils import is_sm90a_supported
from torch import Tensor

from attention.base import AttentionBatch, AttentionKind, Pages
from attention.flashinfer_base import (
    LN_2,
    CapturedBuffers,
    FlashInferBase,
    GraphPlan,
    indptr_of,
)
from attention.flashinfer_workspace import Gpu, Workspace, latent_workspace_of
from attention.kernels.store import store
from attention.kernels.widen import widen
from attention.self_test import check_storing, check_widening
from attention.support import LATENT_DIM, ROPE_DIM, StepLimits
from kvcache import fp8
from kvcache.pool import KVPool


class FlashInferMLABackend(FlashInferBase):
    """See AttentionBackend; `options` are the arguments of FlashInferBase."""

    def __init__(self, pool: KVPool, **options: Any) -> None:
        super().__init__(pool, **options)
        latents = [
            pool.component(layer, 0)[:, 0] for layer in range(pool.layout.num_layers)
        ]
        # In the kernel `store`, the number of elements of a head must be a power of
        # two. So it gets latents [B, N, 576] as 9 heads of 64 elements: [B, 9, N, 64].
        self._as_heads = [_split_into_heads(rows).transpose(1, 2) for rows in latents]
        check_storing((self._as_heads[0],), (pool.scale(0, 0),), self.dtype)
        self._wide = None
        if self.kv_dtype is fp8.DTYPE:
            wide = torch.zeros(latents[0].shape, dtype=self.dtype, device=self.device)
            self._wide = _split_into_heads(wide).transpose(1, 2)
            check_widening(self._as_heads[0], self._wide)
            latents = [wide] * len(latents)
        self._caches = [
            (rows[..., :LATENT_DIM], rows[..., LATENT_DIM:]) for rows in latents
        ]
        # The step's blocks and their number, as arguments of the kernel `widen`.
        self._block_list = (torch.empty(0), torch.empty(0))
        self._backend = "fa3" if is_sm90a_supported(self.device) else "fa2"
        self._eager = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            self.workspace, backend=self._backend
        )
        self._planned = self._eager
        self._num_rows = 0
        self._lse_mode = "none"

    def workspace_sizes(self, limits: StepLimits, gpu: Gpu) -> Workspace:
        return latent_workspace_of(gpu)

    def require_lse(self) -> None:
        self._lse_mode = "base2"

    def plan(self, batch: AttentionBatch) -> None:
        self.set_slots(batch.slot_mapping)
        pages = batch.pages(self.block_size)
        if self._wide is not None:
            self._block_list = self.upload_block_list(pages)
        with self.planning():
            self._plan(self._eager, batch, pages)

    def _plan(self, kernel: Any, batch: AttentionBatch, pages: Pages) -> None:
        kernel.plan(
            metadata=MLAPlanMetadata.csr(
                indptr_of(batch.query_lens),
                torch.from_numpy(pages.indptr),
                torch.from_numpy(pages.indices),
                torch.from_numpy(batch.context_lens.astype("int32")),
            ),
            num_heads=self.num_q_heads,
            head_dim_ckv=LATENT_DIM,
            head_dim_kpe=ROPE_DIM,
            page_size=self.block_size,
            causal=True,
            sm_scale=self.scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode=self._lse_mode,
        )
        self._planned = kernel
        self._num_rows = int(batch.query_lens.sum())

    def make_graph_kernel(
        self, kind: AttentionKind, num_rows: int, buffers: CapturedBuffers
    ) -> Any:
        return flashinfer.mla.BatchMLAPagedAttentionWrapper(
            self.workspace,
            use_cuda_graph=True,
            qo_indptr=torch.zeros(num_rows + 1, dtype=torch.int32, device=self.device),
            kv_indptr=buffers.indptr[: num_rows + 1],
            kv_indices=buffers.indices,
            kv_len_arr=torch.zeros(num_rows, dtype=torch.int32, device=self.device),
            backend=self._backend,
        )

    def graph_plan_size(self, max_seqs: int) -> int:
        return 0

    def plan_graph_kernel(
        self, kind: AttentionKind, kernel: Any, batch: AttentionBatch, pages: Pages
    ) -> GraphPlan:
        buffers = self._buffers[kind]
        self._block_list = (buffers.indices, buffers.indptr[batch.num_seqs :])
        with self.planning():
            self._plan(kernel, batch, pages)
        return GraphPlan(np.empty(0, np.int32))  # FlashInfer copies its plan itself

    def forward_latent(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        scale = self.pool.scale(layer, 0)
        as_heads = self._as_heads[layer]
        store(_split_into_heads(latent), None, self.slots, (as_heads,), (scale,))
        if self._wide is not None:
            widen(as_heads, self._wide, *self._block_list, scale)
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        rows = slice(0, self._num_rows)
        options: dict[str, Any] = {}
        if lse is not None:
            options = {"lse": lse[rows], "return_lse": True}
        self._planned.run(
            query=(q_latent[rows], q_rope[rows]),
            kv_cache=self._caches[layer],
            out=out[rows],
            **options,
        )
        if lse is not None:
            lse.mul_(LN_2)  # the kernels use base-2 logarithms
        return out


def _split_into_heads(latents: Tensor) -> Tensor:
    """Views latents [..., 576] as 9 heads: [..., 9, 64]."""
    return latents.view(*latents.shape[:-1], -1, ROPE_DIM)
