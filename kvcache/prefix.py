"""Which blocks already hold the KV of a given token prefix: a tree over full blocks of tokens.

    root --[t0..t15]--> block 7 --[t16..t31]--> block 9        two sequences that share their
                               `--[t16'..t31']--> block 12     first 16 tokens

A node stands for one exact sequence of tokens, from the first one on: its parent stands for the
tokens before, its key is the bytes of its own block's token ids, and lookups compare keys in full.
So a hit is exact by construction; there is no hash to collide.

Who holds what:

- An entry's block is marked in the allocator: it is USED, LEASED or CACHED, never RECEIVING (I4).
- Content is published once. A second block with the same content stays unpublished, but the
  sequence that holds it can still publish what follows, below the first one's node.
- When the allocator evicts a block, its node goes, and with it every node below: without their
  parent they could not be found, and a block that cannot be found is better FREE. Blocks below
  that are in use only lose their mark. Usually nothing is below, because a sequence's tail is
  evicted first; the exception is the sequence of the point above, and when that publishes again,
  it publishes its own copies of whatever is missing.

A cursor tells where publishing a sequence resumes, so a long decode hashes each of its tokens once.
One thread owns an index, the allocator's.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.blocks import BlockAllocator, BlockStateError, IntegrityError

_DROPPED = -1


class _Node:
    """The KV of one exact token prefix; `block` holds its last block_size tokens."""

    __slots__ = ("block", "children", "depth_blocks", "key", "parent")

    def __init__(self, parent: "_Node | None", key: bytes, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block  # _DROPPED once the node left the tree
        self.depth_blocks: int = 0 if parent is None else parent.depth_blocks + 1
        self.children: dict[bytes, _Node] = {}


@dataclass(slots=True)
class PrefixCursor:
    """How far one sequence is published, kept by its owner between calls of `publish`: it saves
    work. The sequence's tokens may grow but not change."""

    node: _Node | None = None


class PrefixIndex:
    """Finds and registers blocks by the tokens they hold; takes `allocator.on_evict`.

    Args:
        allocator: owner of the blocks; evicts them least recently used first.
        block_size: tokens per block.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self._root = _Node(None, b"", _DROPPED)
        self._nodes: dict[int, _Node] = {}  # by block id
        allocator.on_evict = self._on_evict

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> list[int]:
        """Blocks that hold the longest known prefix of `token_ids`, first block first.

        Takes no reference: `allocator.share` them before anything else is allocated.

        Args:
            max_tokens: match no more than this many tokens (a whole prompt in the cache still
                needs its last token computed).
        """
        limit = len(token_ids) if max_tokens is None else min(max_tokens, len(token_ids))
        blocks: list[int] = []
        node = self._root
        for at in range(limit // self.block_size):
            child = node.children.get(self._key(token_ids, at))
            if child is None:
                break
            blocks.append(child.block)
            node = child
        return blocks

    def publish(
        self, token_ids: Sequence[int], block_ids: Sequence[int], *, cursor: PrefixCursor
    ) -> None:
        """Registers a sequence's full blocks; their bytes must be known good (I4).

        Args:
            token_ids: tokens of the sequence from its start; at least all that `block_ids` hold.
            block_ids: the sequence's full blocks from its start, each in use or leased.
            cursor: the sequence's own; see PrefixCursor.

        Raises:
            BlockStateError: a block is not in use (RECEIVING, for one), holds other published
                content, or has no tokens; blocks before it may have been registered.
        """
        if len(block_ids) * self.block_size > len(token_ids):
            raise BlockStateError(
                f"{len(block_ids)} full blocks of {self.block_size} tokens cannot hold "
                f"{len(token_ids)} tokens"
            )
        node = cursor.node
        if node is None or node.block == _DROPPED or node.depth_blocks > len(block_ids):
            node = self._root
        for at in range(node.depth_blocks, len(block_ids)):
            key = self._key(token_ids, at)
            child = node.children.get(key)
            node = self._add(node, key, block_ids[at]) if child is None else child
        cursor.node = node

    def clear(self) -> None:
        """Forgets everything; blocks that were only CACHED become FREE."""
        self._drop_below(self._root)

    def _key(self, token_ids: Sequence[int], at: int) -> bytes:
        """The token ids of full block number `at`, as bytes."""
        start = at * self.block_size
        return array("q", token_ids[start : start + self.block_size]).tobytes()

    def _add(self, parent: _Node, key: bytes, block: int) -> _Node:
        self.allocator.mark_cached(block)
        node = _Node(parent, key, block)
        parent.children[key] = node
        self._nodes[block] = node
        return node

    def _on_evict(self, block: int) -> None:
        node = self._nodes.pop(block)
        assert node.parent is not None
        del node.parent.children[node.key]
        node.block, node.parent = _DROPPED, None
        self._drop_below(node)

    def _drop_below(self, node: _Node) -> None:
        """Takes all descendants out; cuts the links, so that no cycle waits for the collector."""
        pending = [node]
        while pending:
            above = pending.pop()
            for child in above.children.values():
                del self._nodes[child.block]
                self.allocator.unmark_cached(child.block)
                child.block, child.parent = _DROPPED, None
                pending.append(child)
            above.children.clear()

    def check_integrity(self) -> None:
        """Recounts the entries.

        Raises:
            IntegrityError: an entry cannot be found from the root, or the allocator's marks
                and the entries differ.
        """
        reachable: dict[int, _Node] = {}
        pending = [self._root]
        while pending:
            node = pending.pop()
            for key, child in node.children.items():
                is_full = len(key) == self.block_size * array("q").itemsize
                if child.key != key or child.parent is not node or not is_full:
                    raise IntegrityError(f"prefix index: broken link to block {child.block}")
                reachable[child.block] = child
                pending.append(child)
        if reachable != self._nodes:
            raise IntegrityError("prefix index: entries and the tree differ")
        marked = {b for b in range(self.allocator.num_blocks) if self.allocator.is_cached(b)}
        if marked != reachable.keys():
            wrong = sorted(marked ^ reachable.keys())
            raise IntegrityError(f"prefix index: blocks {wrong} are marked or entered, not both")
