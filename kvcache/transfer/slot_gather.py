"""Places staged chunks on a GPU with the mapped path's gather kernel, which reads a slot like a
peer's mapped memory.

Torch's indexed copy is as fast, but takes 0.15 to 0.2 ms to start, as long as reading a chunk. A
launch of the kernel takes 0.02 ms.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvcache.transfer.boxes import BlockTable, Transfer
from kvcache.transfer.gather import Gather, shares_of
from kvcache.transfer.mapper import MappedMemory, Mapper, Work
from kvcache.transfer.staged import Region, Span
from kvcache.transfer.staged import Staging as StagedTransfer
from kvcache.transfer.topology import Endpoint, HeadGroup, byte_strides


@dataclass(frozen=True)
class _RegionEnd(Endpoint):
    """A region of a slot, as if it were a rank of a peer."""

    held: range = range(0)

    def heads(self, total_kv_heads: int) -> range:
        return self.held


@dataclass(frozen=True, eq=False)
class _Way:
    """How chunks of one shape are gathered, but for the blocks and tokens of a pull."""

    ends: tuple[_RegionEnd, ...]
    groups: tuple[HeadGroup, ...]
    offsets: tuple[int, ...]  # of each region in its slot, in bytes
    kept: dict[Any, Any] = field(default_factory=dict)  # as of Transfer


class SlotGather:
    """Places the chunks of one pull at a time; one thread's, as its mapper is."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        self._works: list[tuple[StagedTransfer, Work]] = []  # of this pull

    def prepare(self, transfer: Transfer) -> None:
        """Pulls between these endpoints are going to be staged."""
        self._mapper.prepare(transfer)

    def place(self, span: Span, slot_address: int, tokens: list[Any]) -> None:
        """Begins to place a chunk that was read to a slot.

        Args:
            tokens: gets what tells the end of all that has begun, for `finished`.
        """
        work, way = self._work_of(span.staging), _way_of(span.staging)
        size = span.staging.transfer.remote[0].layout.block_size
        first = max(span.first, span.start // size)
        count = span.last - first
        gathers = [
            Gather(share, span.start, span.stop, first, count)
            for (share,) in shares_of(work.transfer)
        ]
        sources = [MappedMemory(slot_address + offset) for offset in way.offsets]
        part = Work(gathers, sources, work.transfer, work.device_copy)
        for index in range(len(gathers)):
            tokens.append(self._mapper.launch(part, index, 0, count))

    def finished(self, tokens: list[Any]) -> bool:
        """Whether a chunk is placed; forgets what has ended."""
        while tokens and self._mapper.finished(tokens[0]):
            tokens.pop(0)
        return not tokens

    def end(self) -> None:
        """The pull is over, and all that it placed."""
        for _, work in self._works:
            self._mapper.end(work)
        self._works.clear()

    def _work_of(self, staging: StagedTransfer) -> Work:
        for known, work in self._works:
            if known is staging:
                return work
        work = self._mapper.begin(Work((), (), _from_slots(staging, _way_of(staging))))
        self._works.append((staging, work))
        return work


def _from_slots(staging: StagedTransfer, way: _Way) -> Transfer:
    """The transfer out of slots: blocks of P by their place in the slot that their chunk fills."""
    borders = np.array(staging.borders, np.int64)
    slot_blocks = np.arange(borders[-1], dtype=np.int64)
    slot_blocks[borders[0] :] -= borders[:-1].repeat(borders[1:] - borders[:-1])
    return replace(
        staging.transfer,
        remote=way.ends,
        groups=way.groups,
        remote_table=BlockTable.of(slot_blocks),
        kept=way.kept,
    )


def _way_of(staging: StagedTransfer) -> _Way:
    kept = staging.transfer.kept
    key = ("slot gather", staging.way.wider, staging.regions[0].source.num_blocks)
    found: _Way | None = kept.get(key)
    if found is None:
        found = kept[key] = _make_way(staging)
    return found


def _make_way(staging: StagedTransfer) -> _Way:
    transfer = staging.transfer
    parts = list(zip(transfer.groups, staging.regions, staging.region_heads, strict=True))
    scales = transfer.remote[0].scales
    return _Way(
        tuple(
            _RegionEnd(region.source, index, len(parts), scales, held=heads)
            for index, (_, region, heads) in enumerate(parts)
        ),
        tuple(HeadGroup(group.heads, (index,), 0) for index, (group, _, _) in enumerate(parts)),
        tuple(_offset(*part) for part in parts),
    )


def _offset(group: HeadGroup, region: Region, heads: range) -> int:
    """Of the region itself; `source_offset` is that of the first wanted head."""
    skipped = (group.heads.start - heads.start) * byte_strides(region.source)["H"]
    return region.source_offset - skipped
