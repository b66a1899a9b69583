"""Bare NIXL beside the transfer benchmark's pulls: an agent and a thread for each rank of D."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from benchmarks.transfer_decode import Setup, loop_ms_beside
from benchmarks.transfer_prefill import Case, kind_of, new_agent
from kvcache.transfer.link.agent import ReadState
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import DEFAULT_COSTS
from kvcache.transfer.plan.plan import Planner
from protocol.handshake import EngineMetadata

Wanted = tuple[list[list[ReadDescriptors]], int]  # READs of each rank of D, bytes of its memory


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

    def close(self) -> float:
        """Ends it; what a loop of Python took on its thread's processor, in ms."""
        loop_ms = loop_ms_beside(self.thread.submit(threading.get_native_id).result())
        self.thread.shutdown()
        self._agent.close()
        return loop_ms


def planned_reads(setup: Setup, case: Case) -> Wanted:
    """The plan's own runs in its own order, for each rank of D; bytes of memory they want."""
    size = setup.size
    each, nbytes = [], setup.staging_bytes
    for local in case.d.endpoints(size):
        nbytes = max(nbytes, local.layout.nbytes)
        ends = local, case.p.endpoints(size)
        planner = Planner(*ends, size.heads, staging_bytes=setup.staging_bytes)
        blocks = case.d.blocks(size), case.p.blocks(size)
        costs = DEFAULT_COSTS[torch.device(setup.device(0)).type]
        plan = planner.plan(planner.take((0, size.tokens), *blocks), costs)
        each.append(list(plan.reads))
    return each, nbytes


def field_reads(setup: Setup, case: Case) -> Wanted:
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
        first, places = rank * p.tp // d.tp, rng.permutation(here).reshape(owners, -1) * length
        each.append([
            ReadDescriptors(first + i, rng.permutation(there)[:count] * length, places[i], lengths)
            for i in range(owners)
        ])  # fmt: skip
    return each, here * length
