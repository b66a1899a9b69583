"""The scope of a digest of KV, and merging and comparing ranks' parts (digest.py)."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvcache.stripe import IntArray

# Called with an engine's sums; empty: they could not be computed.
OnSums = Callable[[bytes], None]
U64s = npt.NDArray[np.uint64]

SAMPLED_LAYERS: Final = 16  # a sample has one layer out of this many
FACTORS: Final = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_STEP = np.uint64(0x9E3779B97F4A7C15)


class DigestPart(msgspec.Struct, frozen=True):
    """One rank's part of a digest.

    Attributes:
        copy: Number of the copy of its heads. The parts of one copy add up.
        first_head: The first KV head of the part.
        sums: u64 [heads, chunks]
    """

    copy: int
    first_head: int
    sums: bytes


class Scope(msgspec.Struct, frozen=True, dict=True):
    """What a digest covers: tokens [start, stop) of a leased sequence.

    Attributes:
        samples: Covers a sample of the layers instead of all layers.
        reach: For several groups, as in KVGroups.token_ranges.
    """

    lease_id: str
    start: int
    stop: int
    samples: bool = False
    chunk_tokens: int = 256
    reach: int = 0

    @property
    def chunks(self) -> range:
        first = self.start // self.chunk_tokens
        return range(first, -(-self.stop // self.chunk_tokens))

    def layers(self, count: int) -> IntArray:
        """i64 [chunks, layers]: which of `count` layers are digested, by chunk."""
        all_layers = np.arange(count)
        if not self.samples:
            return np.broadcast_to(all_layers, (len(self.chunks), count))
        numbers = np.array(self.chunks)[:, None] * (1 << 20) + all_layers
        order = self.keys(3, numbers.astype(np.uint64))
        return np.argsort(order, axis=1)[:, : -(-count // SAMPLED_LAYERS)]

    def keys(self, kind: int, numbers: U64s) -> U64s:
        """Pseudorandom numbers by kind and number, which depend on the lease."""
        return scramble(self._seeds[kind] + numbers * _STEP)

    def merge(self, parts: Sequence[DigestPart | None], num_heads: int) -> bytes:
        """Merges the parts of an engine's ranks, with each head once.

        Returns:
            u64 [heads, chunks]; empty if a rank failed.
        """
        if None in parts:
            return b""
        merged = np.zeros((num_heads, len(self.chunks)), np.uint64)
        for heads, sums in self._copies(parts):
            merged[heads] = sums
        return merged.tobytes()

    def differences(
        self, parts: Sequence[DigestPart | None], peer_digest: bytes
    ) -> str:
        """The tokens and heads in which engine and peer differ; empty if in none."""
        expected = np.frombuffer(peer_digest, np.uint64).reshape(-1, len(self.chunks))
        is_wrong = np.zeros(expected.shape, bool)
        for heads, sums in self._copies(parts):
            is_wrong[heads] |= sums != expected[heads]
        chunks = np.flatnonzero(is_wrong.any(0)) + self.chunks.start
        if not len(chunks):
            return ""
        start = max(int(chunks[0]) * self.chunk_tokens, self.start)
        stop = min(int(chunks[-1] + 1) * self.chunk_tokens, self.stop)
        wrong_heads = ", ".join(map(str, np.flatnonzero(is_wrong.any(1))))
        return f"tokens {start} to {stop - 1} in KV heads {wrong_heads}"

    def _copies(
        self, parts: Sequence[DigestPart | None]
    ) -> Iterable[tuple[slice, U64s]]:
        """The heads and the sums of each copy."""
        copies: dict[int, tuple[slice, U64s]] = {}
        for part in filter(None, parts):
            sums = np.frombuffer(part.sums, np.uint64).reshape(-1, len(self.chunks))
            if part.copy in copies:
                sums = sums + copies[part.copy][1]
            heads = slice(part.first_head, part.first_head + len(sums))
            copies[part.copy] = (heads, sums)
        return copies.values()

    @cached_property
    def _seeds(self) -> U64s:
        digest = hashlib.blake2b(self.lease_id.encode()).digest()
        return np.frombuffer(digest, np.uint64)


def scramble(numbers: U64s) -> U64s:
    """The last step of MurmurHash3, a permutation of 64-bit numbers."""
    for factor in FACTORS:
        numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(factor)
    scrambled: U64s = numbers ^ (numbers >> np.uint64(33))
    return scrambled
