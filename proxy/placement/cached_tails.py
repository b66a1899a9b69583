"""Remembers what servers have cached beyond the last complete block of a prompt.

This is the prompt's tail: its incomplete last block, and the answer to it.
"""

from collections import OrderedDict
from typing import NamedTuple

from proxy.placement.prefix_index import Depths
from proxy.placement.request_profile import BLOCK_BYTES, RequestProfile

_MAX_TAILS = 16_384  # remembered tails of prompts with their answers, over all servers


class CachedTail(NamedTuple):
    """The tail of a prompt in a server's cache: the prompt's rest, and the answer.

    The rest of a prompt is its text after the last complete block.

    Attributes:
        num_bytes: length of the prompt's rest, without the last byte, which closes the
            JSON text.
        text_hash: hash of the prompt's rest, without the last byte.
        num_tokens: estimated tokens from the start of the prompt to the end of the
            answer.
    """

    num_bytes: int
    text_hash: int
    num_tokens: float

    def matches(self, text: bytes, num_blocks: float) -> bool:
        """Return whether a prompt has the text of this tail after its first blocks.

        Args:
            text: JSON text of the prompt.
            num_blocks: number of blocks before the tail.
        """
        start = int(num_blocks * BLOCK_BYTES)
        return hash(text[start : start + self.num_bytes]) == self.text_hash


class CachedTails:
    """The tails of prompts that servers have cached.

    Servers are identified by ServerLoad.index.
    """

    def __init__(self) -> None:
        # The key is the hash of a prompt's last complete block, and a server's index.
        self._tails = OrderedDict[tuple[int, int], CachedTail]()

    def __len__(self) -> int:
        return len(self._tails)

    def add(
        self, server: int, profile: RequestProfile, num_generated: float = 0
    ) -> None:
        """Record that a prompt's tail and `num_generated` answer tokens are cached."""
        if not profile.hashes or not profile.text:
            return
        key = (profile.hashes[-1], server)
        rest = profile.text[len(profile.hashes) * BLOCK_BYTES : -1]
        self._tails.pop(key, None)  # so that the new entry is the most recent one
        num_tokens = profile.tokens + num_generated
        self._tails[key] = CachedTail(len(rest), hash(rest), num_tokens)
        if len(self._tails) > _MAX_TAILS:
            self._tails.popitem(last=False)

    def remove(self, server: int, profile: RequestProfile) -> None:
        """Record that a server does not have the tail of a prompt after all."""
        if profile.hashes:
            self._tails.pop((profile.hashes[-1], server), None)

    def extend(self, depths: Depths, profile: RequestProfile) -> None:
        """Increase the depths of servers that have cached more than complete blocks.

        If this prompt continues an earlier prompt and the answer to it, the tail of
        the earlier prompt counts as cached.

        Args:
            depths: the depths of this prompt, which the method changes in place.
        """
        if not profile.text:
            return
        for server, depth in depths.items():
            tail = self._tails.get((profile.hashes[int(depth) - 1], server))
            if tail is not None and tail.matches(profile.text, depth):
                num_tokens = min(tail.num_tokens, profile.tokens)
                depths[server] = max(depth, num_tokens / profile.block_tokens)
