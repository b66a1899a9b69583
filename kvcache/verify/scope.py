"""The scope of a digest of KV, and the merging and comparing of ranks' parts (digest.py)."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvcache.stripe import IntArray

Sums = Callable[[bytes], None]  # takes an engine's sums; empty: they cannot be computed
U64s = npt.NDArray[np.uint64]

SAMPLED_LAYERS: Final = 16  # a sample has one layer in so many
FACTORS: Final = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_STEP = np.uint64(0x9E3779B97F4A7C15)


class DigestPart(msgspec.Struct, frozen=True):
    """One rank's part of a digest.

    Attributes:
        copy: number of the copy of its heads; parts of one copy add up.
        sums: u64[heads, chunks]
    """

    copy: int
    first_head: int
    sums: bytes


class Scope(msgspec.Struct, frozen=True, dict=True):
    """A digest is of tokens [start, stop) of a leased sequence, in all or a sample of layers."""

    lease_id: str
    start: int
    stop: int
    samples: bool = False
    chunk_tokens: int = 256
    reach: int = 0  # of several groups: as of KVGroups.spans

    @property
    def chunks(self) -> range:
        return range(
            self.start // self.chunk_tokens, -(-self.stop // self.chunk_tokens)
        )

    def layers(self, count: int) -> IntArray:
        """i64[chunks, layers], the layers of `count` that are digested in each chunk."""
        every = np.arange(count)
        if not self.samples:
            return np.broadcast_to(every, (len(self.chunks), count))
        names = np.array(self.chunks)[:, None] * (1 << 20) + every
        order = self.keys(3, names.astype(np.uint64))
        return np.argsort(order, axis=1)[:, : -(-count // SAMPLED_LAYERS)]

    def keys(self, kind: int, numbers: U64s) -> U64s:
        """Random numbers by kind and number."""
        return scrambled(self._seeds[kind] + numbers * _STEP)

    def merged(self, parts: Sequence[DigestPart | None], num_heads: int) -> bytes:
        """An engine's answer: u64[heads, chunks], each head once; empty if a rank failed."""
        if None in parts:
            return b""
        whole = np.zeros((num_heads, len(self.chunks)), np.uint64)
        for heads, sums in self._copies(parts):
            whole[heads] = sums
        return whole.tobytes()

    def faults(self, parts: Sequence[DigestPart | None], theirs: bytes) -> str:
        """The tokens and heads in which these ranks differ from their peer; empty: none."""
        whole = np.frombuffer(theirs, np.uint64).reshape(-1, len(self.chunks))
        wrong = np.zeros(whole.shape, bool)
        for heads, sums in self._copies(parts):
            wrong[heads] |= sums != whole[heads]
        chunks = np.flatnonzero(wrong.any(0)) + self.chunks.start
        if not len(chunks):
            return ""
        start = max(int(chunks[0]) * self.chunk_tokens, self.start)
        stop = min(int(chunks[-1] + 1) * self.chunk_tokens, self.stop)
        told = ", ".join(map(str, np.flatnonzero(wrong.any(1))))
        return f"tokens {start} to {stop - 1} in KV heads {told}"

    def _copies(
        self, parts: Sequence[DigestPart | None]
    ) -> Iterable[tuple[slice, U64s]]:
        """Each copy's heads and sums."""
        copies: dict[int, tuple[slice, U64s]] = {}
        for part in filter(None, parts):
            sums = np.frombuffer(part.sums, np.uint64).reshape(-1, len(self.chunks))
            if part.copy in copies:
                sums = sums + copies[part.copy][1]
            copies[part.copy] = (
                slice(part.first_head, part.first_head + len(sums)),
                sums,
            )
        return copies.values()

    @cached_property
    def _seeds(self) -> U64s:
        return np.frombuffer(
            hashlib.blake2b(self.lease_id.encode()).digest(), np.uint64
        )


def scrambled(numbers: U64s) -> U64s:
    """MurmurHash3's last step, a permutation."""
    for factor in FACTORS:
        numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(factor)
    mixed: U64s = numbers ^ (numbers >> np.uint64(33))
    return mixed
