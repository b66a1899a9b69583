"""Bare NIXL, for transfer_cuda.py: an agent and a thread for each rank of D, nothing around them.

They read what a plan says in its order, or what the field's scheme would.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.processor import loop_ms_beside
from benchmarks.transfer import Case
from benchmarks.transfer_cuda_rig import Setup, kind_of, new_agent
from kvcache.transfer.agent import ReadState
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import DEFAULT_COSTS
from kvcache.transfer.plan.endpoint import Endpoint
from kvcache.transfer.plan.plan import plan_transfer
from protocol.handshake import EngineMetadata, RankMetadata


@dataclass(frozen=True)
class Timed:
    """READs of all ranks, posted at once."""

    seconds: list[float]  # until all had ended
    loop_ms: float  # of the slowest thread's processor, afterwards


class BareReader:
    """Reads into memory on a rank's GPU."""

    def __init__(self, setup: Setup, rank: int, nbytes: int) -> None:
        device = setup.devices[rank % len(setup.devices)]
        self.device = torch.device(device).index or 0
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.agent = new_agent("bare", device, setup.num_threads)
        self.kind = kind_of(self.memory.device)
        self.agent.register(self.memory.data_ptr(), nbytes, device_id=self.device, kind=self.kind)
        self.thread = ThreadPoolExecutor(1, initializer=self.agent.bind_thread)
        self._names: dict[int, str] = {}

    def _name(self, rank: RankMetadata) -> str:
        if rank.rank not in self._names:
            self._names[rank.rank] = self.agent.add_peer(rank.agent_metadata)
        return self._names[rank.rank]

    def read(self, metadata: EngineMetadata, reads: list[ReadDescriptors]) -> None:
        handles = []
        for read in reads:
            rank = metadata.ranks[read.remote_rank]
            handles.append(
                self.agent.read(
                    self._name(rank),
                    read.local_offsets + self.memory.data_ptr(),
                    read.remote_offsets + rank.base_address,
                    read.lengths,
                    local_device=self.device,
                    remote_device=rank.device_id,
                    kinds=(self.kind, self.kind),
                )
            )
        while any(self.agent.poll(handle) is ReadState.ACTIVE for handle in handles):
            pass
        for handle in handles:
            if handle.state is not ReadState.DONE:
                raise RuntimeError("a READ failed")
            self.agent.release(handle)

    def loop_ms(self) -> float:
        """What a loop of Python takes on its thread's processor."""
        return loop_ms_beside(self.thread.submit(threading.get_native_id).result())

    def close(self) -> None:
        self.thread.shutdown()
        self.agent.close()


def timed_reads(
    setup: Setup,
    metadata: EngineMetadata,
    each: list[list[ReadDescriptors]],
    nbytes: int,
    repeat: int,
) -> Timed:
    """`each` has one rank's reads."""
    readers = [BareReader(setup, rank, nbytes) for rank in range(len(each))]
    seconds = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        futures = [
            reader.thread.submit(reader.read, metadata, reads)
            for reader, reads in zip(readers, each, strict=True)
        ]
        for future in futures:
            future.result()
        seconds.append(time.perf_counter() - started)
    loop_ms = max(reader.loop_ms() for reader in readers)
    for reader in readers:
        reader.close()
    return Timed(seconds[1:], loop_ms)


def planned(setup: Setup, case: Case, metadata: EngineMetadata, repeat: int) -> Timed:
    """The plan's own runs in its own order."""
    size = setup.size
    remote: list[Endpoint] = case.p.endpoints(size)
    each = []
    nbytes = setup.staging_bytes
    for local in case.d.endpoints(size):
        nbytes = max(nbytes, local.layout.nbytes)
        plan = plan_transfer(
            local,
            remote,
            size.heads,
            0,
            size.tokens,
            case.d.blocks(size),
            case.p.blocks(size),
            costs=DEFAULT_COSTS["cuda"],
            staging_bytes=setup.staging_bytes,
        )
        staged = [read for chunk in plan.chunks for read in chunk.reads]
        each.append([*plan.reads, *staged])
    return timed_reads(setup, metadata, each, nbytes, repeat)


def field(setup: Setup, case: Case, metadata: EngineMetadata) -> tuple[int, Timed]:
    """The field's scheme, TP 1 -> 2: half the heads of every layer, component and block of 16
    tokens. How many runs that is, and what they take."""
    size = setup.size
    count = size.layers * 2 * size.tokens // case.p.block_size
    length = size.kv_bytes // 2 // count
    each = []
    for reader in range(2):
        rng = np.random.default_rng(reader)
        remote, local = rng.permutation(2 * count)[:count], rng.permutation(count)
        lengths = np.full(count, length, np.int64)
        each.append([ReadDescriptors(0, remote * length, local * length, lengths)])
    return 2 * count, timed_reads(setup, metadata, each, size.kv_bytes // 2, 2)
