"""Multi-head latent attention over FlashInfer's kernels: DeepSeek's latent of 512 + 64 elements.

One kernel serves prefill and decode; it takes latents in place, whatever the layout. It reads 16
bits: of a pool in FP8, a layer's blocks that a step reads are widened before it reads them, into a
copy that all layers share.
"""

from typing import Any

import flashinfer
import torch
from flashinfer.mla._core import MLAPlanMetadata
from flashinfer.utils import is_sm90a_supported
from torch import Tensor

from attention.base import AttentionBatch, Kind, Pages
from attention.flashinfer_base import LN_2, CapturedBuffers, FlashInferBase, indptr_of
from attention.flashinfer_workspace import Gpu, Workspace, latent_workspace_of
from attention.kernels.store import store
from attention.kernels.widen import widen
from attention.proofs import prove_storing, prove_widening
from attention.support import LATENT_DIM, ROPE_DIM, StepLimits
from kvcache import fp8
from kvcache.pool import KVPool


class FlashInferMLABackend(FlashInferBase):
    """See AttentionBackend. The options are FlashInferBase's."""

    def __init__(self, pool: KVPool, **options: Any) -> None:
        super().__init__(pool, **options)
        latents = [
            pool.component(layer, 0)[:, 0] for layer in range(pool.layout.num_layers)
        ]
        # [B, 9, N, 64]: as if heads, of which the store kernel knows
        self._parts = [_in_parts(rows).transpose(1, 2) for rows in latents]
        prove_storing((self._parts[0],), (pool.scale(0, 0),), self.dtype)
        self._wide = None
        if self.kv_dtype is fp8.DTYPE:
            wide = torch.zeros(latents[0].shape, dtype=self.dtype, device=self.device)
            self._wide = _in_parts(wide).transpose(1, 2)
            prove_widening(self._parts[0], self._wide)
            latents = [wide] * len(latents)
        self._caches = [
            (rows[..., :LATENT_DIM], rows[..., LATENT_DIM:]) for rows in latents
        ]
        self._read = (
            torch.empty(0),
            torch.empty(0),
        )  # the step's blocks and their number
        self._backend = "fa3" if is_sm90a_supported(self.device) else "fa2"
        self._eager = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            self.workspace, backend=self._backend
        )
        self._planned = self._eager
        self._num_rows = 0
        self._lse_mode = "none"

    def workspace_sizes(self, limits: StepLimits, gpu: Gpu) -> Workspace:
        return latent_workspace_of(gpu)

    def always_with_lse(self) -> None:
        self._lse_mode = "base2"

    def plan(self, batch: AttentionBatch) -> None:
        self.set_slots(batch.slot_mapping)
        pages = batch.pages(self.block_size)
        if self._wide is not None:
            self._read = self.listed(pages)
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

    def captured_kernel(
        self, kind: Kind, num_rows: int, buffers: CapturedBuffers
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

    def plan_captured_kernel(
        self, kind: Kind, kernel: Any, batch: AttentionBatch, pages: Pages
    ) -> None:
        buffers = self._buffers[kind]
        self._read = buffers.indices, buffers.indptr[batch.num_seqs :]
        self._plan(kernel, batch, pages)

    def forward_latent(
        self, layer: int, q_latent: Tensor, q_rope: Tensor, latent: Tensor,
        *, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        scale = self.pool.scale(layer, 0)
        store(_in_parts(latent), None, self.slots, (self._parts[layer],), (scale,))
        if self._wide is not None:
            widen(self._parts[layer], self._wide, *self._read, scale)
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        rows = slice(0, self._num_rows)
        wanted = {} if lse is None else {"lse": lse[rows], "return_lse": True}
        query, cache = (q_latent[rows], q_rope[rows]), self._caches[layer]
        self._planned.run(query=query, kv_cache=cache, out=out[rows], **wanted)
        if lse is not None:
            lse.mul_(LN_2)  # the kernels count in powers of two
        return out


def _in_parts(latents: Tensor) -> Tensor:
    """[..., 576] -> [..., 9, 64]"""
    return latents.view(*latents.shape[:-1], -1, ROPE_DIM)
