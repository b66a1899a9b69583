"""Decode context parallelism: which tokens of a sequence a rank stores.

The ranks of a context-parallel group hold the same KV heads, and each rank stores some
tokens of every sequence. If a sequence is cut into pieces of `block_size` tokens, piece
i is on rank i % size of the group. All ranks use the same block ids and one block
table. A block of the allocator has `size * block_size` tokens; each rank stores
`block_size` of these tokens.
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
    """The tokens that rank `rank` of a context-parallel group of `size` ranks stores.

    A group of one rank stores all tokens.
    """

    rank: int  # number within the context-parallel group
    size: int
    block_size: int  # tokens of a block on one rank

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a sequence in one block, on all ranks together."""
        return self.size * self.block_size

    def num_local(self, num_tokens: int | IntArray | Int32s) -> IntArray:
        """Number of a sequence's first `num_tokens` tokens that this rank stores.

        `num_tokens` may be an array; the result is computed for each element.
        """
        full_blocks, rest = np.divmod(num_tokens, self.tokens_per_block)
        local_rest = np.clip(rest - self.rank * self.block_size, 0, self.block_size)
        return np.asarray(full_blocks * self.block_size + local_rest, np.int64)

    def local_slots(self, slots: IntArray) -> IntArray:
        """Converts token slots of the group's blocks to slots of this rank's pool.

        Args:
            slots: block * tokens_per_block + offset, for each token.

        Returns:
            block * block_size + offset. Tokens that other ranks store get slots of the
            null block.
        """
        blocks, offsets = np.divmod(slots, self.tokens_per_block)
        owner_ranks, local_offsets = np.divmod(offsets, self.block_size)
        local = blocks * self.block_size + local_offsets
        return np.where(owner_ranks == self.rank, local, local_offsets)

    def check_remote(self, remote_block_size: int) -> None:
        """Checks that no block of a peer has tokens of several ranks of this group.

        Raises:
            PlanError: the group has several ranks, and `remote_block_size` does not
                divide this rank's block size.
        """
        if self.size > 1 and self.block_size % remote_block_size:
            raise PlanError(
                f"block_size is {self.block_size} here and {remote_block_size} on the "
                f"peer. With --dcp {self.size}, block_size must be a multiple of the "
                f"peer's block size: start this server with --block-size "
                f"{remote_block_size}, or without --dcp"
            )

    def remote_blocks(
        self, blocks: Sequence[int] | IntArray, remote_block_size: int
    ) -> IntArray:
        """Selects the peer's blocks that hold the tokens of this rank, in token order.

        `check_remote` must accept `remote_block_size`.

        Args:
            blocks: The peer's block table from token 0 on; or an array with one value
                for each block of that table. For such an array, the result has the
                values of the selected blocks.
        """
        table = np.asarray(blocks, np.int64)
        if self.size == 1:
            return table
        remote_per_local = self.block_size // remote_block_size
        owner_ranks = np.arange(len(table)) // remote_per_local % self.size
        local: IntArray = table[owner_ranks == self.rank]
        return local
