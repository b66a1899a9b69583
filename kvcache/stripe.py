"""Decode context parallelism: which tokens of a sequence a rank stores.

The ranks of a context-parallel group hold the same KV heads. They share the tokens of
every sequence among them, a block at a time: block i of a sequence, of `block_size`
tokens, is on rank i % size of the group. All ranks use the same block ids, so one block
table serves them all. The allocator sees blocks of `size * block_size` tokens, of which
each rank stores its own part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class PlanError(ValueError):
    """A transfer cannot be planned; the message names the values and the fix."""


@dataclass(frozen=True)
class Stripe:
    """The tokens of rank `rank` of the `size` ranks that share a sequence's tokens."""

    rank: int
    size: int
    block_size: int  # tokens of a block on one rank

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a sequence in one block, on all ranks together."""
        return self.size * self.block_size

    def num_local(self, num_tokens: int | IntArray | Int32s) -> IntArray:
        """How many of a sequence's first `num_tokens` tokens this rank stores.

        For an array, the result is by element.
        """
        full_blocks, rest = np.divmod(num_tokens, self.tokens_per_block)
        local_rest = np.clip(rest - self.rank * self.block_size, 0, self.block_size)
        return np.asarray(full_blocks * self.block_size + local_rest, np.int64)

    def local_slots(self, slots: IntArray) -> IntArray:
        """Converts slots of the group to slots of this rank's pool.

        Args:
            slots: block * tokens_per_block + offset.

        Returns:
            block * block_size + offset. Tokens that other ranks store get slots of the
            null block.
        """
        blocks, offsets = np.divmod(slots, self.tokens_per_block)
        owners, local_offsets = np.divmod(offsets, self.block_size)
        local = blocks * self.block_size + local_offsets
        return np.where(owners == self.rank, local, local_offsets)

    def check_remote(self, remote_block_size: int) -> None:
        """Checks that each block of a peer belongs to one rank of this group.

        Raises:
            PlanError: A block of the peer holds tokens of several ranks of the group.
        """
        if self.size > 1 and self.block_size % remote_block_size:
            raise PlanError(
                f"block_size is {self.block_size} here and {remote_block_size} on the "
                f"peer: with a dcp of {self.size} it must be a multiple of the peer's; "
                f"start this server with --block-size {remote_block_size}, or without "
                "--dcp"
            )

    def remote_blocks(
        self, blocks: Sequence[int] | IntArray, remote_block_size: int
    ) -> IntArray:
        """The blocks of a peer whose tokens this rank stores; see `check_remote`.

        The tokens in these blocks follow one another as in this rank's own blocks.

        Args:
            blocks: The peer's block table, from token 0 on.
        """
        table = np.asarray(blocks, np.int64)
        if self.size == 1:
            return table
        remote_per_local = self.block_size // remote_block_size
        owners = np.arange(len(table)) // remote_per_local % self.size
        local: IntArray = table[owners == self.rank]
        return local
