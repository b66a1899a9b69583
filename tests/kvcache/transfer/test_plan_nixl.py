"""Plans carried out over real NIXL, out of another process' memory."""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvcache.transfer.link.agent import ReadState
from kvcache.transfer.link.nixl_agent import NixlAgent
from kvcache.transfer.move.place import place
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.plan import TransferPlan
from tests.rigs.geometry import Case, cases, element_map, owner_of
from tests.rigs.nixl_peer import pattern

MEMORY_BYTES = 8 << 20
STAGE = CostModel(1e-3, 1e12, 1e15)  # every descriptor hurts
READ_TIMEOUT_S = 30


class Reader:
    """An agent of this process, and the memory of another one that it may read."""

    def __init__(self, peer: subprocess.Popen[str]) -> None:
        assert peer.stdout is not None
        record = json.loads(peer.stdout.readline())
        self.remote_address = record["address"]
        self.memory = np.zeros(2 * MEMORY_BYTES, np.uint8)  # the pool, then staging
        self.agent = NixlAgent("reader")
        self.agent.register(self.memory.ctypes.data, self.memory.nbytes)
        self.peer = self.agent.add_peer(base64.b64decode(record["metadata"]))

    def read(self, reads: tuple[ReadDescriptors, ...], bases: list[int], into: int) -> None:
        for read in reads:
            handle = self.agent.read(
                self.peer,
                read.local_offsets + self.memory.ctypes.data + into,
                read.remote_offsets + self.remote_address + bases[read.remote_rank],
                read.lengths,
            )
            deadline = time.monotonic() + READ_TIMEOUT_S
            while self.agent.poll(handle) is ReadState.ACTIVE:
                assert time.monotonic() < deadline
            assert handle.state is ReadState.DONE
            self.agent.release(handle)

    def execute(self, plan: TransferPlan, bases: list[int], pool_bytes: int) -> np.ndarray:
        """The pool afterwards; it starts as zeros."""
        self.memory[:] = 0
        pool = self.memory[:pool_bytes]
        for step in plan.steps:
            self.read(step.reads, bases, MEMORY_BYTES if step.slot else 0)
            slot = torch.from_numpy(self.memory[MEMORY_BYTES:])
            for copy in step.copies:
                place(copy, slot, torch.from_numpy(pool).view(torch.float32))
        return pool


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    argv = [sys.executable, "-m", "tests.rigs.nixl_peer", str(MEMORY_BYTES)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as peer:
        found = Reader(peer)
        yield found
        found.agent.close()
        peer.terminate()


def expected(case: Case, d_rank: int, bases: list[int]) -> np.ndarray:
    memory = np.zeros(case.layout(case.d, d_rank).nbytes, np.uint8)
    theirs = pattern(MEMORY_BYTES).view(np.uint32)
    tokens = case.d.kept(d_rank, np.arange(case.start, case.stop))
    d_heads = case.endpoints(case.d)[d_rank].heads(case.heads)
    targets = element_map(case, case.d, d_rank, tokens)
    for index, head in enumerate(d_heads):
        owner = owner_of(case, d_rank, head, tokens)
        for rank in np.unique(owner):
            p_heads = case.endpoints(case.p)[rank].heads(case.heads)
            sources = element_map(case, case.p, rank, tokens)[head - p_heads.start]
            mine = owner == rank
            words = theirs[sources[:, :, mine] + bases[rank] // 4]
            memory.view(np.uint32)[targets[index][:, :, mine]] = words
    return memory


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(0, 7), st.booleans())
def test_plans_over_nixl_bring_the_right_bytes(reader, case, d_rank, stage) -> None:
    d_rank %= case.d.tp
    sizes = [end.layout.nbytes for end in case.endpoints(case.p)]
    bases = [sum(sizes[:rank]) for rank in range(case.p.tp)]
    pool_bytes = case.layout(case.d, d_rank).nbytes
    assume(sum(sizes) <= MEMORY_BYTES and pool_bytes <= MEMORY_BYTES)
    options = {"costs": STAGE, "staging_bytes": MEMORY_BYTES}
    plan = case.plan(d_rank, **(options if stage else {}))
    found = reader.execute(plan, bases, pool_bytes)
    np.testing.assert_array_equal(found, expected(case, d_rank, bases))
