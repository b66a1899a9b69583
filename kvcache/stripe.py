"""Decode context parallelism: which tokens of a sequence a rank keeps.

The ranks of a context-parallel group hold the same KV heads and share the tokens of every sequence
among them, a block at a time: block i of a sequence, of `block_size` tokens, is on rank i % size
of the group. All ranks use the same block ids, so one block table serves them all; to whoever hands
blocks out, a block holds `size * block_size` tokens, of which each rank stores its own part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class PlanError(ValueError):
    """A transfer that cannot be planned; the message names the values and the fix."""


@dataclass(frozen=True)
class Stripe:
    """Rank `rank` of the `size` ranks that share a sequence's tokens."""

    rank: int
    size: int
    block_size: int  # tokens of a block on one rank

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a sequence in one block, on all ranks together."""
        return self.size * self.block_size

    def num_local(self, num_tokens: int | IntArray | Int32s) -> IntArray:
        """How many of a sequence's first `num_tokens` tokens are here; by element for an array."""
        whole, rest = np.divmod(num_tokens, self.tokens_per_block)
        part = np.clip(rest - self.rank * self.block_size, 0, self.block_size)
        return np.asarray(whole * self.block_size + part, np.int64)

    def local_slots(self, slots: IntArray) -> IntArray:
        """Slots block * tokens_per_block + offset as slots of this rank's pool; those of tokens
        that are kept elsewhere become slots of the null block."""
        blocks, offsets = np.divmod(slots, self.tokens_per_block)
        owners, within = np.divmod(offsets, self.block_size)
        return np.where(owners == self.rank, blocks * self.block_size + within, within)

    def check_remote(self, remote_block_size: int) -> None:
        """Refuses a peer from whose blocks this stripe cannot be cut.

        Raises:
            PlanError: the peer's blocks hold tokens of several ranks of the group.
        """
        if self.size > 1 and self.block_size % remote_block_size:
            raise PlanError(
                f"block_size is {self.block_size} here and {remote_block_size} on the peer: with "
                f"a dcp of {self.size} it must be a multiple of the peer's; start this server "
                f"with --block-size {remote_block_size}, or without --dcp"
            )

    def remote_blocks(
        self, blocks: Sequence[int] | IntArray, remote_block_size: int
    ) -> IntArray:
        """Of a peer's block table, from token 0 on, the blocks whose tokens are kept here; in them
        those tokens follow each other as in this rank's own blocks; see `check_remote`."""
        table = np.asarray(blocks, np.int64)
        if self.size == 1:
            return table
        whose = (
            np.arange(len(table)) // (self.block_size // remote_block_size) % self.size
        )
        ours: IntArray = table[whose == self.rank]
        return ours
