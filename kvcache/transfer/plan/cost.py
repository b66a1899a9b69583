"""The cost of moving bytes over a link: measured at first contact, for the planner.

Two probes separate the cost of a descriptor from the cost of a byte: the long probe has
a few long runs, the short probe has many short runs. Both read the peer's null block,
which always exists and contains no KV. The caller carries out the READs and measures
their time. The long probe is repeated with more bytes only if it took little time, so
that probing does not occupy a slow link for seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcache.transfer.plan.block_copy import BlockCopy, ReadDescriptors, descriptors
from kvcache.transfer.plan.endpoint import Endpoint

_FIRST_PROBE_BYTES = 256 << 10
_PROBE_GROWTH = 4  # each long probe has this many times the bytes of the previous one
# The long probe is repeated with more bytes until it takes at least this time, because
# a shorter time cannot be measured precisely enough.
_MIN_PROBE_S = 0.002
_NUM_SHORT_RUNS = 512
_SHORT_RUN_BYTES = 256


@dataclass(frozen=True)
class CostModel:
    """Costs of one link, measured at first contact or configured. All numbers are > 0.

    Attributes:
        per_descriptor_s: seconds that each contiguous run (descriptor) of a READ takes
            in addition to the time for its bytes.
        bytes_per_s: speed of READs, not counting the cost of the descriptors.
        place_bytes_per_s: speed of copying ("placing") from staging memory into the
            pool.
        overlaps: a chunk can be read while the previous chunk is placed; False if READs
            are CPU copies.
    """

    per_descriptor_s: float
    bytes_per_s: float
    place_bytes_per_s: float
    overlaps: bool = True

    def __str__(self) -> str:
        per_descriptor_us = self.per_descriptor_s * 1e6
        read_gb_per_s = self.bytes_per_s / 1e9
        place_gb_per_s = self.place_bytes_per_s / 1e9
        return (
            f"{per_descriptor_us:.2f} us per descriptor, {read_gb_per_s:.2f} GB/s, "
            f"placing {place_gb_per_s:.2f} GB/s"
        )

    @classmethod
    def configured(cls, numbers: Sequence[float], device: str) -> "CostModel | None":
        """The cost model from configured numbers; None if there are no numbers.

        Args:
            numbers: us per descriptor, GB/s of reading, GB/s of placing; or empty.
            device: "cpu" or "cuda".
        """
        if not numbers:
            return None
        per_descriptor_us, read_gb_per_s, place_gb_per_s = numbers
        return cls(
            per_descriptor_s=per_descriptor_us * 1e-6,
            bytes_per_s=read_gb_per_s * 1e9,
            place_bytes_per_s=place_gb_per_s * 1e9,
            overlaps=DEFAULT_COSTS[device].overlaps,
        )

    def read_s(self, num_descriptors: int, nbytes: int) -> float:
        """Seconds to read `nbytes` in `num_descriptors` runs."""
        return num_descriptors * self.per_descriptor_s + nbytes / self.bytes_per_s

    def staged_s(
        self, read_s: float, place_s: float, num_chunks: int, last_share: float
    ) -> float:
        """Seconds that a staged transfer takes.

        Args:
            read_s: seconds that reading all chunks takes, without any placing.
            place_s: seconds that placing all chunks takes, without any reading.
            last_share: the last chunk's share of all bytes.
        """
        if not self.overlaps:
            return read_s + place_s
        # Reading the first chunk overlaps no placing, and placing the last chunk
        # overlaps no reading. Otherwise the two overlap, and the slower one decides.
        return max(read_s + place_s * last_share, place_s + read_s / num_chunks)


DEFAULT_COSTS = {
    "cpu": CostModel(3e-6, 8e9, 8e9, overlaps=False),
    "cuda": CostModel(6e-6, 300e9, 1.2e12),
}


class Sample(NamedTuple):
    """One probe and its measured time.

    Attributes:
        num_descriptors: number of runs.
        ended_at_once: the READ ended within its post, because the posting thread itself
            copied the bytes.
    """

    num_descriptors: int
    nbytes: int
    seconds: float
    ended_at_once: bool = False


def measure_link(
    remote: Endpoint,
    target_bytes: int,
    max_bytes: int,
    read: Callable[[ReadDescriptors], Sample],
) -> tuple[Sample, Sample]:
    """Measures the long probe and the short probe.

    Args:
        remote: the rank of P to read from.
        target_bytes: size of the memory that is read into; runs may overwrite each
            other.
        max_bytes: largest number of bytes of the long probe.
        read: carries out a probe and measures its time. The probe's local offsets count
            from the start of the memory that is read into.

    Returns:
        The samples of the long probe and of the short probe.
    """
    short_bytes = _NUM_SHORT_RUNS * _SHORT_RUN_BYTES
    short_probe = probe(remote, target_bytes, short_bytes, _SHORT_RUN_BYTES)
    # The time of the first READ is not used, because it includes connecting and the
    # first use of memory pages.
    read(short_probe)
    short = read(short_probe)
    nbytes = _FIRST_PROBE_BYTES
    long = read(probe(remote, target_bytes, min(nbytes, max_bytes)))
    # The largest probe is read twice, because the first time includes the first use of
    # some of the memory.
    while long.seconds < _MIN_PROBE_S and nbytes < max_bytes * _PROBE_GROWTH:
        nbytes *= _PROBE_GROWTH
        long = read(probe(remote, target_bytes, min(nbytes, max_bytes)))
    return long, short


def probe(
    remote: Endpoint, target_bytes: int, nbytes: int, run_bytes: int | None = None
) -> ReadDescriptors:
    """Returns a READ of about `nbytes` of the null block, in runs of equal size.

    If the null block is smaller than `nbytes`, it is read several times. Runs are as
    long as the layout and `run_bytes` allow.

    Args:
        target_bytes: size of the memory that is read into. If it is smaller than
            `nbytes`, runs overwrite each other.
        run_bytes: largest size of a run; None: no limit.
    """
    layout = remote.layout
    start = np.zeros(1, np.int64)
    block = BlockCopy(
        owner=0,
        source=layout,
        target=layout,
        num_heads=layout.num_heads,
        num_tokens=layout.block_size,
        sources=start,
        targets=start,
    )
    (runs,) = descriptors([block])
    length = int(runs.lengths[0])
    size = min(run_bytes or length, length, nbytes, target_bytes)
    offsets = np.arange(0, length - size + 1, size)
    remote_offsets = np.add.outer(runs.remote_offsets, offsets).reshape(-1)
    remote_offsets = np.resize(remote_offsets, max(1, nbytes // size))
    num_runs = len(remote_offsets)
    return ReadDescriptors(
        remote_rank=remote.rank,
        remote_offsets=remote_offsets,
        local_offsets=np.arange(num_runs) * size % (target_bytes - size + 1),
        lengths=np.full(num_runs, size),
    )


def fit_costs(long: Sample, short: Sample, *, on_gpu: bool = False) -> CostModel:
    """Computes the costs of a link from both samples.

    A run takes p + bytes / w seconds, where p is the cost of a descriptor and w the
    speed. The samples give two equations in p and 1 / w. If noise makes a solution
    negative, a negligible value replaces it. The speed of placing (copying from staging
    memory into the pool) is not measured; a default is used. If both READs ended within
    their posts, READs are copies by the CPU. Then placing is assumed to be no faster
    than such a READ, and cannot overlap reading.

    Raises:
        ValueError: both samples have the same bytes per run.
    """
    determinant = (
        long.num_descriptors * short.nbytes - short.num_descriptors * long.nbytes
    )
    if determinant == 0:
        run_bytes = long.nbytes // long.num_descriptors
        raise ValueError(
            f"both probes have runs of {run_bytes} bytes, so the cost of a descriptor "
            "cannot be separated from the cost of a byte"
        )
    per_descriptor = long.seconds * short.nbytes - short.seconds * long.nbytes
    per_byte = (
        long.num_descriptors * short.seconds - short.num_descriptors * long.seconds
    )
    bytes_per_s = 1 / max(per_byte / determinant, 1e-13)
    reads_are_copies = long.ended_at_once and short.ended_at_once
    place_bytes_per_s = DEFAULT_COSTS["cuda" if on_gpu else "cpu"].place_bytes_per_s
    if reads_are_copies:
        place_bytes_per_s = min(place_bytes_per_s, bytes_per_s)
    return CostModel(
        per_descriptor_s=max(per_descriptor / determinant, 1e-8),
        bytes_per_s=bytes_per_s,
        place_bytes_per_s=place_bytes_per_s,
        overlaps=not reads_are_copies,
    )
