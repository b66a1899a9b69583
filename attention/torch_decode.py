"""Attention of single query tokens over paged context, two ways, for the torch backend.

`SparseDecode` copies no KV. Scores are a sparse matrix (a row per sequence and query head, a column
per pool row), so `sampled_addmm` computes exactly the products that exist, reading keys where they
lie, and `embedding_bag` sums the values weighted by the probabilities, again in place. Every row is
computed on its own: a sequence's result does not depend on the batch it is in.

`GatherDecode` copies each group's context into a dense buffer and calls a fused kernel: for other
dtypes and devices, and for many query heads per KV head (MLA above all), where the copy pays.
"""

import functools
import math
import warnings

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention.torch_dense import dense_attention
from attention.torch_plan import DecodeGroup, Grouping
from kvcache import fp8


class SparseDecode:
    """Reads the pool in place. CPU and float32 only."""

    grouping = Grouping(max_padding=0.2, max_tokens=1 << 62)

    def __init__(
        self, *, num_q_heads: int, num_shared_rows: int, soft_cap: float = 0.0
    ) -> None:
        self._num_q_heads, self._soft_cap = num_q_heads, soft_cap
        self._num_rows = num_shared_rows

    def plan(self, groups: list[DecodeGroup]) -> None:
        """Takes the step's groups. The queries of `attend` follow in the same order."""
        # A row of scores is a query head of a sequence: those of all groups, one after the other.
        self._shapes = [(len(g.pool_rows), self._num_q_heads, g.width) for g in groups]
        self._biases = [_padding_bias(g, torch.float32, "cpu") for g in groups]
        self._indices = torch.from_numpy(
            np.concatenate([self._each_head(g) for g in groups])
        )
        lengths = np.repeat(
            [shape[2] for shape in self._shapes], [g * h for g, h, _ in self._shapes]
        )
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self._bags = torch.from_numpy(starts[:-1])
        # Zeros, because beta=0 times an old NaN would be NaN. The scores of each layer go here.
        self._scores = torch.zeros(len(self._indices))
        self._pattern = torch.sparse_csr_tensor(
            torch.from_numpy(starts),
            self._indices,
            self._scores,
            size=(len(lengths), self._num_rows),
            check_invariants=False,
        )

    def _each_head(self, group: DecodeGroup) -> npt.NDArray[np.int64]:
        """[G, H, width] rows for each query head of a KV head, flat."""
        repeats = self._num_q_heads // group.pool_rows.shape[1]
        return group.pool_rows.repeat(repeats, axis=1).reshape(-1)

    def attend(
        self,
        q: Tensor,
        k_rows: Tensor,
        v_rows: Tensor,
        *,
        scale: float,
        lse: Tensor | None,
    ) -> Tensor:
        """Attention of a query token for each sequence.

        Args:
            q: [G, Hq, D]; k_rows, v_rows: [rows, D], the layer's keys and values (MLA: the same).
            scale: of the scores.
            lse: float32 [G, Hq], to be filled.

        Returns:
            [G, Hq, D] in q's dtype.
        """
        torch.sparse.sampled_addmm(
            self._pattern,
            q.reshape(-1, q.shape[-1]),
            k_rows.t(),
            beta=0.0,
            alpha=scale,
            out=self._pattern,
        )
        if self._soft_cap:
            self._scores.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        parts = torch.split_with_sizes(self._scores, list(map(math.prod, self._shapes)))
        scores = [
            part.view(shape) if bias is None else part.view(shape) + bias
            for part, shape, bias in zip(parts, self._shapes, self._biases, strict=True)
        ]
        weights = torch.cat([torch.softmax(part, -1).flatten() for part in scores])
        out = torch.embedding_bag(
            v_rows, self._indices, self._bags, mode=0, per_sample_weights=weights
        )[0]
        if lse is not None:
            lse.copy_(torch.cat([part.logsumexp(-1) for part in scores]))
        return out.view(q.shape)


class GatherDecode:
    """Copies the context, then a fused kernel. Any dtype and device."""

    def __init__(
        self, *, head_dim: int, dtype: torch.dtype, device: str, soft_cap: float = 0.0
    ) -> None:
        is_cpu = torch.device(device).type == "cpu"
        # On a GPU launches cost more than padding, and the kernel wants biases of 16 elements.
        self.grouping = (
            Grouping(0.2, 1 << 15, 16) if is_cpu else Grouping(0.5, 1 << 19, 16)
        )
        self._head_dim, self._soft_cap = head_dim, soft_cap
        self._dtype = dtype  # of the queries
        self._device = device
        self._buffers = [torch.empty(0), torch.empty(0)]  # of keys, and of values

    def plan(self, groups: list[DecodeGroup]) -> None:
        self._shapes = [g.pool_rows.shape for g in groups]  # [G, H, width]
        self._indices = [
            torch.from_numpy(g.pool_rows.reshape(-1)).to(self._device) for g in groups
        ]
        biases = (_padding_bias(g, self._dtype, self._device) for g in groups)
        self._biases = [None if bias is None else bias.unsqueeze(1) for bias in biases]

    def attend(
        self,
        q: Tensor,
        k_rows: Tensor,
        v_rows: Tensor,
        *,
        scale: float,
        lse: Tensor | None,
    ) -> Tensor:
        outs, start = [], 0
        for (num_seqs, heads, width), indices, bias in zip(
            self._shapes, self._indices, self._biases, strict=True
        ):
            shape = (num_seqs, heads, width, self._head_dim)
            k = self._gather(0, k_rows, indices).view(shape)
            v = k if v_rows is k_rows else self._gather(1, v_rows, indices).view(shape)
            # The query heads of one KV head become query positions: no KV is repeated.
            group_q = q[start : start + num_seqs].reshape(
                num_seqs, heads, -1, self._head_dim
            )
            out, found = dense_attention(
                group_q, k, v, scale=scale, bias=bias, soft_cap=self._soft_cap
            )
            outs.append(out.reshape(num_seqs, -1, self._head_dim))
            if lse is not None:
                lse[start : start + num_seqs] = found.reshape(num_seqs, -1)
            start += num_seqs
        return torch.cat(outs)

    def _gather(self, which: int, rows: Tensor, indices: Tensor) -> Tensor:
        """[n, D] rows in the queries' dtype, in a buffer that is kept: fresh pages cost more."""
        buffer = self._buffers[which]
        num_elements = len(indices) * self._head_dim
        if buffer.numel() < num_elements or buffer.dtype != rows.dtype:
            buffer = torch.empty(num_elements, dtype=rows.dtype, device=self._device)
            self._buffers[which] = buffer
        out = buffer[:num_elements].view(len(indices), self._head_dim)
        return fp8.numbers(torch.index_select(rows, 0, indices, out=out), self._dtype)


def _padding_bias(group: DecodeGroup, dtype: torch.dtype, device: str) -> Tensor | None:
    """[G, 1, width], 0 on a group's tokens and -inf on its padding; None where there is none."""
    if not group.is_padded:
        return None
    is_padding = np.arange(group.width) >= group.context_lens[:, None]
    bias = torch.zeros(is_padding.shape, dtype=dtype)
    return (
        bias.masked_fill_(torch.from_numpy(is_padding), float("-inf"))
        .unsqueeze(1)
        .to(device)
    )


@functools.cache
def sparse_decode_works() -> bool:
    """Whether this torch build has the sparse kernels (it may lack them without MKL)."""
    offsets, rows = torch.tensor([0, 1]), torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # "Sparse CSR tensor support is in beta state", once
        try:
            one = torch.sparse_csr_tensor(
                offsets, offsets[1:], torch.zeros(1), size=(1, 2)
            )
            torch.sparse.sampled_addmm(one, rows[:1], rows.t(), beta=0.0, out=one)
        except RuntimeError:
            return False
    return True
