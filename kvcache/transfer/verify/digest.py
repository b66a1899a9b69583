"""Digests of KV: the same number on any two engines that hold the same, wherever it lies.

A *row* is what one head of one token has in one layer and component: D elements, next to each other
in every layout. Its words, times an odd key each, are added up; key numbers of the token and of
(layer, component, head) are added, and the sum is scrambled. The digest of a chunk of tokens and
a head is the sum of its rows, so the parts of ranks that share a sequence's tokens add up. All is
modulo 2^64. One wrong bit always changes a sum: a bit times an odd key is not 0, and scrambling
maps no two numbers to one. Any other fault is missed about once in 2^32 pulls, each time by chance:
the keys depend on the lease.

A *sample* has, of each chunk, all tokens and heads of one layer in 16, other ones for
each chunk and lease. Blocks that are wrong, stale or missing are in it, one bit with that chance.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvcache.pool import KVPool
from kvcache.transfer.plan.endpoint import Endpoint, IntArray
from kvcache.transfer.verify.scope import FACTORS, DigestPart, Scope, U64s
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_WORDS = torch.int32, torch.int16, torch.int8
_CPU_PIECE_BYTES: Final = 1 << 20  # a millisecond, in which nothing else is driven
_GPU_PIECE_BYTES: Final = 16 << 20
_END: Final = object()


class Rows(NamedTuple):
    """Some tokens' rows; where `[..., G]` stands, G = heads x looked-at layers x components."""

    tokens: torch.Tensor  # i64[T], rows from the pool's first one to the token
    token_keys: torch.Tensor  # i64[T]
    chunks: torch.Tensor  # i64[T], index into the next two
    groups: torch.Tensor  # i64[chunks, G], rows from a token to these
    group_keys: torch.Tensor  # i64[chunks, G]


class Digester:
    """One rank's; one thread uses it.

    Args:
        total_kv_heads: of the model.
    """

    def __init__(self, endpoint: Endpoint, total_kv_heads: int, pool: KVPool) -> None:
        self.endpoint, self.pool = endpoint, pool
        self.heads, self.total_heads = endpoint.heads(total_kv_heads), total_kv_heads
        nbytes = pool.layout.head_dim * pool.layout.itemsize
        word = next(dtype for dtype in _WORDS if nbytes % dtype.itemsize == 0)
        self.words = pool.flat_bytes.view(word).view(-1, nbytes // word.itemsize)  # of each row
        self.values, self.piece_bytes, self._stream = _values, _CPU_PIECE_BYTES, None
        if pool.device.type == "cuda":
            self.piece_bytes = _GPU_PIECE_BYTES
            # The lowest priority, as of copies (move/place.py).
            self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]
            self._compile()

    def _compile(self) -> None:
        """Runs all there is to launch once, before anybody waits for it."""
        try:
            from kvcache.transfer.verify.digest_kernel import values  # needs Triton

            self.values = values
            self._run_once()
        except Exception as error:  # whatever the driver or the compiler lacks
            logger.warning("KV digests are computed without a kernel, slowly: %r", error)
            self.values = _values
            self._run_once()

    def _run_once(self) -> None:
        digest = RankDigest(self, Scope("", 0, 1), [0])
        while digest.part is None:
            digest.step()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.pool.device), torch.cuda.stream(self._stream):
            yield


class RankDigest:
    """One rank's part of a digest, computed in pieces.

    Args:
        blocks: of this engine, from token 0 of the sequence on.

    Attributes:
        part: once all pieces are done.
    """

    def __init__(self, digester: Digester, scope: Scope, blocks: Sequence[int]) -> None:
        self._of, self._scope, self._blocks = digester, scope, np.asarray(blocks, np.int64)
        self.part: DigestPart | None = None
        self._launched: Any = None  # an event
        self._pieces = self._run()

    def step(self) -> bool:
        """Begins or does one more piece; whether it did. Never waits for a GPU."""
        if self._launched is not None and not self._launched.query():
            return False
        with self._of.on_stream():
            if next(self._pieces, _END) is not _END and self._of.pool.device.type == "cuda":
                self._launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._launched.record()
        return True

    def _run(self) -> Iterator[None]:
        of, scope = self._of, self._scope
        layout, stripe = of.pool.layout, of.endpoint.stripe
        tokens = np.arange(scope.start, scope.stop)
        tokens = tokens[tokens // layout.block_size % stripe.size == stripe.rank]
        layers = scope.layers(layout.num_layers)
        token_bytes = layout.token_bytes * layers.shape[1] / layout.num_layers
        count = max(1, int(of.piece_bytes / token_bytes))
        self._sums = self._tensor(np.zeros((len(scope.chunks), len(of.heads)), np.int64))
        numbers = np.arange(of.words.shape[1], dtype=np.uint64)
        self._word_keys = self._tensor(scope.keys(0, numbers) | np.uint64(1))
        for first in range(0, len(tokens), count):
            self._add(tokens[first : first + count], layers)
            yield
        sums = self._sums.cpu().numpy().T.tobytes()
        self.part = DigestPart(of.endpoint.rank // of.endpoint.dcp, of.heads.start, sums)

    def _add(self, tokens: IntArray, layers: IntArray) -> None:
        rows, first = self._rows(tokens, layers)
        values = self._of.values(self._of.words, self._word_keys, rows)
        by_head = values.view(len(tokens), len(self._of.heads), -1).sum(-1)
        self._sums.index_add_(0, rows.chunks + first, by_head)

    def _rows(self, tokens: IntArray, layers: IntArray) -> tuple[Rows, int]:
        """Those of the tokens, and which chunk of the digest is the first of them."""
        scope, layout, stripe = self._scope, self._of.pool.layout, self._of.endpoint.stripe
        strides = {axis: step // layout.head_dim for axis, step in layout.strides.items()}
        starts = self._blocks[tokens // stripe.tokens_per_block] * strides["B"]
        starts += tokens % layout.block_size * strides["N"]
        chunks = tokens // scope.chunk_tokens - scope.chunks.start
        first, stop = int(chunks[0]), int(chunks[-1]) + 1
        head = np.arange(len(self._of.heads))[:, None, None]
        layer, component = layers[first:stop, None, :, None], np.arange(layout.num_components)
        groups = head * strides["H"] + layer * strides["L"] + component * strides["C"]
        names = (layer * layout.num_components + component) * self._of.total_heads
        names = (names + head + self._of.heads.start).reshape(stop - first, -1)
        rows = Rows(
            self._tensor(starts),
            self._tensor(scope.keys(1, tokens.astype(np.uint64))),
            self._tensor(chunks - first),
            self._tensor(groups.reshape(stop - first, -1)),
            self._tensor(scope.keys(2, names.astype(np.uint64))),
        )
        return rows, first

    def _tensor(self, numbers: IntArray | U64s) -> torch.Tensor:
        return torch.from_numpy(numbers.view(np.int64)).to(self._of.pool.device)


def _values(words: torch.Tensor, word_keys: torch.Tensor, rows: Rows) -> torch.Tensor:
    """i64[T, G], what each row adds."""
    groups, keys = rows.groups[rows.chunks], rows.group_keys[rows.chunks]
    index = rows.tokens[:, None] + groups
    sums = (words.index_select(0, index.view(-1)) * word_keys).sum(-1).view(index.shape)
    value = sums.add_(keys).add_(rows.token_keys[:, None])
    for factor in FACTORS:
        value ^= (value >> 33) & ((1 << 31) - 1)
        value *= factor - (1 << 64)
    return value ^ ((value >> 33) & ((1 << 31) - 1))
