"""The cost of moving bytes over a link, for the planner, and its measurement at first contact.

Two probes separate the cost of a descriptor from that of a byte: a few long runs and many short
ones. Both read the peer's null block, which always exists and holds no KV. The caller reads and
takes the time. Long runs grow only while they are quick, so that a slow link is not busy with them
for seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcache.transfer.plan.block_copy import BlockCopy, ReadDescriptors, descriptors
from kvcache.transfer.plan.endpoint import Endpoint

_FIRST_BYTES, _GROWTH, _ENOUGH_S = 256 << 10, 4, 0.002
_SHORT_RUNS, _SHORT_BYTES = 512, 256


@dataclass(frozen=True)
class CostModel:
    """Constants of one link, above 0, calibrated at first contact or configured."""

    per_descriptor_s: float
    bytes_per_s: float
    reformat_bytes_per_s: float
    overlaps: bool = (
        True  # one chunk is read while another is placed; not if READs are CPU copies
    )

    def __str__(self) -> str:
        read, place = self.bytes_per_s / 1e9, self.reformat_bytes_per_s / 1e9
        microseconds = self.per_descriptor_s * 1e6
        return f"{microseconds:.2f} us per descriptor, {read:.2f} GB/s, reformat {place:.2f} GB/s"

    @classmethod
    def configured(cls, numbers: Sequence[float], device: str) -> "CostModel | None":
        """From (us per descriptor, GB/s of reading, GB/s of placing); None from no numbers.

        Args:
            device: "cpu" or "cuda".
        """
        if not numbers:
            return None
        per_descriptor_us, read, place = numbers
        overlaps = DEFAULT_COSTS[device].overlaps
        return cls(per_descriptor_us * 1e-6, read * 1e9, place * 1e9, overlaps)

    def read_s(self, descriptors: int, nbytes: int) -> float:
        """Seconds to read `nbytes` in `descriptors` pieces."""
        return descriptors * self.per_descriptor_s + nbytes / self.bytes_per_s

    def staged_s(
        self, read_s: float, place_s: float, chunks: int, last_share: float
    ) -> float:
        """Seconds of a staged transfer whose reading and placing take so long alone.

        Args:
            last_share: share of the last chunk in all bytes.
        """
        if not self.overlaps:
            return read_s + place_s
        # Reading and placing overlap, but for the first chunk's read or the last one's placing.
        return max(read_s + place_s * last_share, place_s + read_s / chunks)


DEFAULT_COSTS = {
    "cpu": CostModel(3e-6, 8e9, 8e9, overlaps=False),
    "cuda": CostModel(6e-6, 300e9, 1.2e12),
}


class Sample(NamedTuple):
    """One probe, timed."""

    descriptors: int
    nbytes: int
    seconds: float
    at_once: bool = False  # the READ ended within its post: the posting thread copied


def measure_link(
    remote: Endpoint,
    room: int,
    most_bytes: int,
    read: Callable[[ReadDescriptors], Sample],
) -> tuple[Sample, Sample]:
    """A probe of few long runs and one of many short runs.

    Args:
        room: bytes of the memory that is read into; runs may overwrite each other.
        most_bytes: bound of the long probe.
        read: carries out a probe; local offsets count from the start of that memory.
    """
    many, nbytes = (
        probe(remote, room, _SHORT_RUNS * _SHORT_BYTES, _SHORT_BYTES),
        _FIRST_BYTES,
    )
    read(many)  # connects, and makes memory resident
    short, long = read(many), read(probe(remote, room, min(nbytes, most_bytes)))
    while (
        long.seconds < _ENOUGH_S and nbytes < most_bytes * _GROWTH
    ):  # the last one twice: it was
        nbytes *= _GROWTH  # the first use of some of the memory
        long = read(probe(remote, room, min(nbytes, most_bytes)))
    return long, short


def probe(
    remote: Endpoint, room: int, nbytes: int, run_bytes: int | None = None
) -> ReadDescriptors:
    """About `nbytes` of READs of the null block, repeatedly, in the longest possible runs.

    Args:
        room: bytes of the memory that is read into; later runs overwrite the first ones.
        run_bytes: bound of a run.
    """
    layout, start = remote.layout, np.zeros(1, np.int64)
    block = BlockCopy(
        0, layout, layout, layout.num_heads, layout.block_size, start, start
    )
    (runs,) = descriptors([block])
    length = int(runs.lengths[0])
    size = min(run_bytes or length, length, nbytes, room)
    starts = np.add.outer(
        runs.remote_offsets, np.arange(0, length - size + 1, size)
    ).reshape(-1)
    starts = np.resize(starts, max(1, nbytes // size))
    local = np.arange(len(starts)) * size % (room - size + 1)
    return ReadDescriptors(remote.rank, starts, local, np.full(len(starts), size))


def fit_costs(long: Sample, short: Sample, *, on_gpu: bool = False) -> CostModel:
    """The two constants that explain both samples, and the default speed of placing.

    A run of a probe costs p + bytes / w: two equations in p and 1 / w. A solution that noise makes
    negative is replaced by a negligible one. If the posting thread copies, placing is such a copy
    as well, and nothing overlaps. Raises ValueError if both samples have the same bytes per run.
    """
    determinant = long.descriptors * short.nbytes - short.descriptors * long.nbytes
    if determinant == 0:
        raise ValueError(
            f"probes {long} and {short} are alike; use runs of two lengths"
        )
    per_descriptor = (
        long.seconds * short.nbytes - short.seconds * long.nbytes
    ) / determinant
    per_byte = (
        long.descriptors * short.seconds - short.descriptors * long.seconds
    ) / determinant
    bytes_per_s = 1 / max(per_byte, 1e-13)
    copies = long.at_once and short.at_once
    place = DEFAULT_COSTS["cuda" if on_gpu else "cpu"].reformat_bytes_per_s
    place = min(place, bytes_per_s) if copies else place
    return CostModel(max(per_descriptor, 1e-8), bytes_per_s, place, overlaps=not copies)
