"""Bare NIXL beside the transfer benchmark's pulls: an agent and a thread for each rank of D.

They read what a plan says in its order, or what the field's scheme would.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from benchmarks.processor import loop_ms_beside
from benchmarks.transfer_decode import Setup
from benchmarks.transfer_prefill import Case, kind_of, new_agent
from kvcache.transfer.link.agent import ReadState
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import DEFAULT_COSTS
from kvcache.transfer.plan.plan import plan_transfer
from protocol.handshake import EngineMetadata

_FIELD_REPEAT = 2


@dataclass(frozen=True)
class Timed:
    """READs of all ranks, posted at once."""

    descriptors: int
    seconds: list[float]  # until all had ended
    loop_ms: float  # of the slowest thread's processor, afterwards


class BareReader:
    """Reads into memory on a rank's device."""

    def __init__(self, setup: Setup, rank: int, nbytes: int, metadata: EngineMetadata) -> None:
        device = setup.device(rank)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._device, self._kind = torch.device(device).index or 0, kind_of(device)
        self._agent, self._metadata = new_agent("bare", device), metadata
        address = self._memory.data_ptr()
        self._agent.register(address, nbytes, device_id=self._device, kind=self._kind)
        self._name = cache(lambda rank: self._agent.add_peer(metadata.ranks[rank].agent_metadata))
        self.thread = ThreadPoolExecutor(1, initializer=self._agent.bind_thread)

    def read(self, reads: list[ReadDescriptors]) -> None:
        handles = [
            self._agent.read(
                self._name(read.remote_rank),
                read.local_offsets + self._memory.data_ptr(),
                read.remote_offsets + self._metadata.ranks[read.remote_rank].base_address,
                read.lengths,
                local_device=self._device,
                remote_device=self._metadata.ranks[read.remote_rank].device_id,
                kinds=(self._kind, self._kind),
            )
            for read in reads
        ]
        while any(self._agent.poll(handle) is ReadState.ACTIVE for handle in handles):
            pass
        for handle in handles:
            if handle.state is not ReadState.DONE:
                raise RuntimeError("a READ failed")
            self._agent.release(handle)

    def loop_ms(self) -> float:
        """What a loop of Python takes on its thread's processor."""
        return loop_ms_beside(self.thread.submit(threading.get_native_id).result())

    def close(self) -> None:
        self.thread.shutdown()
        self._agent.close()


def timed_reads(
    setup: Setup,
    metadata: EngineMetadata,
    each: list[list[ReadDescriptors]],
    nbytes: int,
    repeat: int,
) -> Timed:
    """`each` has one rank's reads."""
    readers = [BareReader(setup, rank, nbytes, metadata) for rank in range(len(each))]
    seconds = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        futures = [
            reader.thread.submit(reader.read, reads)
            for reader, reads in zip(readers, each, strict=True)
        ]
        for future in futures:
            future.result()
        seconds.append(time.perf_counter() - started)
    loop_ms = max(reader.loop_ms() for reader in readers)
    for reader in readers:
        reader.close()
    count = sum(len(read.lengths) for reads in each for read in reads)
    return Timed(count, seconds[1:], loop_ms)


def planned(setup: Setup, case: Case, metadata: EngineMetadata, repeat: int) -> Timed:
    """The plan's own runs in its own order."""
    size = setup.size
    each, nbytes = [], setup.staging_bytes
    for local in case.d.endpoints(size):
        nbytes = max(nbytes, local.layout.nbytes)
        plan = plan_transfer(
            local,
            case.p.endpoints(size),
            size.heads,
            0,
            size.tokens,
            case.d.blocks(size),
            case.p.blocks(size),
            costs=DEFAULT_COSTS[metadata.ranks[0].device_kind],
            staging_bytes=setup.staging_bytes,
        )
        each.append(list(plan.reads))
    return timed_reads(setup, metadata, each, nbytes, repeat)


def field(setup: Setup, case: Case, metadata: EngineMetadata) -> Timed:
    """The field's scheme: one run for each layer, component and block of the smaller size, or
    token where heads cut token-major blocks; scattered on both sides, no copy afterwards."""
    size, p, d = setup.size, case.p, case.d
    by_token = p.order.endswith("NHD") and p.tp != d.tp
    count = size.layers * 2 * size.tokens // (1 if by_token else min(p.block_size, d.block_size))
    owners = max(p.tp // d.tp, 1)  # of each rank of D's heads
    length = size.kv_bytes // d.tp // owners // count
    here, there = count * owners, size.kv_bytes // p.tp // length  # places of that length
    rng, lengths = np.random.default_rng(0), np.full(count, length, np.int64)
    each = []
    for rank in range(d.tp):
        first, places = rank * p.tp // d.tp, rng.permutation(here) * length
        each.append([
            ReadDescriptors(
                first + i,
                rng.permutation(there)[:count] * length,
                places[i * count : (i + 1) * count],
                lengths,
            )
            for i in range(owners)
        ])  # fmt: skip
    return timed_reads(setup, metadata, each, here * length, _FIELD_REPEAT)
