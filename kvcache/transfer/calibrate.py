"""Measuring a link at first contact: what to read, and what the times say.

Two probes tell the cost of a descriptor from that of a byte: a few long runs and many short ones.
Both read the peer's null block, which holds nobody's KV and always exists, into staging memory.
The caller does the reading and the timing.
"""

from typing import NamedTuple

import numpy as np

from kvcache.transfer.boxes import pair_boxes
from kvcache.transfer.cost import CostModel
from kvcache.transfer.runs import RankRead, Runs, find_runs
from kvcache.transfer.topology import Endpoint, IntArray, byte_strides

_LONG_BYTES = 16 << 20  # enough to time, little enough to wait for
_SHORT_RUNS = 512
_SHORT_BYTES = 256


class Sample(NamedTuple):
    """One probe, timed."""

    descriptors: int
    nbytes: int
    seconds: float


def probe_reads(remote: Endpoint, staging_bytes: int) -> tuple[RankRead, RankRead]:
    """A read of few long runs and one of many short runs, both of the null block of one rank."""
    runs = _null_block(remote)
    total = min(_LONG_BYTES, staging_bytes)
    lengths = np.minimum(runs.lengths, total)
    times = max(1, total // int(lengths.sum()))
    long = _packed(remote.rank, np.tile(runs.remote, times), np.tile(lengths, times), total)
    size = int(min(_SHORT_BYTES, lengths.min()))
    starts = (runs.remote[:, None] + np.arange(0, int(lengths.min()) - size + 1, size)).reshape(-1)
    starts = np.resize(starts, _SHORT_RUNS)
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


def _null_block(remote: Endpoint) -> Runs:
    layout = remote.layout
    strides = byte_strides(layout)
    start = np.zeros(1, np.int64)
    places = (start, start, np.full(1, layout.block_size, np.int64))
    extents = (layout.num_heads, layout.num_layers, layout.num_components)
    return find_runs(
        pair_boxes(strides, strides, places, extents, layout.head_dim * layout.itemsize)
    )


def _packed(rank: int, remote: IntArray, lengths: IntArray, room: int) -> RankRead:
    """The runs side by side in staging memory, as many as fit."""
    ends = np.cumsum(lengths)
    fitting = max(1, int(np.searchsorted(ends, room, side="right")))
    return RankRead(rank, remote[:fitting], (ends - lengths)[:fitting], lengths[:fitting])
