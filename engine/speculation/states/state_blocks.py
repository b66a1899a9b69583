"""Which blocks have KV of a drafter that reads hidden states, and of which tokens.

Other than a draft model, such a drafter cannot compute draft KV of any tokens, because
states may be missing. So a sequence can have draft KV in some blocks and lack it in
blocks before them.

A block is recognised by a hash of its tokens and of all tokens before them. The last
position of a block also reads the first token after it. If two sequences share a block
and continue with different tokens, one of them has the KV of the other one's token
there. This may cost an accepted proposal.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Sequenceable

from engine.core.sequence import Sequence
from engine.speculation.draft_kv import DraftedBlocks


class StateBlocks(DraftedBlocks):
    """The tokens with whose draft KV blocks were filled.

    Methods take the hashes of a sequence: element i is the hash of the tokens up to the
    end of its block i.
    """

    def add_hashes(
        self, hashes: list[int], sequence: Sequence, num_blocks: int
    ) -> None:
        """Adds the hashes of a sequence's first `num_blocks` blocks to `hashes`."""
        size = self._block_size
        for index in range(len(hashes), num_blocks):
            previous = hashes[-1] if hashes else 0
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            hashes.append(hash((previous, *tokens)))

    def filled(self, blocks: Sequenceable[int], hashes: Sequenceable[int]) -> list[int]:
        """The indices of the blocks of a sequence that have draft KV of its tokens."""
        return [
            index
            for index, (block, expected) in enumerate(zip(blocks, hashes, strict=False))
            if self._hashes.get(block) == expected
        ]

    def record_blocks(
        self,
        blocks: Sequenceable[int],
        hashes: Sequenceable[int],
        indices: Iterable[int],
    ) -> None:
        """Records that the blocks with these indices have draft KV."""
        for index in indices:
            self._hashes[blocks[index]] = hashes[index]
