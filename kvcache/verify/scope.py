"""The scope of a digest of KV (digest.py), and the merging of the ranks' parts."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvcache.stripe import IntArray

# A callback that gets the sums of an engine's digest, as returned by `Scope.merge`; b""
# if the digest has failed.
OnSums = Callable[[bytes], None]
U64s = npt.NDArray[np.uint64]

# A sample covers one of every 16 layers, rounded up.
_LAYERS_PER_SAMPLED_LAYER: Final = 16
# The constants of MurmurHash3's finalizer, and the increment of SplitMix64.
MULTIPLIERS: Final = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


class KeyKind(IntEnum):
    """The purpose of a key of a digest; see `Scope.keys`.

    Keys of different kinds are independent of each other.
    """

    WORD = 0  # one key for each word's position in a row (see digest.py)
    TOKEN = 1  # one key for each token's position in the sequence
    LAYER_COMPONENT_HEAD = 2  # one key for each (layer, component, head)
    LAYER_SAMPLE = 3  # the order in which layers are chosen for a sample


class DigestPart(msgspec.Struct, frozen=True):
    """One rank's part of a digest.

    Attributes:
        copy: The number of the rank's context-parallel group. The ranks of a group hold
            the same heads but different tokens, so their sums are added up.
        first_head: The first KV head of the part.
        sums: u64 [heads, chunks], as bytes.
    """

    copy: int
    first_head: int
    sums: bytes


class Scope(msgspec.Struct, frozen=True, dict=True):
    """The KV that a digest covers: tokens [start, stop) of a leased sequence.

    Attributes:
        is_sample: The digest covers a sample of the layers instead of all layers.
        chunk_tokens: Number of tokens in a chunk; the first chunk starts at token 0.
        min_resume_tokens: As in KVGroups.token_ranges; only used with several layer
            groups.
    """

    lease_id: str
    start: int
    stop: int
    is_sample: bool = False
    chunk_tokens: int = 256
    min_resume_tokens: int = 0

    @property
    def chunks(self) -> range:
        """Numbers of the chunks that contain tokens of the scope."""
        first = self.start // self.chunk_tokens
        return range(first, -(-self.stop // self.chunk_tokens))

    def layers(self, count: int) -> IntArray:
        """Chooses the covered layers of each chunk, out of `count` layers.

        Returns:
            i64 [chunks, covered layers].
        """
        all_layers = np.arange(count)
        if not self.is_sample:
            return np.broadcast_to(all_layers, (len(self.chunks), count))
        numbers = np.array(self.chunks)[:, None] * (1 << 20) + all_layers
        order = self.keys(KeyKind.LAYER_SAMPLE, numbers.astype(np.uint64))
        num_covered = -(-count // _LAYERS_PER_SAMPLED_LAYER)
        return np.argsort(order, axis=1)[:, :num_covered]

    def keys(self, kind: KeyKind, numbers: U64s) -> U64s:
        """Pseudorandom keys, one for each number. Every lease has different keys."""
        return scramble(self._seeds[kind] + numbers * _INCREMENT)

    def merge(self, parts: Sequence[DigestPart | None], num_heads: int) -> bytes:
        """Merges the parts of an engine's ranks into one digest.

        If several context-parallel groups hold the same head, the sums of one group are
        used.

        Args:
            parts: The part of each rank; None if the rank failed.
            num_heads: Number of KV heads of the model.

        Returns:
            u64 [heads, chunks], as bytes; empty if a rank failed.
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
        """Compares the parts of this engine's ranks with a peer's digest.

        Returns:
            A text with the heads that differ, and the range of tokens from the first to
            the last chunk that differs; empty if all are equal.
        """
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
        """For each context-parallel group: its heads, and the total sums of its ranks.

        `DigestPart.copy` is the number of the group.
        """
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
        """Seeds that are derived from the lease id, indexed by KeyKind."""
        digest = hashlib.blake2b(self.lease_id.encode()).digest()
        return np.frombuffer(digest, np.uint64)


def scramble(numbers: U64s) -> U64s:
    """The last step of MurmurHash3, a permutation of 64-bit numbers."""
    for multiplier in MULTIPLIERS:
        numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(multiplier)
    scrambled: U64s = numbers ^ (numbers >> np.uint64(33))
    return scrambled
