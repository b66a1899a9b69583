"""The strategies of a transfer, their estimated costs, and their steps.

A part of a block may be hundreds of short runs, although the whole block is one run. So
a strategy may read more than the wanted tokens, but never blocks that are not leased. A
direct strategy may add only the tail of the last block: in D's pool, the tail belongs
to the sequence and contains no KV yet.

A staged strategy divides the transfer into *chunks* of P's blocks. A chunk fits into a
slot of staging memory. While the chunk of one slot is placed, READs fill other slots.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from kvcache.transfer.plan.block_copy import Transfer, count_descriptors
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import PlanError
from kvcache.transfer.plan.steps import Step, slot_of

# If READs are CPU copies, a chunk should still be in the CPU cache when it is placed.
# So a chunk has at most as many bytes as can be read in this time.
_CACHED_CHUNK_S = 0.75e-3
# Limit on the number of chunks that are small enough for the CPU cache, because each
# chunk has to be posted and polled. A longer transfer has larger chunks.
_MAX_CACHED_CHUNKS = 32
# If placing overlaps READs, a transfer is read either in about this many equal chunks
# (a pipeline) or in chunks as large as possible, whichever costs less. Only the last
# chunk is placed without overlapping a READ: with eight chunks, an eighth of the KV.
_PIPELINE_CHUNKS = 8
# A pipeline's chunks are so small that the staging memory can be divided into this many
# slots. So the link stays busy while copies out of one slot are launched.
_PIPELINE_SLOTS = 4
# A pipeline's chunks are so large that reading a chunk takes at least this long, if
# such a chunk fits into half the staging memory. Posting and placing a chunk takes
# about as long.
_MIN_PIPELINE_CHUNK_S = 0.1e-3
# A run between GPUs takes at least this long, although a probe may measure less. This
# minimum is used for all links with READs that are not CPU copies.
_MIN_RUN_S = 3e-6


class TransferStrategy(NamedTuple):
    """The way in which the KV of a transfer is moved.

    Attributes:
        staged: READ into staging memory, then copy ("place") into the pool; otherwise
            READ directly into the pool.
        whole_blocks: read whole blocks, even if only a part of a block is wanted. A
            direct transfer does so only at its end; see `_tokens_to_read`.
        all_heads: read all heads that the source ranks of P hold, not only the wanted
            heads.
        pipelined: read in about _PIPELINE_CHUNKS chunks; otherwise in chunks as large
            as possible.
    """

    staged: bool
    whole_blocks: bool
    all_heads: bool = False
    pipelined: bool = False


class Estimate(NamedTuple):
    """The estimated cost of moving a transfer by one strategy.

    Attributes:
        num_descriptors: number of runs of the READs.
        nbytes: bytes that the READs move.
    """

    strategy: TransferStrategy
    num_descriptors: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return describe_runs(self.num_descriptors, self.nbytes, self.seconds)


def describe_runs(num_runs: int, nbytes: int, seconds: float) -> str:
    """A text for logs: the number of runs, their average size, and their time."""
    average = nbytes // num_runs
    return f"{num_runs} runs of {average} bytes on average in {seconds:.2g} s"


def cheapest_direct(transfer: Transfer, costs: CostModel) -> Estimate:
    """The estimate of the cheapest strategy that reads straight into the pool."""
    estimates = [
        _estimate(
            transfer,
            TransferStrategy(staged=False, whole_blocks=whole_blocks),
            costs,
            staging_bytes=0,
        )
        for whole_blocks in (False, True)
    ]
    return min(estimates, key=lambda estimate: estimate.seconds)


def cheapest_staged(
    transfer: Transfer, costs: CostModel, staging_bytes: int
) -> Estimate:
    """The estimate of the cheapest staged strategy. The transfer must have tokens.

    Raises:
        PlanError: half the staging memory is smaller than one block.
    """
    layout = transfer.remote[0].layout
    needed_heads = _heads(transfer, all_heads=False)
    held_heads = _heads(transfer, all_heads=True)
    block_bytes = slot_of(layout, needed_heads, 1).nbytes
    if staging_bytes // 2 < block_bytes:
        raise PlanError(
            f"staging_bytes is {staging_bytes}; a block of the peer takes "
            f"{block_bytes} bytes, and two must fit: use at least {2 * block_bytes}"
        )
    can_read_all_heads = (
        held_heads != needed_heads
        and slot_of(layout, held_heads, 1).nbytes <= staging_bytes // 2
    )
    all_heads_choices = (False, True) if can_read_all_heads else (False,)
    pipelined_choices = (False, True) if costs.overlaps else (False,)
    estimates = []
    for whole_blocks in (False, True):
        for all_heads in all_heads_choices:
            for pipelined in pipelined_choices:
                strategy = TransferStrategy(
                    staged=True,
                    whole_blocks=whole_blocks,
                    all_heads=all_heads,
                    pipelined=pipelined,
                )
                estimates.append(_estimate(transfer, strategy, costs, staging_bytes))
    extra_s_per_run = 0.0
    if costs.overlaps:
        extra_s_per_run = max(_MIN_RUN_S - costs.per_descriptor_s, 0.0)
    return min(
        estimates,
        key=lambda estimate: (
            estimate.seconds + extra_s_per_run * estimate.num_descriptors
        ),
    )


def steps(
    transfer: Transfer,
    strategy: TransferStrategy,
    costs: CostModel,
    staging_bytes: int,
) -> Iterator[Step]:
    """Yields the steps that move a transfer by one strategy."""
    if not strategy.staged:
        yield Step(transfer, _tokens_to_read(transfer, strategy))
        return
    borders = _chunk_borders(transfer, strategy, costs, staging_bytes)
    chunks = list(pairwise(borders))
    max_blocks = max(stop - start for start, stop in chunks)
    heads = _heads(transfer, strategy.all_heads)
    slot = slot_of(transfer.remote[0].layout, heads, max_blocks)
    tokens = transfer.tokens
    size = transfer.block_size
    for start, stop in chunks:
        part = transfer.part(
            max(tokens.start, start * size), min(tokens.stop, stop * size)
        )
        ordinals = part.remote_ordinals
        slot_blocks = np.arange(-ordinals.start, len(ordinals))
        yield Step(part, _tokens_to_read(part, strategy), slot, slot_blocks)


def _estimate(
    transfer: Transfer,
    strategy: TransferStrategy,
    costs: CostModel,
    staging_bytes: int,
) -> Estimate:
    step = Step(transfer, _tokens_to_read(transfer, strategy))
    if not strategy.staged:
        num_runs = count_descriptors(step.read_copies())
        seconds = costs.read_s(num_runs, step.bytes_read)
        return Estimate(strategy, num_runs, step.bytes_read, seconds)
    borders = _chunk_borders(transfer, strategy, costs, staging_bytes)
    num_chunks = len(borders) - 1
    num_blocks = borders[-1] - borders[0]
    # Runs are counted as if one large slot took all chunks. An unused block lies
    # between two chunks, so that no run crosses from one chunk to the next.
    ordinals = np.arange(borders[-1])
    chunk_numbers = np.searchsorted(borders[1:], ordinals, side="right")
    heads = _heads(transfer, strategy.all_heads)
    slot = slot_of(transfer.remote[0].layout, heads, num_blocks + num_chunks)
    slot_blocks = ordinals - borders[0] + chunk_numbers
    step = replace(step, slot=slot, slot_blocks=slot_blocks)
    num_runs = count_descriptors(step.read_copies())
    seconds = costs.staged_s(
        read_s=costs.read_s(num_runs, step.bytes_read),
        place_s=transfer.useful_bytes / costs.place_bytes_per_s,
        num_chunks=num_chunks,
        last_share=(borders[-1] - borders[-2]) / num_blocks,
    )
    return Estimate(strategy, num_runs, step.bytes_read, seconds)


def _tokens_to_read(transfer: Transfer, strategy: TransferStrategy) -> range:
    """The tokens to read: the wanted tokens, or more if `strategy.whole_blocks`.

    With `whole_blocks`, a staged transfer extends both ends of the range to borders of
    P's blocks. A direct transfer extends only the end of the range, to the next border
    of P's blocks or of D's blocks, whichever comes first.
    """
    tokens = transfer.tokens
    if not strategy.whole_blocks:
        return tokens
    size = transfer.block_size
    stop = -(-tokens.stop // size) * size
    if strategy.staged:
        return range(tokens.start // size * size, stop)
    local_size = transfer.local.layout.block_size
    local_stop = -(-tokens.stop // local_size) * local_size
    return range(tokens.start, min(stop, local_stop))


def _chunk_borders(
    transfer: Transfer,
    strategy: TransferStrategy,
    costs: CostModel,
    staging_bytes: int,
) -> list[int]:
    """The borders of the chunks, as indices into P's block table.

    A chunk takes at most half the staging memory. If possible, a chunk ends where
    blocks of both sides end, so that no block of D is divided between two chunks.
    """
    layout = transfer.remote[0].layout
    ordinals = transfer.remote_ordinals
    period_tokens = lcm(layout.block_size, transfer.local.layout.block_size)
    period = period_tokens // layout.block_size
    max_blocks = _max_chunk_blocks(transfer, strategy, costs, staging_bytes, period)
    if period > max_blocks:
        period = 1
    chunk_blocks = max_blocks // period * period
    first_border = ordinals.start // period * period + chunk_blocks
    inner_borders = range(first_border, ordinals.stop, chunk_blocks)
    return [ordinals.start, *inner_borders, ordinals.stop]


def _max_chunk_blocks(
    transfer: Transfer,
    strategy: TransferStrategy,
    costs: CostModel,
    staging_bytes: int,
    period: int,
) -> int:
    """The largest number of P's blocks in one chunk, at least one.

    Args:
        period: number of P's blocks between two positions at which both a block of P
            and a block of D end. A pipelined chunk has at least this number of blocks,
            if it then fits into a slot.
    """
    heads = _heads(transfer, strategy.all_heads)
    block_bytes = slot_of(transfer.remote[0].layout, heads, 1).nbytes
    total_bytes = len(transfer.remote_ordinals) * block_bytes
    max_bytes = staging_bytes // 2
    if not costs.overlaps:
        cached_bytes = int(_CACHED_CHUNK_S * costs.bytes_per_s)
        max_bytes = min(max_bytes, max(cached_bytes, total_bytes // _MAX_CACHED_CHUNKS))
    elif strategy.pipelined:
        equal_bytes = -(-total_bytes // _PIPELINE_CHUNKS)
        share_bytes = min(equal_bytes, staging_bytes // _PIPELINE_SLOTS)
        min_read_bytes = int(_MIN_PIPELINE_CHUNK_S * costs.bytes_per_s)
        min_bytes = max(period * block_bytes, min_read_bytes)
        max_bytes = min(max_bytes, max(share_bytes, min_bytes))
    return max(1, max_bytes // block_bytes)


def _heads(transfer: Transfer, all_heads: bool) -> tuple[range, ...]:
    """The heads to read for each head group.

    Args:
        all_heads: as in TransferStrategy.
    """
    if not all_heads:
        return tuple(group.heads for group in transfer.groups)
    total = transfer.total_kv_heads
    return tuple(
        transfer.remote[group.owners[0]].heads(total) for group in transfer.groups
    )
