"""The prefix index: a tree of blocks that finds the KV of a token prefix.

    root --[t0..t15]--> block 7 --[t16..t31]--> block 9        two sequences that share
                               `--[t16'..t31']--> block 12     their first 16 tokens

A node stands for one exact token prefix, which ends at the end of the node's block. The
parent stands for the same prefix without that block. The key of a node is the bytes of
the block's token ids. Lookups compare keys in full, so a hit is exact by construction:
there is no hash to collide. The key of a sequence's first block also contains the
sequence's salt, so that sequences with different salts share no node.

- The block of a node is marked in the allocator: it is USED, LEASED or CACHED, never
  RECEIVING (I4).
- Content is published once. A second block with the same content stays unpublished, but
  the second block's sequence can publish later blocks below the first block's node.
- When the allocator evicts a block, the block's node and all descendants of the node
  are removed, because lookups could not reach the descendants any more. The CACHED
  blocks of descendants become FREE; blocks in use only lose their mark. Usually there
  are no descendants, because the last blocks of a sequence are evicted first. But a
  second sequence may have published blocks below the first sequence's node. The second
  sequence then publishes its own copies of the removed blocks.
- A node has one block for each KV group (groups.py). If a group has a window, its block
  may be missing, because a hit needs only the blocks in the next token's window. So the
  eviction of a block of such a group leaves the node in place. The next sequence that
  computes the block fills the gap.

A cursor remembers how far a sequence was found or published. So the key of each block
is made once, even if the sequence is looked up or published many times. Only the
allocator's thread may use an index.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.blocks import NULL_BLOCK, BlockAllocator, BlockStateError, IntegrityError
from kvcache.groups import ONE_GROUP, KVGroups, without_null_blocks

# Limit on the number of nodes, per block of the pool. There can be more nodes than
# blocks if all layers have a window: the first nodes of long sequences have no blocks.
_MAX_NODES_PER_BLOCK = 8


class _Node:
    """The KV of one exact token prefix.

    `blocks` has one block for each group, with the KV of the prefix's last block_size
    tokens. The list is empty once the node has been removed from the tree.
    """

    __slots__ = ("blocks", "children", "depth_blocks", "key", "parent")

    def __init__(self, parent: "_Node | None", key: bytes, blocks: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.depth_blocks: int = 0 if parent is None else parent.depth_blocks + 1
        self.children: dict[bytes, _Node] = {}


@dataclass(slots=True)
class PrefixCursor:
    """The position in the tree up to which a sequence was found or published.

    Each sequence has one cursor, which the caller passes to every `match` and `publish`
    of the sequence. Between calls, tokens may be added to or removed from the end of
    the sequence, but its other tokens and its salt must not change.
    """

    node: _Node | None = None


class PrefixIndex:
    """Finds and registers blocks by the tokens they hold; sets `allocator.on_evict`.

    Args:
        allocator: Owns the blocks; evicts the least recently used one first.
        block_size: Tokens per block.
        groups: The model's layer groups. Block tables have an entry for each group.
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
        min_resume_tokens: int | None = None,
        cursor: PrefixCursor | None = None,
        salt: bytes = b"",
    ) -> list[int]:
        """Returns the table of the longest published prefix that can be continued.

        A null block stands for a block that is outside of the windows of the prefix's
        last tokens. No reference is taken: call `allocator.share` for the blocks before
        any other block is allocated. The cursor moves to the end of the match.

        Args:
            max_tokens: The largest number of tokens to match. A caller leaves out the
                last token of a prompt: it is always computed, for its logits.
            min_resume_tokens: If more tokens than this match, the table must also have
                the blocks to continue after this number of tokens. None: it needs only
                the blocks to continue after all matching tokens.
            cursor: The cursor of the sequence, if it may be looked up again.
            salt: Only blocks that were published with the same salt match.
        """
        limit = len(token_ids)
        if max_tokens is not None:
            limit = min(max_tokens, limit)
        if cursor is None:
            cursor = PrefixCursor()
        num_full = limit // self.block_size
        node = self._start_node(cursor, num_full)
        for index in range(node.depth_blocks, num_full):
            child = node.children.get(self._key(token_ids, index, salt))
            if child is None:
                break
            node = child
        cursor.node = node
        table = self._table_of(node)
        if not self.groups.drops_blocks:
            return table
        return self._without_gaps(
            table, limit if min_resume_tokens is None else min_resume_tokens
        )

    def _start_node(self, cursor: PrefixCursor, max_depth: int) -> _Node:
        """The cursor's node, or the node's ancestor that is `max_depth` blocks deep.

        Returns the root if the cursor has no node, or if the node was removed from the
        tree.
        """
        node = cursor.node
        if node is None or not node.blocks:
            return self._root
        while node.depth_blocks > max_depth:
            assert node.parent is not None
            node = node.parent
        return node

    def _table_of(self, node: _Node) -> list[int]:
        """The blocks from the root to a node."""
        path: list[list[int]] = []
        while node.parent is not None:
            path.append(node.blocks)
            node = node.parent
        return [block for blocks in reversed(path) for block in blocks]

    def _without_gaps(self, table: list[int], min_resume_tokens: int) -> list[int]:
        """Truncates a table to its longest prefix without gaps in the groups' windows.

        Blocks before the windows become null blocks.

        Args:
            min_resume_tokens: As in `match`.
        """
        groups = self.groups
        count = groups.count
        num_full = len(table) // count
        while True:
            stop = min(num_full * self.block_size, min_resume_tokens)
            firsts = [
                groups.first_token(group, stop) // self.block_size
                for group in range(count)
            ]
            gap = self._find_gap(table, firsts, num_full)
            if gap is None:
                break
            num_full = gap
        del table[num_full * count :]
        for group, first in enumerate(firsts):
            table[group : first * count : count] = [NULL_BLOCK] * first
        return table

    def _find_gap(
        self, table: list[int], firsts: list[int], num_full: int
    ) -> int | None:
        """The position of a block that is missing in a group's window; None: no gap.

        If a group has several gaps, its last gap is returned.

        Args:
            firsts: For each group, the position of the first block that it needs.
            num_full: Number of positions in the table.
        """
        groups = self.groups
        for group, first in enumerate(firsts):
            if groups.windows[group] is None:
                continue
            for index in range(num_full - 1, first - 1, -1):
                if table[index * groups.count + group] == NULL_BLOCK:
                    return index
        return None

    def publish(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        cursor: PrefixCursor,
        salt: bytes = b"",
    ) -> None:
        """Registers a sequence's full blocks, and moves the cursor to their end.

        The KV in the blocks must have been computed or verified (I4).

        Args:
            token_ids: Tokens of the sequence from its start; at least all that
                `block_ids` hold.
            block_ids: The table of the sequence's full blocks, each in use or leased.
            cursor: The cursor of the sequence; see PrefixCursor.
            salt: The salt of the sequence; see `match`.

        Raises:
            BlockStateError: `block_ids` has more blocks than `token_ids` fills. Or a
                block is in the wrong state (RECEIVING, for example), or is published
                with other content; blocks before this one may have been registered.
        """
        count = self.groups.count
        num_full = len(block_ids) // count
        if num_full * self.block_size > len(token_ids):
            raise BlockStateError(
                f"{len(token_ids)} tokens cannot fill {num_full} blocks of "
                f"{self.block_size} tokens"
            )
        max_nodes = _MAX_NODES_PER_BLOCK * self.allocator.num_blocks
        node = self._start_node(cursor, num_full)
        for index in range(node.depth_blocks, num_full):
            key = self._key(token_ids, index, salt)
            blocks = list(block_ids[index * count : (index + 1) * count])
            child = node.children.get(key)
            if child is None:
                if self._num_nodes >= max_nodes:
                    break
                child = self._add(node, key, blocks)
            elif self.groups.drops_blocks:
                self._fill_gaps(child, blocks)
            node = child
        cursor.node = node
        self._prune(node)

    def pin(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        seconds: float,
        *,
        owner: str = "",
        cursor: PrefixCursor | None = None,
        salt: bytes = b"",
    ) -> None:
        """Pins the published blocks of a prefix (kvcache/pins/).

        If a group has a window, only the blocks that a hit of the prefix needs are
        pinned.

        Args:
            num_tokens: Length of the prefix.
            seconds: For this time, the blocks are evicted later than unpinned blocks.
            owner: The pins count towards this owner's share of the pool.
            cursor: The cursor of the sequence, which does not move.
            salt: As in `match`.
        """
        start = PrefixCursor(cursor.node if cursor is not None else None)
        table = self.match(token_ids, max_tokens=num_tokens, cursor=start, salt=salt)
        self.allocator.pin(without_null_blocks(table), seconds, owner)

    def _key(self, token_ids: Sequence[int], index: int, salt: bytes) -> bytes:
        """The key of a sequence's full block number `index`: the bytes of its tokens.

        The key of the first block (number 0) ends with the salt.
        """
        start = index * self.block_size
        tokens = array("q", token_ids[start : start + self.block_size]).tobytes()
        return tokens if index else tokens + salt

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
            self._remove(node)
        self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Removes a node that has no blocks and no children.

        Applies the same rule to the node's parent, and so on towards the root.
        """
        while node.parent is not None and not (node.children or any(node.blocks)):
            parent = node.parent
            self._remove(node)
            node = parent

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        self._clear(node)
        self._remove_descendants(node)

    def _remove_descendants(self, node: _Node) -> None:
        """Removes all nodes below a node.

        The links between the nodes are cut, so that no reference cycles remain for the
        garbage collector.
        """
        pending = [node]
        while pending:
            parent = pending.pop()
            for child in parent.children.values():
                self._clear(child)
                pending.append(child)
            parent.children.clear()

    def _clear(self, node: _Node) -> None:
        """Unmarks the blocks of a node that is removed from the tree."""
        for block in without_null_blocks(node.blocks):
            del self._nodes[block]
            self.allocator.unmark_cached(block)
        node.blocks = []
        node.parent = None
        self._num_nodes -= 1

    def check_integrity(self) -> None:
        """Compares the tree with the index by block and with the allocator's marks.

        Raises:
            IntegrityError: A node cannot be reached from the root; or a block has a
                node but no mark in the allocator, or a mark but no node.
        """
        reachable: dict[int, _Node] = {}
        num_nodes = 0
        pending = [self._root]
        while pending:
            node = pending.pop()
            for key, child in node.children.items():
                self._check_node(node, key, child)
                reachable |= dict.fromkeys(without_null_blocks(child.blocks), child)
                num_nodes += 1
                pending.append(child)
        if reachable != self._nodes or num_nodes != self._num_nodes:
            raise IntegrityError("prefix index: the index by block and the tree differ")
        all_blocks = range(self.allocator.num_blocks)
        marked = {block for block in all_blocks if self.allocator.is_cached(block)}
        if marked != reachable.keys():
            wrong = sorted(marked ^ reachable.keys())
            raise IntegrityError(
                f"prefix index: blocks {wrong} have a node or are marked as cached, "
                "but not both"
            )

    def _check_node(self, parent: _Node, key: bytes, node: _Node) -> None:
        num_bytes = self.block_size * array("q").itemsize
        has_salt = parent is self._root and len(key) > num_bytes
        is_full = len(key) == num_bytes or has_salt
        if node.key != key or node.parent is not parent or not is_full:
            raise IntegrityError(f"prefix index: broken link to blocks {node.blocks}")
        has_gap = any(
            block == NULL_BLOCK and window is None
            for block, window in zip(node.blocks, self.groups.windows, strict=True)
        )
        is_unused = not (node.children or any(node.blocks))
        if has_gap or is_unused:
            raise IntegrityError(
                f"prefix index: a node lacks blocks; it has only {node.blocks}"
            )
