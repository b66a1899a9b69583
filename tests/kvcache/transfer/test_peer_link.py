"""The link to a peer that fails or hangs is closed with its READs, without a delay for
other peers.
"""

import threading

from kvcache.pool import KVPool
from kvcache.transfer import worker as pull_worker
from kvcache.transfer.pulls.messages import DropPeer, PullDrained, PullFailed
from protocol.errors import PeerUnreachable, TransferFailed
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import DEADLINE_S, ENDINGS, Decode, Prefill, pulled
from tests.rigs.memory_placer import MemoryPlacer
from tests.rigs.process_pair import run_program

BLOCK_TABLE = [3, 1, 7]


def is_filled(decode: Decode, blocks: list[int], number: float) -> bool:
    return all(bool((pool.canonical[blocks] == number).all()) for pool in decode.pools)


def test_failed_read_writes_nothing_after_its_pull_has_drained(rig):
    """UCX reports a READ as failed while some of its runs are still active.

    These runs must end before the pull counts as drained, because the blocks may then
    be reused.
    """
    prefill = rig(Prefill)
    decode = rig(Decode)
    pulled(decode, prefill, "first", BLOCK_TABLE)
    decode.agents[0].fail()
    decode.coordinator.pull("a", prefill.lease([6, 4, 8], 24), 0, 24, BLOCK_TABLE)
    failed = decode.wait(*ENDINGS, pull_id="a")
    assert isinstance(failed, PullFailed) and isinstance(
        failed.error, TransferFailed
    ), failed
    if not failed.drained:
        decode.wait(PullDrained, pull_id="a")
    decode.fill(-1.0)
    pulled(decode, prefill, "b", [2, 4, 6])
    assert is_filled(decode, BLOCK_TABLE, -1.0)


def test_blocks_of_a_hanging_read_are_returned_and_not_written_again(rig, monkeypatch):
    monkeypatch.setattr(pull_worker, "_TEAR_DOWN_S", 0.05)
    hung = rig(Prefill, engine_id="hung")
    other = rig(Prefill)
    decode = rig(Decode, settings={"pull_timeout_s": 100.0, "drain_grace_s": 0.0})
    decode.agents[0].stall(hung.agents[0].name)
    decode.coordinator.pull("a", hung.lease([6, 4, 8], 24), 0, 24, BLOCK_TABLE)
    decode.until(lambda: decode.agents[0].active == 1)
    decode.skip(100.0)
    assert isinstance(decode.wait(PullFailed), PullFailed)
    decode.until(lambda: decode.agents[0].active == 0)
    decode.fill(-1.0)
    decode.agents[0].resume()
    pulled(decode, other, "b", [2, 4, 6])
    assert is_filled(decode, BLOCK_TABLE, -1.0)
    pulled(decode, hung, "c", BLOCK_TABLE)


class _Dropped(MemoryAgent):
    """An agent for which connecting to one peer blocks until `passes` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.unreachable: list[bytes] = []
        self.passes = threading.Event()

    def add_peer(self, metadata: bytes) -> str:
        if metadata in self.unreachable:
            assert self.passes.wait(DEADLINE_S)
        return super().add_peer(metadata)


def test_unreachable_peer_delays_no_other_peer_and_holds_no_blocks(rig):
    unreachable = rig(Prefill, engine_id="gone")
    other = rig(Prefill)
    agent = _Dropped()
    decode = rig(Decode, lambda: agent, connect_timeout_s=DEADLINE_S)
    agent.unreachable += [unreachable.agents[0].metadata()]
    remote = unreachable.lease([5, 2, 9], 24)
    decode.coordinator.pull("a", remote, 0, 24, BLOCK_TABLE)
    worker = decode.workers[0]
    decode.until(lambda: any(job.waits_for_link for job in worker._jobs.values()))
    pulled(decode, other, "b", [2, 4, 6])
    (peer,) = (job.peer for job in worker._jobs.values() if job.waits_for_link)
    peer.link.deadline = 0.0  # as if the timeout had expired
    worker._link.wake()
    error = decode.wait_for_error("a")
    assert isinstance(error, PeerUnreachable)
    for name in ("--connect-timeout-s", "UCX_TCP_PORT_RANGE", "UCX_NET_DEVICES"):
        assert name in error.message
    pulled(decode, other, "c", [2, 4, 6])
    agent.passes.set()  # now the blocked call returns
    decode.until(lambda: peer.link is None)
    assert agent.active == 0


def test_a_dropped_peer_is_unmapped_when_its_last_launch_has_ended(rig):
    placers: list[MemoryPlacer] = []

    def stalled(pool: KVPool) -> MemoryPlacer:
        placers.append(MemoryPlacer(pool))
        placers[0].stalled = True
        return placers[0]

    prefill = rig(Prefill)
    decode = rig(Decode, make_placer=stalled)
    remote = prefill.lease([5, 2, 9], 24)
    decode.coordinator.pull("a", remote, 0, 24, BLOCK_TABLE)
    worker = decode.workers[0]
    decode.until(lambda: bool(worker._jobs))
    (peer,) = worker._peers.values()
    drop = DropPeer(peer.key)
    decode.coordinator._call(lambda: decode.coordinator._broadcast(drop))
    decode.until(lambda: peer.is_dropped)
    rounds = worker._num_rounds
    decode.until(lambda: worker._num_rounds > rounds + 1)
    assert placers[0].mapped == [prefill.pools[0].base_address]
    placers[0].stalled = False
    decode.done()
    assert placers[0].unmapped.wait(DEADLINE_S)
    decode.until(lambda: not worker._peers)


UNREACHABLE = """
import msgspec, os, socket
from pathlib import Path
from tests.rigs.memory_pair import *


def listening_ports():
    files = Path("/proc/self/fd").iterdir()
    open_files = {os.readlink(file) for file in files if file.is_symlink()}
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {
        int(row[1][-4:], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in open_files
    }


other = Prefill(nixl_agent, engine_id="other")
before = listening_ports()
gone = Prefill(nixl_agent, engine_id="gone")
# The backlog fills up, and the system drops all further connections.
dead = socket.create_server(("", 0), backlog=0)
dead_port = dead.getsockname()[1]
filling = [socket.socket() for _ in range(3)]
for each in filling:
    each.setblocking(False)
    each.connect_ex(("127.0.0.1", dead_port))
data = gone.server._metadata.ranks[0].agent_metadata
for port in listening_ports() - before - {dead_port, gone.server.address[1]}:
    data = data.replace(port.to_bytes(2, "big"), dead_port.to_bytes(2, "big"))
shown = gone.server._metadata
assert data != shown.ranks[0].agent_metadata
ranks = [msgspec.structs.replace(shown.ranks[0], agent_metadata=data)]
gone.server._metadata = msgspec.structs.replace(shown, ranks=ranks)

decode = Decode(nixl_agent, connect_timeout_s=60.0)
decode.coordinator.pull("a", gone.lease([5, 2], 16), 0, 16, [3, 1])
jobs = decode.workers[0]._jobs
decode.until(lambda: any(job.waits_for_link for job in jobs.values()))
decode.pull("b", other.lease([5, 2, 9], 24), 0, 24, [4, 6, 8])
peers = decode.workers[0]._peers.values()
(peer,) = (peer for peer in peers if peer.metadata.engine_id == "gone")
assert not peer.link.is_ready, "the peer is reachable"
peer.link.deadline = 0.0
decode.workers[0]._link.wake()
error = decode.wait_for_error("a")
print(repr(error), flush=True)
os._exit(0)  # the system tries to connect for two minutes
"""


def test_prefill_server_with_a_silent_ucx_port_does_not_delay_other_servers():
    assert "PeerUnreachable(" in run_program(UNREACHABLE, UCX_TLS="tcp,self")


STOPPED = """
import os, signal
import numpy as np
import tests.kvcache.transfer.test_agent as t
from kvcache.transfer.agent import ReadState
from protocol.errors import TransferFailed


def late_bytes(closes):
    '''Of a READ from a peer that was stopped in its middle.'''
    reader = t.Reader(t.nixl_agent(), peers.pop())
    assert reader.finish(reader.post([(0, 0, 8)])) is ReadState.DONE
    handle = reader.post([(0, 0, t.NBYTES)])
    reader.peer.signal(signal.SIGSTOP)
    for _ in range(1000):  # takes what the peer had sent
        assert reader.agent.poll(handle) is ReadState.ACTIVE
    if closes:
        reader.agent.close()
    else:
        reader.agent._agent.releaseXferReq(handle.key)
        region = reader.agent._regions[0]
        reader.agent._agent.deregisterMem(region, [reader.agent._backend])
    reader.into[:] = 0
    reader.peer.signal(signal.SIGCONT)
    serves_another(reader.peer)
    reader.peer.kill()
    return int(np.count_nonzero(reader.into))


def serves_another(peer):
    '''Lets the peer send the rest, unless UCX has ended it after its reader.'''
    try:
        other = t.Reader(t.nixl_agent(), peer)
        other.finish(other.post([(0, 0, t.NBYTES)]))
    except TransferFailed:
        peer.process.join(t.DEADLINE_S)
        assert not peer.process.is_alive()


t.NBYTES = 64 << 20
peers = [t.MemoryPeer(t.NBYTES) for _ in range(2)]
assert late_bytes(closes=False) > t.NBYTES // 10, "nothing is late: this shows nothing"
print("late:", late_bytes(closes=True), flush=True)
os._exit(0)
"""


def test_closed_agent_writes_nothing_when_its_stopped_peer_continues():
    """It is not enough to release READs and to deregister memory: bytes of the READs
    would still arrive.
    """
    assert "late: 0\n" in run_program(STOPPED, UCX_TLS="tcp,self")
