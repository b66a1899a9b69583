"""Measuring a link at first contact: what to read, and what the times say.

Two probes tell the cost of a descriptor from that of a byte: a few long runs and many short ones.
Both read the peer's null block, which holds nobody's KV and always exists, into staging memory.
The caller does the reading and the timing.
"""

from typing import NamedTuple

import numpy as np

from kvcache.transfer.plan.block_copy import BlockCopy, ReadDescriptors, descriptors
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import Endpoint, IntArray

_LONG_BYTES = 16 << 20  # enough to time, little enough to wait for
_SHORT_RUNS = 512
_SHORT_BYTES = 256


class Sample(NamedTuple):
    """One probe, timed."""

    descriptors: int
    nbytes: int
    seconds: float


def probe_reads(remote: Endpoint, staging_bytes: int) -> tuple[ReadDescriptors, ReadDescriptors]:
    """A read of few long runs and one of many short runs, both of the null block of one rank."""
    layout, start = remote.layout, np.zeros(1, np.int64)
    block = BlockCopy(0, layout, layout, layout.num_heads, layout.block_size, start, start)
    (runs,) = descriptors([block])  # the null block
    total = min(_LONG_BYTES, staging_bytes)
    lengths = np.minimum(runs.lengths, total)
    times = max(1, total // int(lengths.sum()))
    long = _packed(remote.rank, np.tile(runs.remote_offsets, times), np.tile(lengths, times), total)
    size = int(min(_SHORT_BYTES, lengths.min()))
    within = np.arange(0, int(lengths.min()) - size + 1, size)
    starts = np.resize(runs.remote_offsets[:, None] + within, _SHORT_RUNS)
    short = _packed(remote.rank, starts, np.full(_SHORT_RUNS, size, np.int64), staging_bytes)
    return long, short


def fit_costs(long: Sample, short: Sample, *, reformat_bytes_per_s: float) -> CostModel:
    """The two constants that explain both samples.

    A run of a probe costs p + bytes / w: two equations in p and 1 / w. Where noise makes one of
    them negative, it is taken as far too small to matter, not as a gain.
    """
    determinant = long.descriptors * short.nbytes - short.descriptors * long.nbytes
    if determinant == 0:
        raise ValueError(f"probes {long} and {short} are alike; use runs of two lengths")
    per_descriptor = (long.seconds * short.nbytes - short.seconds * long.nbytes) / determinant
    per_byte = (long.descriptors * short.seconds - short.descriptors * long.seconds) / determinant
    return CostModel(
        per_descriptor_s=max(per_descriptor, 1e-8),
        bytes_per_s=1 / max(per_byte, 1e-13),
        reformat_bytes_per_s=reformat_bytes_per_s,
    )


def _packed(rank: int, remote: IntArray, lengths: IntArray, room: int) -> ReadDescriptors:
    """The runs side by side in staging memory, as many as fit."""
    ends = np.cumsum(lengths)
    fitting = max(1, int(np.searchsorted(ends, room, side="right")))
    return ReadDescriptors(rank, remote[:fitting], (ends - lengths)[:fitting], lengths[:fitting])
