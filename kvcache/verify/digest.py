"""Digests of KV: equal on any two engines that hold the same KV, in whatever layout.

A *row* has the D elements of one head of one token in one layer and component, next to each other
in every layout. Its words, times an odd key each, are added up; key numbers of the token and of
(layer, component, head) are added, and the sum is scrambled. The digest of a chunk of tokens and
a head is the sum of its rows, so the parts of ranks that share a sequence's tokens add up. All is
modulo 2^64. One wrong bit always changes a sum: a bit times an odd key is not 0, and scrambling
maps no two numbers to one. Any other fault is missed about once in 2^32 pulls, each time by chance:
the keys depend on the lease.

A *sample* has, of each chunk, all tokens and heads of one layer in 16, other ones for
each chunk and lease. Blocks that are wrong, stale or missing are in it, one bit with that chance.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from kvcache.pool import KVPool
from kvcache.transfer.plan.endpoint import Endpoint, IntArray
from kvcache.verify.scope import FACTORS, DigestPart, Scope, U64s
from protocol.process.logging import get_logger

logger = get_logger(__name__)

Tell = Callable[[DigestPart | None], None]  # None: it has failed

_WORDS = torch.int32, torch.int16, torch.int8
_CPU_PIECE_BYTES: Final = 2 << 20  # two milliseconds, in which nothing else is driven
_GPU_PIECE_BYTES: Final = 256 << 20  # a launch of some 0.2 ms takes as long to prepare
_CACHED_BYTES: Final = (
    256 << 10
)  # with more, malloc returns and faults in pages time and again


class Rows(NamedTuple):
    """Some tokens' rows; where `[..., G]` stands, G = heads x looked-at layers x components."""

    tokens: torch.Tensor  # i64[T], rows from the pool's first one to the token
    token_keys: torch.Tensor  # i64[T]
    chunks: torch.Tensor  # i64[T], index into the next two
    groups: torch.Tensor  # i64[chunks, G], rows from a token to these
    group_keys: torch.Tensor  # i64[chunks, G]


class Digester:
    """Computes the parts of one rank, which take turns, a piece each. One thread uses it.

    Args:
        total_kv_heads: of the model.
    """

    def __init__(self, endpoint: Endpoint, total_kv_heads: int, pool: KVPool) -> None:
        self._endpoint, self._pool, self._layout = endpoint, pool, pool.layout
        self._heads, self._total_heads = endpoint.heads(total_kv_heads), total_kv_heads
        nbytes = pool.layout.head_dim * pool.layout.itemsize
        word = next(dtype for dtype in _WORDS if nbytes % dtype.itemsize == 0)
        self._words = pool.flat_bytes.view(word).view(
            -1, nbytes // word.itemsize
        )  # by row
        self._open: deque[tuple[str, Generator[None, None, DigestPart], Tell]] = deque()
        self.values, self._stream = _values, None
        self.piece_bytes = _CPU_PIECE_BYTES
        if pool.device.type == "cuda":
            self.piece_bytes = _GPU_PIECE_BYTES
            # The lowest priority, as of copies (move/place.py).
            self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]
            self._compile()

    def _compile(self) -> None:
        """Launches all there is once, before anybody waits for it."""
        self.values, told = _by_kernel, list[DigestPart | None]()
        self.begin("to compile its kernel", Scope("", 0, 1), [0], told.append)
        while self._open:
            self.drive()
        if None in told:  # whatever the driver or the compiler lacks, as was logged
            self.values = _values

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def begin(self, name: str, scope: Scope, blocks: Sequence[int], tell: Tell) -> None:
        """
        Args:
            blocks: of this engine, from token 0 of the sequence on.
        """
        self._open.append((name, self._part(scope, np.asarray(blocks, np.int64)), tell))

    def stop(self, name: str) -> None:
        """Drops a digest: `tell` is not called. A kernel that still reads blocks is harmless."""
        self._open = deque(one for one in self._open if one[0] != name)

    def drive(self) -> bool:
        """Does or begins one piece, or ends one digest; whether it did. Never waits for a GPU."""
        if not self._open or (self._stream is not None and not self._stream.query()):
            return False
        name, pieces, tell = self._open.popleft()
        try:
            with torch.cuda.stream(self._stream):
                next(pieces)
        except StopIteration as end:
            tell(end.value)
        except Exception:
            logger.exception("digest %s", name)
            tell(None)
        else:
            self._open.append((name, pieces, tell))
        return True

    def _part(
        self, scope: Scope, blocks: IntArray
    ) -> Generator[None, None, DigestPart]:
        layout, stripe, groups = (
            self._layout,
            self._endpoint.stripe,
            self._endpoint.groups,
        )
        spans = groups.spans(scope.start, scope.stop, scope.reach)
        layers = scope.layers(layout.num_layers)
        count = int(
            self.piece_bytes * layout.num_layers / layers.shape[1] / layout.token_bytes
        )
        sums = self._tensor(np.zeros((len(scope.chunks), len(self._heads)), np.int64))
        numbers = np.arange(self._words.shape[1], dtype=np.uint64)
        word_keys = self._tensor(scope.keys(0, numbers) | np.uint64(1))
        for group, span in enumerate(spans):
            tokens = np.arange(span.start, span.stop)
            tokens = tokens[tokens // layout.block_size % stripe.size == stripe.rank]
            table = blocks[group :: groups.count]
            for at in range(0, len(tokens), max(1, count)):
                some = tokens[at : at + max(1, count)]
                rows, first = self._rows(
                    scope, table, some, layers, group * layout.num_layers
                )
                values = self.values(self._words, word_keys, rows)
                by_head = values.view(len(values), len(self._heads), -1).sum(-1)
                sums.index_add_(0, rows.chunks + first, by_head)
                yield
        copy = self._endpoint.rank // self._endpoint.dcp
        return DigestPart(copy, self._heads.start, sums.cpu().numpy().T.tobytes())

    def _rows(
        self,
        scope: Scope,
        blocks: IntArray,
        tokens: IntArray,
        layers: IntArray,
        first_layer: int,
    ) -> tuple[Rows, int]:
        """Those of some tokens in a group's layers, the first of which is `first_layer`, and which
        chunk of the digest is the first of them."""
        layout, stripe = self._layout, self._endpoint.stripe
        strides = {
            axis: step // layout.head_dim for axis, step in layout.strides.items()
        }
        starts = blocks[tokens // stripe.tokens_per_block] * strides["B"]
        starts += tokens % layout.block_size * strides["N"]
        chunks = tokens // scope.chunk_tokens - scope.chunks.start
        first, stop = int(chunks[0]), int(chunks[-1]) + 1
        head = np.arange(len(self._heads))[:, None, None]
        layer, component = (
            layers[first:stop, None, :, None],
            np.arange(layout.num_components),
        )
        groups = head * strides["H"] + layer * strides["L"] + component * strides["C"]
        names = (first_layer + layer) * layout.num_components + component
        names = names * self._total_heads
        names = (names + head + self._heads.start).reshape(stop - first, -1)
        rows = Rows(
            self._tensor(starts),
            self._tensor(scope.keys(1, tokens.astype(np.uint64))),
            self._tensor(chunks - first),
            self._tensor(groups.reshape(stop - first, -1)),
            self._tensor(scope.keys(2, names.astype(np.uint64))),
        )
        return rows, first

    def _tensor(self, numbers: IntArray | U64s) -> torch.Tensor:
        return torch.from_numpy(numbers.view(np.int64)).to(self._pool.device)


def _by_kernel(
    words: torch.Tensor, word_keys: torch.Tensor, rows: Rows
) -> torch.Tensor:
    from kvcache.verify.digest_kernel import values  # needs Triton

    return values(words, word_keys, rows)


def _values(words: torch.Tensor, word_keys: torch.Tensor, rows: Rows) -> torch.Tensor:
    """i64[T, G], the value of each row."""
    groups, keys = rows.groups[rows.chunks], rows.group_keys[rows.chunks]
    index = (rows.tokens[:, None] + groups).view(-1)
    sums = torch.empty_like(index)
    count = max(1, _CACHED_BYTES // (words.shape[1] * words.itemsize))
    for at in range(0, len(index), count):
        picked = words.index_select(0, index[at : at + count])
        torch.sum(picked * word_keys, -1, out=sums[at : at + count])
    value = sums.view(groups.shape).add_(keys).add_(rows.token_keys[:, None])
    for factor in FACTORS:
        value ^= (value >> 33) & ((1 << 31) - 1)
        value *= factor - (1 << 64)
    return value ^ ((value >> 33) & ((1 << 31) - 1))
