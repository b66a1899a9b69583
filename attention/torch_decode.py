"""Two implementations of attention of single query tokens over paged context, in torch.

`SparseDecode` copies no KV and serves float32 on the CPU only. Scores are a sparse
matrix with a row for each query head of each sequence, and a column for each row of the
pool. `sampled_addmm` reads the keys in place and computes only the products that the
sparse matrix contains. `embedding_bag` reads the values in place and sums them,
weighted by the probabilities. Each row of scores is computed separately, so a
sequence's result does not depend on the batch.

`GatherDecode` copies each group's context into a dense buffer and calls a fused kernel.
It serves all dtypes and devices. With many query heads per KV head (MLA above all), the
fused kernel saves more time than the copy takes.
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
    """Decodes over the pool in place, in float32 on the CPU.

    Args:
        num_q_heads: Query heads of this rank.
        num_shared_rows: Rows of a layer's view of the pool; see RowMap.
        soft_cap: See AttentionKind.
    """

    grouping = Grouping(max_padding=0.2, max_tokens=1 << 62)

    def __init__(
        self, *, num_q_heads: int, num_shared_rows: int, soft_cap: float = 0.0
    ) -> None:
        self._num_q_heads = num_q_heads
        self._soft_cap = soft_cap
        self._num_rows = num_shared_rows

    def plan(self, groups: list[DecodeGroup]) -> None:
        """Plans a step.

        `attend` takes the queries in the order of `groups` and, within a group, in the
        order of its sequences.
        """
        # Each query head of each sequence has a row of scores. The rows of the first
        # group come first.
        self._shapes = [
            (len(group.pool_rows), self._num_q_heads, group.width) for group in groups
        ]
        self._biases = [_padding_bias(group, torch.float32, "cpu") for group in groups]
        indices = np.concatenate([self._rows_per_query_head(group) for group in groups])
        self._indices = torch.from_numpy(indices)
        widths = [width for _, _, width in self._shapes]
        num_rows = [num_seqs * num_heads for num_seqs, num_heads, _ in self._shapes]
        lengths = np.repeat(widths, num_rows)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self._bag_starts = torch.from_numpy(starts[:-1])
        # `attend` writes the scores of each layer to this tensor. The initial values
        # must not be NaN, because sampled_addmm multiplies them by beta=0.
        self._scores = torch.zeros(len(self._indices))
        self._pattern = torch.sparse_csr_tensor(
            torch.from_numpy(starts),
            self._indices,
            self._scores,
            size=(len(lengths), self._num_rows),
            check_invariants=False,
        )

    def _rows_per_query_head(self, group: DecodeGroup) -> npt.NDArray[np.int64]:
        """Returns the pool rows that query heads read: [G, Hq, width], flattened."""
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
        """Attends for one query token of each of S sequences.

        Args:
            q: [S, Hq, D], in the order of the plan.
            k_rows, v_rows: [rows, D], the layer's keys and values. For MLA, both are
                the same tensor.
            scale: Factor of the scores.
            lse: float32 [S, Hq]; filled with the log-sum-exps.

        Returns:
            [S, Hq, D] in q's dtype.
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
            v_rows, self._indices, self._bag_starts, mode=0, per_sample_weights=weights
        )[0]
        if lse is not None:
            lse.copy_(torch.cat([part.logsumexp(-1) for part in scores]))
        return out.view(q.shape)


class GatherDecode:
    """Decodes over dense copies of contexts, in any dtype and on any device.

    Args:
        dtype: The queries' dtype.
        soft_cap: See AttentionKind.
    """

    def __init__(
        self, *, head_dim: int, dtype: torch.dtype, device: str, soft_cap: float = 0.0
    ) -> None:
        # Fused kernels need bias rows with a multiple of 16 elements. On a GPU, groups
        # are larger and have more padding, because launches cost more than padding.
        if torch.device(device).type == "cpu":
            self.grouping = Grouping(max_padding=0.2, max_tokens=1 << 15, multiple=16)
        else:
            self.grouping = Grouping(max_padding=0.5, max_tokens=1 << 19, multiple=16)
        self._head_dim = head_dim
        self._soft_cap = soft_cap
        self._dtype = dtype
        self._device = device
        self._buffers = [torch.empty(0), torch.empty(0)]  # of keys, and of values

    def plan(self, groups: list[DecodeGroup]) -> None:
        """Plans a step; see SparseDecode.plan."""
        self._shapes = [group.pool_rows.shape for group in groups]  # [G, H, width]
        self._indices = [
            torch.from_numpy(group.pool_rows.reshape(-1)).to(self._device)
            for group in groups
        ]
        biases = (_padding_bias(group, self._dtype, self._device) for group in groups)
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
        """Attends for one query token of each sequence; see SparseDecode.attend."""
        outs = []
        start = 0
        for (num_seqs, heads, width), indices, bias in zip(
            self._shapes, self._indices, self._biases, strict=True
        ):
            shape = (num_seqs, heads, width, self._head_dim)
            k = self._gather(0, k_rows, indices).view(shape)
            v = k if v_rows is k_rows else self._gather(1, v_rows, indices).view(shape)
            # The query heads of a KV head become the kernel's query positions, so the
            # KV need not be repeated for each query head.
            stop = start + num_seqs
            group_q = q[start:stop].reshape(num_seqs, heads, -1, self._head_dim)
            out, group_lse = dense_attention(
                group_q, k, v, scale=scale, bias=bias, soft_cap=self._soft_cap
            )
            outs.append(out.reshape(num_seqs, -1, self._head_dim))
            if lse is not None:
                lse[start:stop] = group_lse.reshape(num_seqs, -1)
            start = stop
        return torch.cat(outs)

    def _gather(self, component: int, rows: Tensor, indices: Tensor) -> Tensor:
        """Returns the rows at `indices` as [n, D] in the queries' dtype.

        The rows are gathered into a buffer that the next call for this component
        overwrites. FP8 rows are then converted into a new tensor. Reusing the buffer is
        faster than a new allocation, which the operating system maps page by page.

        Args:
            component: 0 for keys, 1 for values; each component has its own buffer.
        """
        buffer = self._buffers[component]
        num_elements = len(indices) * self._head_dim
        if buffer.numel() < num_elements or buffer.dtype != rows.dtype:
            buffer = torch.empty(num_elements, dtype=rows.dtype, device=self._device)
            self._buffers[component] = buffer
        out = buffer[:num_elements].view(len(indices), self._head_dim)
        return fp8.from_stored(
            torch.index_select(rows, 0, indices, out=out), self._dtype
        )


def _padding_bias(group: DecodeGroup, dtype: torch.dtype, device: str) -> Tensor | None:
    """Returns a bias [G, 1, width]: 0 for contexts' tokens and -inf for padding.

    Returns None if the group has no padding.
    """
    if not group.has_padding:
        return None
    is_padding = np.arange(group.width) >= group.context_lens[:, None]
    bias = torch.zeros(is_padding.shape, dtype=dtype)
    bias.masked_fill_(torch.from_numpy(is_padding), float("-inf"))
    return bias.unsqueeze(1).to(device)


@functools.cache
def sparse_decode_works() -> bool:
    """Returns whether this torch build has the sparse kernels of SparseDecode.

    Builds without MKL may lack these kernels.
    """
    offsets = torch.tensor([0, 1])
    rows = torch.ones(2, 4)
    with warnings.catch_warnings():
        # Torch warns once that "Sparse CSR tensor support is in beta state".
        warnings.simplefilter("ignore")
        try:
            pattern = torch.sparse_csr_tensor(
                offsets, offsets[1:], torch.zeros(1), size=(1, 2)
            )
            torch.sparse.sampled_addmm(
                pattern, rows[:1], rows.t(), beta=0.0, out=pattern
            )
        except RuntimeError:
            return False
    return True
