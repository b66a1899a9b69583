"""The interface of attention backends: the batch of a step, and the forward of each layer.

A step runs T query tokens of S sequences through all layers. The batch is described once, in host
arrays (`AttentionBatch`). `plan` derives the backend's indices from it; `forward` is then called
once per layer: it writes this step's keys and values into the pool by slot, then attends over each
sequence's block table.

Rows of a batch are grouped by sequence, in order: the first `query_lens[0]` rows belong to
sequence 0, and so on. Rows past `sum(query_lens)` are padding: their KV goes to the slots given
for them (of the null block) and their output is unspecified. Nothing read from the null block, or
from a slot at or past a sequence's context length, may influence the output of another row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcache.pool import KVPool

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class Pages(NamedTuple):
    """Blocks of S sequences, one after the other: sequence i has indices[indptr[i]:indptr[i+1]]."""

    indptr: Int32s  # [S + 1]
    indices: Int32s  # [indptr[S]] block ids
    last_page_lens: Int32s  # [S] tokens in a sequence's last block, 1..block_size


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step on one rank: T query tokens of S sequences. A decode row is a query_len of 1."""

    query_lens: Int32s  # [S] tokens, each >= 1
    context_lens: Int32s  # [S] tokens of KV, this step's included
    block_tables: Int32s  # [S, max_blocks], padded with 0, the null block
    slot_mapping: Int64s  # [T] block * block_size + offset of each query token

    def __post_init__(self) -> None:
        num_seqs = len(self.query_lens)
        assert self.context_lens.shape == (num_seqs,), self.context_lens.shape
        assert self.block_tables.shape[:1] == (num_seqs,), self.block_tables.shape
        assert self.slot_mapping.shape[0] >= int(self.query_lens.sum()), (
            "a query token has no slot"
        )
        assert bool((self.query_lens <= self.context_lens).all()), (
            "context_lens include the query"
        )

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """T, padding rows included."""
        return len(self.slot_mapping)

    @property
    def num_leading_decodes(self) -> int:
        """How many sequences at the head of the step compute one token each."""
        longer = np.flatnonzero(self.query_lens > 1)
        return int(longer[0]) if len(longer) else len(self.query_lens)

    def pages(self, block_size: int) -> Pages:
        """The blocks that hold each sequence's context."""
        counts = -(-self.context_lens // block_size)
        indptr = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        used = np.arange(self.block_tables.shape[1]) < counts[:, None]
        return Pages(
            indptr,
            self.block_tables[used].astype(np.int32, copy=False),
            (self.context_lens - (counts - 1) * block_size).astype(
                np.int32, copy=False
            ),
        )

    def within(self, window: int | None, block_size: int) -> "AttentionBatch":
        """The same step without each sequence's leading blocks that no query sees. Positions then
        count from the first block that is left, which a window allows. Tokens before the window in
        that block are masked, but read: they must be finite."""
        if window is None or not self.num_seqs:
            return self
        first_seen = np.maximum(self.context_lens - self.query_lens + 1 - window, 0)
        unseen = (first_seen // block_size).astype(np.int32)
        context_lens = self.context_lens - unseen * np.int32(block_size)
        columns = unseen[:, None] + np.arange(-(-int(context_lens.max()) // block_size))
        columns = np.minimum(columns, self.block_tables.shape[1] - 1)
        tables = np.take_along_axis(self.block_tables, columns, axis=1)
        return replace(self, context_lens=context_lens, block_tables=tables)

    def part(self, first: int, last: int) -> "AttentionBatch":
        """Sequences [first, last) of the step."""
        start, stop = (
            int(self.query_lens[:first].sum()),
            int(self.query_lens[:last].sum()),
        )
        return AttentionBatch(
            query_lens=self.query_lens[first:last],
            context_lens=self.context_lens[first:last],
            block_tables=self.block_tables[first:last],
            slot_mapping=self.slot_mapping[start:stop],
        )

    def padded_to(self, num_rows: int, block_size: int) -> "AttentionBatch":
        """A decode step of `num_rows` rows; the added ones read and write the null block only."""
        missing = num_rows - self.num_seqs
        assert missing >= 0 and self.num_tokens == self.num_seqs, (
            num_rows,
            self.num_tokens,
        )
        if missing == 0:
            return self
        ones = np.ones(missing, np.int32)
        return AttentionBatch(
            query_lens=np.concatenate([self.query_lens, ones]),
            context_lens=np.concatenate([self.context_lens, ones]),
            block_tables=np.pad(self.block_tables, ((0, missing), (0, 0))),
            slot_mapping=np.concatenate(
                [self.slot_mapping, np.arange(missing, dtype=np.int64) % block_size]
            ),
        )


class Kind(NamedTuple):
    """The properties that layers must share to be served by one plan of a step.

    Attributes:
        window: number of tokens that a token sees, itself included; None: all before it.
        soft_cap: scores become tanh(score / cap) * cap before the softmax; 0: no cap.
    """

    window: int | None = None
    soft_cap: float = 0.0


class LayerAttention(NamedTuple):
    """The attention of one layer.

    Attributes:
        sinks: float32 [num_q_heads], of this rank: for each query head, a logit that takes part in
            the softmax and has no value.
    """

    kind: Kind = Kind()
    sinks: Tensor | None = None


def leave_to_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Scales out [T, H, D] in place by the share of the softmax that sinks [H] leave to the other
    scores, whose log-sum-exps are lse [T, H]."""
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))


class Turn(NamedTuple):
    """Norms and rotary embedding of queries and keys, before attention and storing.

    Attributes:
        cos_sin: float32 [T, head_dim], of the rotation of heads' halves: cosines, then sines.
        norms: two of [head_dim]: weights of the root-mean-square norms of query heads and of key
            heads, applied before the rotation.
        eps: of these norms.
    """

    cos_sin: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


class AttentionBackend(ABC):
    """Attention of one rank over its KV pool. One step at a time; not thread-safe.

    Args:
        pool: this rank's KV. Its `num_heads` are the KV heads of this rank.
        num_q_heads: query heads of this rank, a multiple of the pool's KV heads.
        head_dim: elements per query head (MLA: of the latent and rope parts together).
        scale: factor of scores before the softmax.
        layers: the attention of each of the pool's layers; empty: all layers see all tokens.

    FP8 elements are read as stored: the keys' scale is multiplied into `scale`, the values' scale
    into the output, so that dequantising costs nothing.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        num_q_heads: int,
        head_dim: int,
        scale: float,
        layers: Sequence[LayerAttention] = (),
    ) -> None:
        assert len(layers) in (0, pool.layout.num_layers), len(layers)
        assert num_q_heads % pool.layout.num_heads == 0, (
            num_q_heads,
            pool.layout.num_heads,
        )
        assert head_dim == pool.layout.head_dim, (head_dim, pool.layout.head_dim)
        self.pool = pool
        self.num_q_heads = num_q_heads
        self.num_kv_heads = pool.layout.num_heads
        self.head_dim = head_dim
        self.scale = scale
        self.layers = tuple(layers) or (LayerAttention(),) * pool.layout.num_layers
        self.kinds = tuple(dict.fromkeys(layer.kind for layer in self.layers))

    @property
    def num_groups(self) -> int:
        """Number of KV groups: blocks in a table for each block_size tokens."""
        return 1

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory, beside the pool, for intermediate results of steps."""
        return 0

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Takes the batch of the step whose `forward` calls follow; once per step."""

    def reserve_captured(self, max_seqs: int, max_blocks: int) -> None:
        """Makes room for decode steps in CUDA graphs, of sequences of up to `max_blocks` blocks.

        Raises:
            NotImplementedError: the backend's `forward` cannot be captured.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be captured in CUDA graphs"
        )

    def plan_captured(self, batch: AttentionBatch, num_rows: int) -> None:
        """`plan` for a step of single query tokens, padded to `num_rows` rows.

        The `forward` calls that follow may be captured. Replaying them later, after another
        `plan_captured` of the same `num_rows`, runs that plan's batch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be captured in CUDA graphs"
        )

    @property
    def rotates(self) -> bool:
        """Whether `forward` takes q and k before rope, with `cos_sin`."""
        return False

    def always_with_lse(self) -> None:
        """Announces that all forwards have `lse`: some kernels must be planned for it."""
        return None

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
        """Writes the step's K and V of `layer`, then attends causally.

        Args:
            q: [T, num_q_heads, head_dim], rope applied.
            k, v: [T, num_kv_heads, head_dim], rope applied to k; may be changed in place to the
                stored elements.
            turn: norms and rope still to be applied to q and k, which may be changed in place.
                Only for a backend that `rotates`.
            lse: float32 [T, num_q_heads], filled with the natural log-sum-exp of the scores without
                sinks.

        Returns:
            [T, num_q_heads, head_dim] in q's dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} serves MLA models only")

    def forward_latent(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Writes the step's latents of `layer`, then attends over them (MLA, weights absorbed).

        Args:
            q_latent: [T, num_q_heads, R], the query times the key up-projection.
            q_rope: [T, num_q_heads, P].
            latent: [T, R + P], the normed KV latent and the roped shared key.
            lse: as in `forward`.

        Returns:
            [T, num_q_heads, R] in q_latent's dtype, to be multiplied by the value up-projection.
        """
        raise NotImplementedError(f"{type(self).__name__} does not serve MLA models")
