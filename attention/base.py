"""The interface of attention backends: a step's batch, and the forward of a layer.

A step runs T query tokens of S sequences through all layers. `AttentionBatch` describes
the step once, in host arrays. `plan` derives the backend's indices from it. `forward`
is then called once per layer: it writes this step's keys and values into the pool by
slot, and attends over each sequence's block table.

Rows of a batch are grouped by sequence, in order: the first `query_lens[0]` rows belong
to sequence 0, and so on. Rows past `sum(query_lens)` are padding: their slots are in
the null block, and their output is unspecified. Values read from the null block, or
from a slot at or past a sequence's context length, must not influence the output of
rows that are not padding.
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
    """The blocks of S sequences in compressed sparse row form.

    Sequence i has the blocks `indices[indptr[i] : indptr[i + 1]]`.
    """

    indptr: Int32s  # [S + 1]
    indices: Int32s  # [indptr[S]] block ids
    last_page_lens: Int32s  # [S] tokens in a sequence's last block, 1..block_size


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step on one rank: T query tokens of S sequences.

    A sequence with one query token is called a decode row. A step that contains only
    decode rows is called a decode step.
    """

    query_lens: Int32s  # [S] tokens, each >= 1
    context_lens: Int32s  # [S] tokens of KV, including this step's query tokens
    block_tables: Int32s  # [S, max_blocks] block ids, padded with 0, the null block
    slot_mapping: Int64s  # [T] block * block_size + offset of each query token

    def __post_init__(self) -> None:
        num_seqs = len(self.query_lens)
        num_queries = int(self.query_lens.sum())
        assert self.context_lens.shape == (num_seqs,), self.context_lens.shape
        assert self.block_tables.shape[:1] == (num_seqs,), self.block_tables.shape
        assert self.slot_mapping.shape[0] >= num_queries, "a query token has no slot"
        includes_query = bool((self.query_lens <= self.context_lens).all())
        assert includes_query, "context_lens must include the query tokens"

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """The number of rows T, including padding rows."""
        return len(self.slot_mapping)

    @property
    def num_leading_decodes(self) -> int:
        """Number of decode rows before the first sequence with several query tokens."""
        prefills = np.flatnonzero(self.query_lens > 1)
        return int(prefills[0]) if len(prefills) else len(self.query_lens)

    def pages(self, block_size: int) -> Pages:
        """Returns the blocks that hold each sequence's context."""
        counts = -(-self.context_lens // block_size)
        indptr = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        is_used = np.arange(self.block_tables.shape[1]) < counts[:, None]
        last_page_lens = self.context_lens - (counts - 1) * block_size
        return Pages(
            indptr=indptr,
            indices=self.block_tables[is_used].astype(np.int32, copy=False),
            last_page_lens=last_page_lens.astype(np.int32, copy=False),
        )

    def limit_to_window(self, window: int | None, block_size: int) -> "AttentionBatch":
        """Returns this step without each sequence's leading blocks that no query sees.

        In the returned step, positions count from the first block that a query sees.
        This shift is allowed, because a sliding window depends only on the distance of
        tokens. The first block may contain tokens before the window. Kernels mask these
        tokens, but may still read their KV, which must be finite.
        """
        if window is None or not self.num_seqs:
            return self
        first_seen = np.maximum(self.context_lens - self.query_lens + 1 - window, 0)
        unseen_blocks = (first_seen // block_size).astype(np.int32)
        context_lens = self.context_lens - unseen_blocks * np.int32(block_size)
        max_blocks = -(-int(context_lens.max()) // block_size)
        columns = unseen_blocks[:, None] + np.arange(max_blocks)
        columns = np.minimum(columns, self.block_tables.shape[1] - 1)
        tables = np.take_along_axis(self.block_tables, columns, axis=1)
        return replace(self, context_lens=context_lens, block_tables=tables)

    def select_sequences(self, first: int, last: int) -> "AttentionBatch":
        """Returns the part of this step that computes sequences [first, last)."""
        start = int(self.query_lens[:first].sum())
        stop = int(self.query_lens[:last].sum())
        return AttentionBatch(
            query_lens=self.query_lens[first:last],
            context_lens=self.context_lens[first:last],
            block_tables=self.block_tables[first:last],
            slot_mapping=self.slot_mapping[start:stop],
        )

    def padded_to(self, num_rows: int, block_size: int) -> "AttentionBatch":
        """Returns this decode step padded to `num_rows` sequences of one query token.

        The added sequences read and write the null block only.
        """
        num_added = num_rows - self.num_seqs
        is_decode_step = self.num_tokens == self.num_seqs
        assert num_added >= 0 and is_decode_step, (num_rows, self.num_tokens)
        if num_added == 0:
            return self
        ones = np.ones(num_added, np.int32)
        null_slots = np.arange(num_added, dtype=np.int64) % block_size
        return AttentionBatch(
            query_lens=np.concatenate([self.query_lens, ones]),
            context_lens=np.concatenate([self.context_lens, ones]),
            block_tables=np.pad(self.block_tables, ((0, num_added), (0, 0))),
            slot_mapping=np.concatenate([self.slot_mapping, null_slots]),
        )


class AttentionKind(NamedTuple):
    """The properties that layers must have in common to use one plan of a step.

    Attributes:
        window: Number of tokens that a token sees, including itself. None: a token sees
            itself and all tokens before it.
        soft_cap: Scores become tanh(score / soft_cap) * soft_cap before the softmax; 0:
            no cap.
    """

    window: int | None = None
    soft_cap: float = 0.0


class LayerAttention(NamedTuple):
    """The attention of one layer.

    Attributes:
        sinks: float32 [num_q_heads], for this rank's heads: one extra logit per query
            head. It takes part in the head's softmax, but has no value vector. None: no
            sinks.
    """

    kind: AttentionKind = AttentionKind()
    sinks: Tensor | None = None


def scale_for_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Corrects an attention output for sinks that its softmax did not include.

    Scales `out` [T, H, D] in place by the share of the softmax that the sinks [H] leave
    to the tokens' scores. `lse` [T, H] are natural log-sum-exps of the tokens' scores.
    """
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))


class RopeNormArgs(NamedTuple):
    """Arguments of the norms and the rotary embedding of queries and keys.

    A backend applies the norms and the rotation before it stores the keys and attends.

    Attributes:
        cos_sin: float32 [T, head_dim]: the cosines of a token's angles, then the sines.
            Each angle rotates an element of a head's first half against the element at
            the same index of the second half.
        norms: Two tensors of [head_dim]: weights of the root-mean-square norms of query
            heads and of key heads. The norms are applied before the rotation.
        eps: Epsilon of these norms.
    """

    cos_sin: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


class AttentionBackend(ABC):
    """Attention of one rank over its KV pool.

    A backend runs one step at a time and is not thread-safe.

    Args:
        pool: This rank's KV. The `num_heads` of its layout are this rank's KV heads.
        num_q_heads: Query heads of this rank, a multiple of the pool's KV heads.
        head_dim: Elements per query head (MLA: of the latent and rope parts together).
        scale: Factor of scores before the softmax.
        layers: The attention of each of the pool's layers. Empty: no layer has a
            window, a soft cap or sinks.

    Most kernels read FP8 KV without applying its scales. The keys' scale is multiplied
    into `scale`, and the values' scale into the output. Some backends first copy FP8
    blocks to 16 bits.
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
        layout = pool.layout
        assert len(layers) in (0, layout.num_layers), len(layers)
        assert num_q_heads % layout.num_heads == 0, (num_q_heads, layout.num_heads)
        assert head_dim == layout.head_dim, (head_dim, layout.head_dim)
        self.pool = pool
        self.num_q_heads = num_q_heads
        self.num_kv_heads = layout.num_heads
        self.head_dim = head_dim
        self.scale = scale
        self.layers = tuple(layers) or (LayerAttention(),) * layout.num_layers
        self.kinds = tuple(dict.fromkeys(layer.kind for layer in self.layers))

    @property
    def num_groups(self) -> int:
        """Number of KV groups: groups of layers that share blocks (kvcache/groups.py).

        A block table has this many blocks for every block_size tokens.
        """
        return 1

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that hold intermediate results of steps."""
        return 0

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Plans a step.

        Must be called once per step, before `forward` or `forward_latent`.
        """

    def reserve_graph_buffers(self, max_seqs: int, max_blocks: int) -> None:
        """Allocates buffers for decode steps that run as CUDA graphs.

        Args:
            max_seqs: Sequences of the largest step that runs as a graph.
            max_blocks: Blocks of the longest sequence of such a step.

        Raises:
            NotImplementedError: The backend's `forward` cannot be captured.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be captured in CUDA graphs"
        )

    @property
    def finds_runs(self) -> bool:
        """True if `plan_for_graph` looks for runs, which are consecutive rows that read
        the same context.
        """
        return False

    def plan_for_graph(
        self, batch: AttentionBatch, num_rows: int, *, captures_runs: bool = False
    ) -> bool:
        """Plans a decode step, padded to `num_rows` sequences, for a CUDA graph.

        The following calls of `forward` may be captured in a CUDA graph. To replay that
        graph for another batch, call this method again with the same `num_rows`.

        Args:
            captures_runs: The following calls of `forward` also launch the kernels for
                runs, whether the step has runs or not.

        Returns:
            Whether the step has runs. If so, only a graph that was captured with
            `captures_runs` may be replayed for it.

        Raises:
            NotImplementedError: The backend's `forward` cannot be captured.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be captured in CUDA graphs"
        )

    @property
    def applies_rope(self) -> bool:
        """True if `forward` accepts `rope_norm`, and then applies norms and rope."""
        return False

    def require_lse(self) -> None:
        """Declares that every call of `forward` or `forward_latent` will pass `lse`.

        Must be called before the first `plan`, because plans of some backends depend on
        whether `lse` is needed.
        """
        return None

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
        """Writes the step's K and V of `layer`, then attends causally.

        Args:
            q: [T, num_q_heads, head_dim], rope applied unless `rope_norm` is given.
            k, v: [T, num_kv_heads, head_dim], rope applied to k unless `rope_norm` is
                given. The backend may overwrite k and v with the values that later
                steps will read from the pool.
            rope_norm: Norms and rope that the backend must apply to q and k, in place.
                Only for a backend that `applies_rope`.
            lse: float32 [T, num_q_heads], filled with the natural log-sum-exp of the
                scores without sinks.

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
        """Writes the step's latents of `layer`, then attends causally over latents.

        This is multi-head latent attention (MLA) with absorbed weights.

        Args:
            q_latent: [T, num_q_heads, R], the part of the queries without rope, times
                the key up-projection.
            q_rope: [T, num_q_heads, P], the part of the queries with rope applied.
            latent: [T, R + P], the normed KV latent, followed by the rotated key part.
                All heads share both.
            lse: As in `forward`.

        Returns:
            [T, num_q_heads, R] in q_latent's dtype, to be multiplied by the value
            up-projection.
        """
        raise NotImplementedError(f"{type(self).__name__} does not serve MLA models")
