"""The prefix index: finds the blocks that hold a token prefix's KV, in a tree over full blocks.

    root --[t0..t15]--> block 7 --[t16..t31]--> block 9        two sequences that share their
                               `--[t16'..t31']--> block 12     first 16 tokens

A node stands for one exact sequence of tokens, from the first one on: its parent stands for the
tokens before, its key is the bytes of its own block's token ids, and lookups compare keys in full.
So a hit is exact by construction; there is no hash to collide. The key of a sequence's first block
also has the sequence's salt, so sequences of different salts share no node.

- An entry's block is marked in the allocator: it is USED, LEASED or CACHED, never RECEIVING (I4).
- Content is published once. A second block with the same content stays unpublished, but its
  sequence can publish its next blocks below the first one's node.
- When the allocator evicts a block, its node goes, and with it every node below: without their
  parent they could not be found, and a block that cannot be found is better FREE. Blocks below
  that are in use only lose their mark. Usually nothing is below, because a sequence's tail is
  evicted first; the exception is the second sequence of the point above, which then publishes its
  own copies of the missing blocks.
- A node has a block of each KV group (groups.py). Blocks of groups with a window may be missing: a
  hit needs only those that the next token's window reaches. So their eviction leaves the node in
  place, and the next sequence that has computed them fills the gap.

A cursor remembers how far a sequence was found or published, so that each of its tokens is hashed
once, however long it waits or decodes. An index belongs to its allocator's thread.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.blocks import NULL_BLOCK, BlockAllocator, BlockStateError, IntegrityError
from kvcache.groups import ONE_GROUP, KVGroups, held

# Nodes for each block of the pool. Nodes without blocks occur only if all layers have a window:
# above the last blocks of long sequences.
_MAX_NODES_PER_BLOCK = 8


class _Node:
    """The KV of one exact token prefix; `blocks` hold its last block_size tokens, one a group."""

    __slots__ = ("blocks", "children", "depth_blocks", "key", "parent")

    def __init__(self, parent: "_Node | None", key: bytes, blocks: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks  # empty once the node left the tree
        self.depth_blocks: int = 0 if parent is None else parent.depth_blocks + 1
        self.children: dict[bytes, _Node] = {}


@dataclass(slots=True)
class PrefixCursor:
    """How far a sequence was found or published; its owner keeps it between calls, to save work.
    The sequence may grow or be cut, but its tokens and its salt must not change."""

    node: _Node | None = None


class PrefixIndex:
    """Finds and registers blocks by the tokens they hold; takes `allocator.on_evict`.

    Args:
        allocator: owner of the blocks; evicts them least recently used first.
        block_size: tokens per block.
        groups: of the model's layers; tables of blocks are theirs.
    """

    def __init__(
        self, allocator: BlockAllocator, block_size: int, groups: KVGroups = ONE_GROUP
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.groups = groups
        self._root = _Node(None, b"", [])
        self._nodes: dict[int, _Node] = {}  # by block id
        self._num_nodes = 0
        allocator.on_evict = self._on_evict

    def match(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        reach: int | None = None,
        cursor: PrefixCursor | None = None,
        salt: bytes = b"",
    ) -> list[int]:
        """The table of the longest known prefix of `token_ids` that can be continued, with null
        blocks where the windows of its last tokens do not reach.

        Takes no reference: `allocator.share` the blocks before any other is allocated.

        Args:
            max_tokens: match no more than this many tokens (a whole prompt in the cache still
                needs its last token computed).
            reach: the fewest tokens to continue from, if more match; None: all that match.
            cursor: the sequence's own, if it may be looked up again.
            salt: only blocks that were published with the same salt match.
        """
        limit = (
            len(token_ids) if max_tokens is None else min(max_tokens, len(token_ids))
        )
        cursor, stop = cursor or PrefixCursor(), limit // self.block_size
        node = self._reached(cursor, stop)
        for at in range(node.depth_blocks, stop):
            child = node.children.get(self._key(token_ids, at, salt))
            if child is None:
                break
            node = child
        cursor.node, path = node, list[list[int]]()
        while node.parent is not None:
            path.append(node.blocks)
            node = node.parent
        blocks = [block for of_node in reversed(path) for block in of_node]
        return (
            self._usable(blocks, limit if reach is None else reach)
            if self.groups.drops
            else blocks
        )

    def _reached(self, cursor: PrefixCursor, most: int) -> _Node:
        """The deepest node of a cursor's sequence that is still in the tree, `most` blocks deep at
        most."""
        node = cursor.node
        if node is None or not node.blocks:
            return self._root
        while node.depth_blocks > most:
            assert node.parent is not None
            node = node.parent
        return node

    def _usable(self, table: list[int], reach: int) -> list[int]:
        """The longest part of a table whose windows, at its end, have no gap."""
        groups, size, num = (
            self.groups,
            self.block_size,
            len(table) // self.groups.count,
        )
        while True:
            stop = min(num * size, reach)
            firsts = [groups.first_token(g, stop) // size for g in range(groups.count)]
            gaps = (
                at
                for group, first in enumerate(firsts)
                if groups.windows[group] is not None
                for at in range(num - 1, first - 1, -1)
                if table[at * groups.count + group] == NULL_BLOCK
            )
            if (gap := next(gaps, None)) is None:
                break
            num = gap
        del table[num * groups.count :]
        for group, first in enumerate(firsts):
            table[group : first * groups.count : groups.count] = [NULL_BLOCK] * first
        return table

    def publish(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        cursor: PrefixCursor,
        salt: bytes = b"",
    ) -> None:
        """Registers a sequence's full blocks; their bytes must be known good (I4).

        Args:
            token_ids: tokens of the sequence from its start; at least all that `block_ids` hold.
            block_ids: the table of the sequence's full blocks, each in use or leased.
            cursor: the sequence's own; see PrefixCursor.
            salt: the sequence's own; see `match`.

        Raises:
            BlockStateError: a block is not in use (RECEIVING, for one), holds other published
                content, or has no tokens; blocks before it may have been registered.
        """
        count = self.groups.count
        num_full = len(block_ids) // count
        if num_full * self.block_size > len(token_ids):
            raise BlockStateError(
                f"{num_full} full blocks of {self.block_size} tokens cannot hold "
                f"{len(token_ids)} tokens"
            )
        node = self._reached(cursor, num_full)
        for at in range(node.depth_blocks, num_full):
            key = self._key(token_ids, at, salt)
            child, blocks = (
                node.children.get(key),
                list(block_ids[at * count : (at + 1) * count]),
            )
            if child is None:
                if self._num_nodes >= _MAX_NODES_PER_BLOCK * self.allocator.num_blocks:
                    break
                child = self._add(node, key, blocks)
            elif self.groups.drops:
                self._fill_gaps(child, blocks)
            node = child
        cursor.node = node
        self._prune(node)

    def _key(self, token_ids: Sequence[int], at: int, salt: bytes) -> bytes:
        """The token ids of full block number `at`, as bytes; after them the salt, in the first
        block's key."""
        start = at * self.block_size
        tokens = array("q", token_ids[start : start + self.block_size]).tobytes()
        return tokens if at else tokens + salt

    def _add(self, parent: _Node, key: bytes, blocks: list[int]) -> _Node:
        node = _Node(parent, key, blocks)
        for block, window in zip(blocks, self.groups.windows, strict=True):
            if block != NULL_BLOCK or window is None:
                self.allocator.mark_cached(block)
                self._nodes[block] = node
        parent.children[key] = node
        self._num_nodes += 1
        return node

    def _fill_gaps(self, node: _Node, blocks: list[int]) -> None:
        for group, block in enumerate(blocks):
            is_gap = node.blocks[group] == NULL_BLOCK != block
            if is_gap and not self.allocator.is_cached(block):
                self.allocator.mark_cached(block)
                self._nodes[block] = node
                node.blocks[group] = block

    def _on_evict(self, block: int) -> None:
        node = self._nodes.pop(block)
        group = node.blocks.index(block)
        node.blocks[group] = NULL_BLOCK
        if self.groups.windows[group] is None:
            self._drop(node)
        self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Removes a node without blocks and children, and the nodes above it that become such."""
        while node.parent is not None and not (node.children or any(node.blocks)):
            above = node.parent
            self._drop(node)
            node = above

    def _drop(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        self._forget(node)
        self._drop_below(node)

    def _drop_below(self, node: _Node) -> None:
        """Removes all descendants; cuts their links, so that no cycle is left to the collector."""
        pending = [node]
        while pending:
            above = pending.pop()
            for child in above.children.values():
                self._forget(child)
                pending.append(child)
            above.children.clear()

    def _forget(self, node: _Node) -> None:
        for block in held(node.blocks):
            del self._nodes[block]
            self.allocator.unmark_cached(block)
        node.blocks, node.parent = [], None
        self._num_nodes -= 1

    def check_integrity(self) -> None:
        """Recounts the entries.

        Raises:
            IntegrityError: an entry cannot be found from the root, or the allocator's marks
                and the entries differ.
        """
        reachable, num_nodes = dict[int, _Node](), 0
        pending = [self._root]
        while pending:
            node = pending.pop()
            for key, child in node.children.items():
                num_bytes = self.block_size * array("q").itemsize
                is_full = len(key) == num_bytes or (
                    node is self._root and len(key) > num_bytes
                )
                has_gap = any(
                    b == NULL_BLOCK and w is None
                    for b, w in zip(child.blocks, self.groups.windows, strict=True)
                )
                is_dead = not (child.children or any(child.blocks))
                if child.key != key or child.parent is not node or not is_full:
                    raise IntegrityError(
                        f"prefix index: broken link to blocks {child.blocks}"
                    )
                if has_gap or is_dead:
                    raise IntegrityError(
                        f"prefix index: an entry has blocks {child.blocks} only"
                    )
                reachable |= dict.fromkeys(held(child.blocks), child)
                num_nodes += 1
                pending.append(child)
        if reachable != self._nodes or num_nodes != self._num_nodes:
            raise IntegrityError("prefix index: entries and the tree differ")
        marked = {
            b for b in range(self.allocator.num_blocks) if self.allocator.is_cached(b)
        }
        if marked != reachable.keys():
            wrong = sorted(marked ^ reachable.keys())
            raise IntegrityError(
                f"prefix index: blocks {wrong} are marked or entered, not both"
            )
