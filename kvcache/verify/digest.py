"""Digests of KV: equal on any two engines that hold the same KV, in whatever layout.

A *row* has the D elements (head_dim) of one head of one token in one layer and
component. The elements of a row are contiguous in every layout. The value of a row is
computed in three steps:

1. Multiply each word of the row by the odd key of the word's position; add the
   products up.
2. Add the key of the token and the key of (layer, component, head).
3. Scramble the sum.

A digest has one sum for each head and each chunk of tokens: the sum of the values of
the rows of that head and chunk. So the sums of ranks that share a sequence's tokens can
be added up. All arithmetic is modulo 2^64.

One wrong bit always changes a sum: a bit times an odd key is not 0, and scrambling maps
different numbers to different numbers. The keys are pseudorandom and different for each
lease, so several wrong bits are missed with a probability of about 1 in 2^32 per pull.

A *sample* covers, for each chunk, all tokens and heads of one in 16 layers. The layers
differ between chunks and leases. A sample contains rows of every block, so it finds
blocks that are wrong, stale or missing. A single wrong bit is in the sample with a
probability of 1 in 16.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from kvcache.pool import KVPool
from kvcache.transfer.plan.endpoint import Endpoint, IntArray
from kvcache.verify.scope import MULTIPLIERS, DigestPart, KeyKind, Scope, U64s
from protocol.process.logging import get_logger

logger = get_logger(__name__)

OnPart = Callable[[DigestPart | None], None]  # called with None if the digest failed

_WORDS = torch.int32, torch.int16, torch.int8
# A digest is computed in pieces. A piece of this size takes about 2 ms on a CPU. During
# that time, the transfer thread does nothing else.
_CPU_PIECE_BYTES: Final = 2 << 20
# On a GPU, computing the digest of a piece of this size takes about 0.2 ms. Preparing
# the launch of the kernel takes about as long.
_GPU_PIECE_BYTES: Final = 256 << 20
# Bytes that `_values` reads at a time. malloc returns the memory of larger temporary
# tensors to the system after each use, and touching the pages of new memory is slow.
_MAX_TEMPORARY_BYTES: Final = 256 << 10


class Rows(NamedTuple):
    """The rows of T tokens, R rows for each token.

    R is heads x covered layers x components. The chunk of a token decides which layers
    are covered.

    Attributes:
        first_rows: i64 [T]: the index of each token's first row in the pool.
        token_keys: i64 [T]: the key of each token.
        chunks: i64 [T]: each token's chunk, as an index into `row_offsets` and
            `row_keys`.
        row_offsets: i64 [chunks, R]: the distance, in rows, from a token's first row to
            each of its rows.
        row_keys: i64 [chunks, R]: the key of each row's (layer, component, head).
    """

    first_rows: torch.Tensor
    token_keys: torch.Tensor
    chunks: torch.Tensor
    row_offsets: torch.Tensor
    row_keys: torch.Tensor


class _Digest(NamedTuple):
    """A digest in progress. Each `next(pieces)` computes one piece."""

    name: str
    pieces: Generator[None, None, DigestPart]
    on_part: OnPart


class Digester:
    """Computes digest parts of one rank. Only one thread may use a Digester.

    Concurrent digests take turns after each piece.

    Args:
        total_kv_heads: Number of KV heads of the model.

    Attributes:
        values: The function that computes the value of each row, with torch or with the
            kernel.
        piece_bytes: Bytes of KV in one piece.
    """

    def __init__(self, endpoint: Endpoint, total_kv_heads: int, pool: KVPool) -> None:
        self._endpoint = endpoint
        self._pool = pool
        self._layout = pool.layout
        self._heads = endpoint.heads(total_kv_heads)
        self._total_heads = total_kv_heads
        row_bytes = pool.layout.head_dim * pool.layout.itemsize
        word = next(dtype for dtype in _WORDS if row_bytes % dtype.itemsize == 0)
        # The pool's memory as [rows, words of a row].
        self._words = pool.flat_bytes.view(word).view(-1, row_bytes // word.itemsize)
        self._digests: deque[_Digest] = deque()
        self.values = _values
        self._stream = None
        self.piece_bytes = _CPU_PIECE_BYTES
        if pool.device.type == "cuda":
            self.piece_bytes = _GPU_PIECE_BYTES
            # 0 is the lowest priority of a CUDA stream. The engine's stream has a
            # higher priority, so the engine's kernels run first.
            self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                pool.device, priority=0
            )
            self._compile()

    def _compile(self) -> None:
        """Compiles the kernel by launching it, so that no later digest has to wait.

        If the kernel cannot be compiled, torch computes all digests.
        """
        self.values = _values_by_kernel
        parts: list[DigestPart | None] = []
        blocks = [0] * self._endpoint.groups.count  # one block of each layer group
        self.begin("that compiles the kernel", Scope("", 0, 1), blocks, parts.append)
        while self._digests:
            self.drive()
        if None in parts:
            # The kernel cannot be compiled; `drive` has logged the error.
            self.values = _values

    @property
    def is_busy(self) -> bool:
        """True if a digest is in progress."""
        return bool(self._digests)

    def begin(
        self, name: str, scope: Scope, blocks: Sequence[int], on_part: OnPart
    ) -> None:
        """Starts a digest.

        Args:
            name: Identifies the digest, for `stop` and for logs.
            blocks: This engine's blocks of the sequence, from token 0 on.
            on_part: Called by `drive` with the result.
        """
        pieces = self._compute_part(scope, np.asarray(blocks, np.int64))
        self._digests.append(_Digest(name, pieces, on_part))

    def stop(self, name: str) -> None:
        """Drops a digest: `on_part` will not be called.

        A kernel may still read the digest's blocks, which is harmless.
        """
        self._digests = deque(d for d in self._digests if d.name != name)

    def drive(self) -> bool:
        """Computes or launches one piece, or ends one digest. Never waits for a GPU.

        Returns:
            False if there was nothing to do, or if the GPU still computes a piece.
        """
        if not self._digests:
            return False  # checked first, because the transfer thread calls this often
        if self._stream is not None and not self._stream.query():
            return False
        digest = self._digests.popleft()
        try:
            with torch.cuda.stream(self._stream):
                next(digest.pieces)
        except StopIteration as end:
            digest.on_part(end.value)
        except Exception:
            logger.exception("digest %s failed", digest.name)
            digest.on_part(None)
        else:
            self._digests.append(digest)
        return True

    def _compute_part(
        self, scope: Scope, blocks: IntArray
    ) -> Generator[None, None, DigestPart]:
        """Computes this rank's part of a digest; yields after each piece."""
        layout = self._layout
        stripe = self._endpoint.stripe
        groups = self._endpoint.groups
        layers = scope.layers(layout.num_layers)
        all_layers_bytes = self.piece_bytes * layout.num_layers / layers.shape[1]
        piece_tokens = max(1, int(all_layers_bytes / layout.token_bytes))
        sums = self._tensor(np.zeros((len(scope.chunks), len(self._heads)), np.int64))
        word_numbers = np.arange(self._words.shape[1], dtype=np.uint64)
        word_keys = scope.keys(KeyKind.WORD, word_numbers)
        odd_word_keys = self._tensor(word_keys | np.uint64(1))
        ranges = groups.token_ranges(scope.start, scope.stop, scope.min_resume_tokens)
        for group, token_range in enumerate(ranges):
            tokens = np.arange(token_range.start, token_range.stop)
            is_local = tokens // layout.block_size % stripe.size == stripe.rank
            tokens = tokens[is_local]
            table = blocks[group :: groups.count]
            first_layer = group * layout.num_layers
            for start in range(0, len(tokens), piece_tokens):
                piece = tokens[start : start + piece_tokens]
                rows, first_chunk = self._rows(scope, table, piece, layers, first_layer)
                values = self.values(self._words, odd_word_keys, rows)
                by_head = values.view(len(values), len(self._heads), -1).sum(-1)
                sums.index_add_(0, rows.chunks + first_chunk, by_head)
                yield
        return DigestPart(
            copy=self._endpoint.rank // self._endpoint.dcp,
            first_head=self._heads.start,
            sums=sums.cpu().numpy().T.tobytes(),
        )

    def _rows(
        self,
        scope: Scope,
        blocks: IntArray,
        tokens: IntArray,
        layers: IntArray,
        first_layer: int,
    ) -> tuple[Rows, int]:
        """Returns the rows of some tokens in the covered layers of a layer group.

        Args:
            blocks: The group's blocks of the sequence.
            tokens: i64 [T], in ascending order; at least one.
            layers: The result of `scope.layers`.
            first_layer: Number of the group's first layer, counted over all groups.

        Returns:
            The rows, and the index of the first token's chunk in the digest.
        """
        layout = self._layout
        strides = {
            axis: stride // layout.head_dim for axis, stride in layout.strides.items()
        }
        tokens_per_block = self._endpoint.stripe.tokens_per_block
        first_rows = blocks[tokens // tokens_per_block] * strides["B"]
        first_rows += tokens % layout.block_size * strides["N"]
        chunks = tokens // scope.chunk_tokens - scope.chunks.start
        first = int(chunks[0])
        stop = int(chunks[-1]) + 1
        # Broadcast to [chunks, heads, layers, components].
        head = np.arange(len(self._heads))[:, None, None]
        layer = layers[first:stop, None, :, None]
        component = np.arange(layout.num_components)
        offsets = head * strides["H"] + layer * strides["L"] + component * strides["C"]
        numbers = (first_layer + layer) * layout.num_components + component
        numbers = numbers * self._total_heads + head + self._heads.start
        numbers = numbers.reshape(stop - first, -1)
        rows = Rows(
            first_rows=self._tensor(first_rows),
            token_keys=self._tensor(
                scope.keys(KeyKind.TOKEN, tokens.astype(np.uint64))
            ),
            chunks=self._tensor(chunks - first),
            row_offsets=self._tensor(offsets.reshape(stop - first, -1)),
            row_keys=self._tensor(
                scope.keys(KeyKind.LAYER_COMPONENT_HEAD, numbers.astype(np.uint64))
            ),
        )
        return rows, first

    def _tensor(self, numbers: IntArray | U64s) -> torch.Tensor:
        """Copies 64-bit numbers into an i64 tensor on the pool's device, bit by bit."""
        return torch.from_numpy(numbers.view(np.int64)).to(self._pool.device)


def _values_by_kernel(
    words: torch.Tensor, word_keys: torch.Tensor, rows: Rows
) -> torch.Tensor:
    # Imported here, because the module needs Triton, which only GPU machines have.
    from kvcache.verify.digest_kernel import values

    return values(words, word_keys, rows)


def _values(words: torch.Tensor, word_keys: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Computes the value of each row, as the module docstring defines it.

    Args:
        words: [rows of the pool, words of a row], in the words' integer dtype.
        word_keys: i64 [words of a row], odd.

    Returns:
        i64 [T, R], with T and R as in `Rows`.
    """
    offsets = rows.row_offsets[rows.chunks]
    row_keys = rows.row_keys[rows.chunks]
    index = (rows.first_rows[:, None] + offsets).view(-1)
    sums = torch.empty_like(index)
    count = max(1, _MAX_TEMPORARY_BYTES // (words.shape[1] * words.itemsize))
    for start in range(0, len(index), count):
        selected = words.index_select(0, index[start : start + count])
        torch.sum(selected * word_keys, -1, out=sums[start : start + count])
    value = sums.view(offsets.shape).add_(row_keys).add_(rows.token_keys[:, None])
    # This is scope.scramble on signed numbers: `>>` copies the sign bit, so the upper
    # 33 bits are masked.
    for multiplier in MULTIPLIERS:
        value ^= (value >> 33) & ((1 << 31) - 1)
        value *= multiplier - (1 << 64)
    return value ^ ((value >> 33) & ((1 << 31) - 1))
