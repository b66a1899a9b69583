"""One checked transfer, and the index boxes that it copies.

Wanted are tokens [token_start, token_stop) of a sequence, all layers and components, and the heads
of one rank of D. The token axis is cut wherever a block of either side ends.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np

from kvcache.transfer.runs import Axis, Boxes
from kvcache.transfer.topology import (
    Endpoint,
    HeadGroup,
    IntArray,
    PlanError,
    byte_strides,
    scale_factors,
)


@dataclass(eq=False)
class Transfer:
    """Never changed; not frozen, as that would take twice as long to make, while the link idles."""

    local: Endpoint
    remote: tuple[Endpoint, ...]  # by rank
    groups: tuple[HeadGroup, ...]  # the heads wanted, by who owns them
    total_kv_heads: int
    token_start: int
    token_stop: int
    local_table: "BlockTable"  # D's, from token 0
    remote_table: "BlockTable"  # P's, from token 0, checked
    # What follows from the geometries alone, for all transfers between these endpoints.
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def local_blocks(self) -> IntArray:
        """i64, D's block table from token 0; checked when it is first asked for.

        Raises:
            PlanError: as of BlockTable.
        """
        return self.local_table.checked()

    @property
    def remote_blocks(self) -> IntArray:
        """i64, P's block table from token 0."""
        return self.remote_table.checked()

    @cached_property
    def converts(self) -> bool:
        """The two sides differ in dtype or scales."""
        same_dtype = self.local.layout.dtype == self.remote[0].layout.dtype
        return not same_dtype or self.factors is not None

    @cached_property
    def factors(self) -> tuple[float, ...] | None:
        """What elements are multiplied by, by layer and component, if they change."""
        return scale_factors(self.remote[0], self.local)

    @property
    def useful_bytes(self) -> int:
        """Bytes of the peer's KV that this rank wants."""
        heads = sum(len(group.heads) for group in self.groups)
        return (self.token_stop - self.token_start) * heads * self.head_token_bytes

    @property
    def head_token_bytes(self) -> int:
        """Bytes of the peer's KV of one head for one token."""
        layout = self.remote[0].layout
        return layout.num_layers * layout.num_components * layout.head_dim * layout.itemsize


class BlockTable:
    """A block table as it came, and as it is used: checked by whoever asks first.

    Args:
        name: for errors.
        ids: from token 0 of the sequence on.
        num_blocks: of the pool.
        block_size: in tokens.
        tokens: the blocks that these lie in are going to be used.
        distinct: these blocks must differ from each other.
    """

    def __init__(
        self,
        name: str,
        ids: Sequence[int] | IntArray,
        num_blocks: int,
        block_size: int,
        tokens: range,
        *,
        distinct: bool = False,
    ) -> None:
        self._given = ids
        self._ids = ids if isinstance(ids, list) else None
        self._name = name
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._tokens = tokens
        self._distinct = distinct
        self._is_checked = False
        self._array: IntArray | None = None

    @property
    def ids(self) -> list[int]:
        """As they came; `check` says whether they can be used."""
        if self._ids is None:
            self._ids = list(np.asarray(self._given).reshape(-1).tolist())
        return self._ids

    @cached_property
    def bytes(self) -> memoryview:
        """Of i64[n], checked: who gets them writes where they say.

        Raises:
            PlanError: as `check`.
        """
        self.check()
        if self._array is not None:
            return self._array.data.cast("B")
        return memoryview(array("q", self.ids)).cast("B")

    @classmethod
    def of(cls, blocks: IntArray) -> "BlockTable":
        """Blocks that need no check."""
        table = cls("blocks", blocks, 0, 1, range(0))
        table._array = blocks
        return table

    def checked(self) -> IntArray:
        """i64[n], once every block that the tokens lie in is known to exist.

        Raises:
            PlanError: as `check`.
        """
        if self._array is None:
            self._array = np.frombuffer(self.bytes, np.int64)
        return self._array

    def check(self) -> None:
        """Every block that the tokens lie in exists.

        Raises:
            PlanError: the table is too short, or names a block outside the pool, or one twice.
        """
        if not self._is_checked and self._tokens:
            self._check(self._tokens, self._block_size)
        self._is_checked = True

    def _check(self, tokens: range, block_size: int) -> None:
        ids, name = self.ids, self._name
        if len(ids) * block_size < tokens.stop:
            raise PlanError(
                f"{name} has {len(ids)} blocks of {block_size} tokens; "
                f"{tokens.stop} tokens need {-(-tokens.stop // block_size)}"
            )
        # Numpy's reductions take longer than these, unless a loop has just called them.
        used = ids[tokens.start // block_size : -(-tokens.stop // block_size)]
        low, high, last = min(used), max(used), self._num_blocks - 1
        if low < 0 or high > last:
            wrong = low if low < 0 else high
            raise PlanError(f"{name} names block {wrong}; the pool has blocks 0 to {last}")
        if self._distinct and len(set(used)) < len(used):
            twice = next(block for index, block in enumerate(used) if block in used[:index])
            raise PlanError(f"{name} names block {twice} twice")


def int_array(numbers: list[int]) -> IntArray:
    """i64[n], in half the time that `np.array` takes."""
    return np.frombuffer(array("q", numbers), np.int64)


def cut_tokens(start: int, stop: int, *block_sizes: int) -> tuple[IntArray, IntArray]:
    """Cuts [start, stop) at every block border: first tokens and token counts, i64[n] each."""
    if start >= stop:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    borders = [np.array([start, stop], np.int64)]
    for size in set(block_sizes):
        borders.append(np.arange((start // size + 1) * size, stop, size, dtype=np.int64))
    cuts = np.sort(np.concatenate(borders))
    lengths = cuts[1:] - cuts[:-1]
    apart = lengths > 0
    return cuts[:-1][apart], lengths[apart]


def at_blocks(table: IntArray, tokens: IntArray, strides: dict[str, int], size: int) -> IntArray:
    """Byte offset of tokens (given by position in the sequence), of head 0 and layer 0."""
    return table[tokens // size] * strides["B"] + tokens % size * strides["N"]


def split_ends(transfer: Transfer) -> tuple[Transfer | None, list[Transfer]]:
    """The tokens in blocks that both sides want whole, and those before and after them."""
    period = lcm(transfer.local.layout.block_size, transfer.remote[0].layout.block_size)
    start, stop = transfer.token_start, transfer.token_stop
    first, last = -(-start // period) * period, stop // period * period
    if first >= last:
        return None, [transfer]
    spans = [(low, high) for low, high in ((start, first), (last, stop)) if low < high]
    ends = [replace(transfer, token_start=low, token_stop=high) for low, high in spans]
    return replace(transfer, token_start=first, token_stop=last), ends


def direct_boxes(transfer: Transfer) -> list[tuple[int, Boxes]]:
    """The boxes from each rank of P straight to the local pool."""
    local, remote = transfer.local.layout, transfer.remote[0].layout
    starts, tokens = cut_tokens(
        transfer.token_start, transfer.token_stop, local.block_size, remote.block_size
    )
    into = at_blocks(transfer.local_blocks, starts, byte_strides(local), local.block_size)
    first = transfer.local.heads(transfer.total_kv_heads).start
    found = []
    for group in transfer.groups:
        whose = group.owner_index(starts // remote.block_size)
        target = into + (group.heads.start - first) * byte_strides(local)["H"]
        for index, owner in enumerate(group.owners):
            mine = slice(None) if len(group.owners) == 1 else whose == index
            source = remote_offsets(transfer, owner, starts[mine], group.heads.start)
            boxes = pair_boxes(
                byte_strides(transfer.remote[owner].layout),
                byte_strides(local),
                (source, target[mine], tokens[mine]),
                (len(group.heads), remote.num_layers, remote.num_components),
                remote.head_dim * remote.itemsize,
            )
            found.append((owner, boxes))
    return found


def remote_offsets(transfer: Transfer, owner: int, tokens: IntArray, head: int) -> IntArray:
    """Byte offset in `owner`'s pool of head `head` (of the model) at tokens of the sequence."""
    end = transfer.remote[owner]
    strides, size = byte_strides(end.layout), end.layout.block_size
    local_head = head - end.heads(transfer.total_kv_heads).start
    return at_blocks(transfer.remote_blocks, tokens, strides, size) + local_head * strides["H"]


def pair_boxes(
    remote_strides: dict[str, int],
    local_strides: dict[str, int],
    places: tuple[IntArray, IntArray, IntArray],
    extents: tuple[int, int, int],
    element_bytes: int,
) -> Boxes:
    """Boxes of `extents` (heads, layers, components) at `places` (remote, local, token counts)."""
    axes = tuple(
        Axis(extent, remote_strides[axis], local_strides[axis])
        for axis, extent in zip("HLC", extents, strict=True)
    )
    token_axis = Axis(0, remote_strides["N"], local_strides["N"])
    remote, local, tokens = places
    return Boxes(remote, local, tokens, token_axis, axes, element_bytes)
