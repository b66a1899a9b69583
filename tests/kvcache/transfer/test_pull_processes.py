"""Pulls between processes over NIXL. Peers are killed, or stopped and continued."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvcache.pool import KVPool
from kvcache.transfer.agent import PostLimits
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.nixl_agent import NixlAgent
from kvcache.transfer.plan.endpoint import heads_of
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullDone, PullDrained
from kvcache.transfer.worker import TransferWorker
from tests.rigs.memory_pair import (
    DEADLINE_S,
    HEADS,
    PATIENT,
    SECRET,
    Decode,
    compat,
    expected,
    layout,
)
from tests.rigs.process_pair import Child, digest, digest_of, run_program

NUM_BLOCKS = 2048  # 48 MiB of this geometry
NUM_TOKENS = (NUM_BLOCKS - 1) * 8


def agent() -> NixlAgent:
    return NixlAgent("D")


@pytest.fixture
def prefill(port: int) -> Iterator[Child]:
    child = Child("prefill", num_blocks=NUM_BLOCKS, port=port)
    yield child
    child.close()


def lease_all_blocks(child: Child, **options: Any) -> Any:
    return child.lease(list(range(1, NUM_BLOCKS)), NUM_TOKENS, **options)


def test_killed_peer_fails_the_pull_and_its_successor_serves(prefill, port):
    limits = PostLimits(max_bytes=4096, max_runs=1, max_active=1)
    settings = {"side_channel_timeout_s": 0.3, **PATIENT}
    decode = Decode(agent, limits=limits, settings=settings, num_blocks=NUM_BLOCKS)
    blocks = list(range(1, NUM_BLOCKS))[::-1]
    remote = lease_all_blocks(prefill)
    decode.coordinator.pull("a", remote, 0, NUM_TOKENS, blocks)
    decode.until(lambda: decode.workers[0].counters["posts"] >= 3)
    prefill.close()
    assert decode.wait_for_error().retryable

    successor = Child("prefill", num_blocks=NUM_BLOCKS, port=port)
    fresh = successor.lease([3, 4], 16)
    decode.pull("b", fresh, 0, 16, [8, 7])
    successor.close()
    decode.close()


@pytest.mark.parametrize("dcp", [1, 2])
def test_ranks_in_separate_processes_read_their_shares(prefill, dcp):
    """With a DCP of 2, rank 0 stores two of the three blocks, and rank 1 stores one."""
    woken = threading.Event()
    coordinator_end, worker_end = socket.socketpair()
    coordinator = PullCoordinator([coordinator_end], compat(), SECRET)
    coordinator.on_event = woken.set
    pool = KVPool(layout(2, 0, dcp=dcp))
    first = TransferWorker(LocalRank(0, 2, HEADS, agent(), pool, dcp=dcp), coordinator)
    second = Child("worker", rank=1, tp=2, dcp=dcp, link=worker_end)
    worker_end.close()
    first.start()
    remote = prefill.lease([5, 2, 9], 24)
    blocks = [3, 1, 7][: 4 - dcp]
    coordinator.pull("a", remote, 0, 24, blocks)
    assert woken.wait(DEADLINE_S)
    (done,) = coordinator.drain()
    assert isinstance(done, PullDone), done
    tokens = expected(remote, 0, 24)
    rank_tokens = [
        tokens[:, heads.start : heads.stop]
        for heads in (heads_of(r, 2, HEADS) for r in (0, 1))
    ]
    if dcp == 2:
        nothing = np.zeros_like(tokens[:8])
        rank_tokens = [
            np.concatenate([tokens[:8], tokens[16:]]),
            np.concatenate([tokens[8:16], nothing]),
        ]
    digests = [digest_of(pool, blocks), second.request(block_ids=blocks)]
    assert digests == [digest(part) for part in rank_tokens]
    second.close()
    first.close()


STOPPED = """
import os, signal
from tests.rigs.memory_pair import *
from tests.kvcache.transfer.test_pull_processes import *
prefill = Child("prefill", num_blocks=NUM_BLOCKS, engine_id="P")
other = Child("prefill", num_blocks=NUM_BLOCKS, engine_id="other")
settings = {"pull_timeout_s": 100.0, "drain_grace_s": 0.1, "handshake_timeout_s": 100.0}
limits = PostLimits(max_bytes=1 << 20)  # more READs hang than may be active at once
decode = Decode(
    agent,
    settings=settings,
    num_blocks=NUM_BLOCKS,
    limits=limits,
    staging_bytes=1 << 20,
)


def pull_that_hangs(pull_id, tokens):
    posts = decode.workers[0].counters["posts"]
    decode.coordinator.pull(pull_id, remote, 0, tokens, list(range(1, NUM_BLOCKS)))
    while decode.workers[0].counters["posts"] == posts:
        decode.has_event.wait(0.01)
    decode.skip(100.0)
    return decode.wait(*ENDINGS)


decode.pull("a", prefill.lease([3, 4], 16), 0, 16, [8, 7])

remote = lease_all_blocks(prefill)
spare = prefill.lease([5], 8)
prefill.signal(signal.SIGSTOP)
failed = pull_that_hangs("b", NUM_TOKENS - 3)
assert isinstance(failed, PullFailed) and not failed.drained, failed
assert decode.settle() == []  # no PullDrained while a READ may still deliver
elsewhere = other.lease([5, 9, 6], 21)
decode.coordinator.pull("e", elsewhere, 0, 21, [0, 2, 1])
ending = decode.wait(*ENDINGS)  # hanging READs and staging memory do not block it
assert isinstance(ending, PullDone), ending
assert np.array_equal(decode.tokens([0, 2, 1], 0, 21), expected(elsewhere, 0, 21))
other.close()
prefill.signal(signal.SIGCONT)
assert decode.wait(*ENDINGS) == PullDrained("b")
decode.pull("c", spare, 0, 8, [1])

remote = lease_all_blocks(prefill)
prefill.signal(signal.SIGSTOP)
failed = pull_that_hangs("d", NUM_TOKENS)
assert isinstance(failed, PullFailed) and not failed.drained, failed
prefill.close()  # killed
print(decode.wait(*ENDINGS), flush=True)
decode.close()
os._exit(0)
"""


def test_pull_from_a_stopped_peer_is_undrained_until_its_reads_end():
    """The READs use TCP, because over TCP, READs do not end while the peer is
    stopped.
    """
    assert f"{PullDrained('d')}\n" in run_program(STOPPED, UCX_TLS="tcp,self")
