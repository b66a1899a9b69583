"""What the planner (plan.py) decides for one pull on one rank of D."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvcache.transfer.chunks import Chunks
from kvcache.transfer.runs import RankRead
from kvcache.transfer.staged import Chunk


@dataclass(frozen=True)
class TransferPlan:
    """What one rank of D does to get its KV: all reads, and all chunks, whatever the path."""

    path: Literal["direct", "staged", "mixed", "mapped"]
    reads: tuple[RankRead, ...]  # straight into the pool
    chunks: Sequence[Chunk]  # each is read into a slot, then reformat.apply places it
    bytes_read: int  # over the link
    useful_bytes: int  # wanted, in the peer's dtype
    estimated_s: float
    reason: str

    @cached_property
    def descriptors(self) -> int:
        """Of reads and chunks together; makes all chunks."""
        staged = [read for chunk in self.chunks for read in chunk.reads]
        return sum(len(read.lengths) for read in (*self.reads, *staged))

    @property
    def slot_bytes(self) -> int:
        """Of staging memory, at most, by one chunk."""
        if isinstance(self.chunks, Chunks):
            return self.chunks.slot_bytes
        return max((chunk.nbytes for chunk in self.chunks), default=0)

    @property
    def why(self) -> str:
        """For people; makes all chunks."""
        if not self.descriptors:
            return f"{self.path}: {self.reason}"
        read = summary(self.descriptors, self.bytes_read, self.estimated_s)
        return f"{self.path}: {read}; {self.reason}"


def summary(descriptors: int, nbytes: int, seconds: float) -> str:
    return f"{descriptors} runs of {nbytes // descriptors} bytes on average in {seconds:.2g} s"
