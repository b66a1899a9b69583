"""What moving bytes costs, so that the planner can choose between ways of moving them; and how that
is measured at first contact.

Two probes tell the cost of a descriptor from that of a byte: a few long runs and many short ones.
Both read the peer's null block, which holds nobody's KV and always exists. The caller does the
reading and the timing. Long runs grow while they take no time, so that a slow link is not busy with
them for seconds.
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
    overlaps: bool = True  # chunks are read while others are placed: not where READs are copies

    def __str__(self) -> str:
        read, place = self.bytes_per_s / 1e9, self.reformat_bytes_per_s / 1e9
        microseconds = self.per_descriptor_s * 1e6
        return f"{microseconds:.2f} us per descriptor, {read:.2f} GB/s, reformat {place:.2f} GB/s"

    @classmethod
    def configured(cls, numbers: Sequence[float], device: str) -> "CostModel | None":
        """From us per descriptor, GB/s of reading and GB/s of placing; None where there are none.

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

    def staged_s(self, read_s: float, place_s: float, chunks: int, last_share: float) -> float:
        """Seconds of a staged transfer whose parts take so long alone.

        Args:
            last_share: of the last chunk in all bytes.
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
    at_once: bool = False  # it had ended when it was posted: a copy by the thread that posts


def measure_link(
    remote: Endpoint, room: int, most_bytes: int, read: Callable[[ReadDescriptors], Sample]
) -> tuple[Sample, Sample]:
    """A probe of few long runs and one of many short runs.

    Args:
        room: bytes to read into, which many runs may share.
        most_bytes: of the long runs.
        read: carries out one of `room`; local offsets count from its start.
    """
    many, nbytes = probe(remote, room, _SHORT_RUNS * _SHORT_BYTES, _SHORT_BYTES), _FIRST_BYTES
    read(many)  # connects, and makes memory resident
    short, long = read(many), read(probe(remote, room, min(nbytes, most_bytes)))
    while long.seconds < _ENOUGH_S and nbytes < most_bytes * _GROWTH:  # the last one twice: it was
        nbytes *= _GROWTH  # the first use of some of the memory
        long = read(probe(remote, room, min(nbytes, most_bytes)))
    return long, short


def probe(
    remote: Endpoint, room: int, nbytes: int, run_bytes: int | None = None
) -> ReadDescriptors:
    """About `nbytes` of the null block, again and again, in runs that are as long as can be.

    Args:
        room: bytes to read into; runs go over the first ones again where it ends.
        run_bytes: runs are no longer.
    """
    layout, start = remote.layout, np.zeros(1, np.int64)
    block = BlockCopy(0, layout, layout, layout.num_heads, layout.block_size, start, start)
    (runs,) = descriptors([block])
    length = int(runs.lengths[0])
    size = min(run_bytes or length, length, nbytes, room)
    starts = np.add.outer(runs.remote_offsets, np.arange(0, length - size + 1, size)).reshape(-1)
    starts = np.resize(starts, max(1, nbytes // size))
    local = np.arange(len(starts)) * size % (room - size + 1)
    return ReadDescriptors(remote.rank, starts, local, np.full(len(starts), size))


def fit_costs(long: Sample, short: Sample, *, on_gpu: bool = False) -> CostModel:
    """The two constants that explain both samples, and the usual speed of placing here.

    A run of a probe costs p + bytes / w: two equations in p and 1 / w. Where noise makes one of
    them negative, it is taken as far too small to matter, not as a gain. Where READs are copies by
    the thread that posts them, placing is such a copy as well, and nothing overlaps.
    """
    determinant = long.descriptors * short.nbytes - short.descriptors * long.nbytes
    if determinant == 0:
        raise ValueError(f"probes {long} and {short} are alike; use runs of two lengths")
    per_descriptor = (long.seconds * short.nbytes - short.seconds * long.nbytes) / determinant
    per_byte = (long.descriptors * short.seconds - short.descriptors * long.seconds) / determinant
    bytes_per_s = 1 / max(per_byte, 1e-13)
    copies = long.at_once and short.at_once
    place = DEFAULT_COSTS["cuda" if on_gpu else "cpu"].reformat_bytes_per_s
    place = min(place, bytes_per_s) if copies else place
    return CostModel(max(per_descriptor, 1e-8), bytes_per_s, place, overlaps=not copies)
