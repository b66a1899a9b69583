"""The contract that every TransferAgent must fulfil.

The contract is tested with NIXL between processes, with NIXL in one process, and with
MemoryAgent.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvcache.transfer.agent import ReadHandle, ReadState, TransferAgent
from protocol.errors import TransferFailed
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.process_pair import MemoryPeer, pattern, run_program

NBYTES = 4 << 20
DEADLINE_S = 30.0


class LocalPeer:
    """A peer agent in this process."""

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self.memory = pattern(NBYTES)
        agent.register(self.memory.ctypes.data, self.memory.nbytes)
        self.metadata = agent.metadata()
        self.address = self.memory.ctypes.data

    def close(self) -> None:
        self.agent.close()

    kill = close


class Reader:
    """An agent with target memory, and the peer that it reads from."""

    def __init__(self, agent: TransferAgent, peer: Any) -> None:
        self.agent = agent
        self.peer = peer
        self.into = np.zeros(NBYTES, dtype=np.uint8)
        agent.register(self.into.ctypes.data, self.into.nbytes)
        self.name = agent.add_peer(peer.metadata)

    def post(self, runs: list[tuple[int, int, int]]) -> ReadHandle:
        """Posts a READ. A run is (local offset, remote offset, length)."""
        rows = np.array(runs, dtype=np.int64)
        local = rows[:, 0] + self.into.ctypes.data
        remote = rows[:, 1] + self.peer.address
        return self.agent.read(self.name, local, remote, rows[:, 2])

    def finish(self, handle: ReadHandle) -> ReadState:
        wait_until(lambda: self.agent.poll(handle) is not ReadState.ACTIVE)
        return handle.state


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.0005)


def nixl_agent(**options: Any) -> TransferAgent:
    from kvcache.transfer.nixl_agent import NixlAgent

    return NixlAgent("reader", **options)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[MemoryPeer]]:
    """A list. Its last entry is the peer process that all tests of this module share.

    If a test has killed the process, the next test appends a new process.
    """
    started: list[MemoryPeer] = []
    yield started
    for peer in started:
        peer.close()


@pytest.fixture(params=["memory", "nixl", "nixl-processes"])
def reader(
    request: pytest.FixtureRequest, processes: list[MemoryPeer]
) -> Iterator[Reader]:
    agent: TransferAgent
    peer: Any
    if request.param == "memory":
        agent = MemoryAgent()
        peer = LocalPeer(MemoryAgent())
    elif request.param == "nixl":
        agent = nixl_agent()
        peer = LocalPeer(nixl_agent())
    else:
        if not processes or not processes[-1].process.is_alive():
            processes.append(MemoryPeer(NBYTES))
        agent = nixl_agent()
        peer = processes[-1]
    yield Reader(agent, peer)
    agent.close()
    if not request.param.endswith("processes"):
        peer.close()


def test_reads_move_exactly_the_requested_runs(reader):
    runs = [(0, 4096, 100), (200, 0, 50), (NBYTES - 64, NBYTES - 64, 64), (300, 7, 1)]
    handle = reader.post(runs)
    assert reader.finish(handle) is ReadState.DONE and handle.has_ended
    expected = np.zeros(NBYTES, dtype=np.uint8)
    for local, remote, length in runs:
        expected[local : local + length] = reader.peer.memory[remote : remote + length]
    assert np.array_equal(reader.into, expected)
    reader.agent.release(handle)


def test_many_small_runs_in_random_order(reader):
    order = np.random.default_rng(0).permutation(NBYTES // 512)
    runs = [(i * 512, int(block) * 512, 512) for i, block in enumerate(order)]
    assert reader.finish(reader.post(runs)) is ReadState.DONE
    expected = reader.peer.memory.reshape(-1, 512)[order].reshape(-1)
    assert np.array_equal(reader.into, expected)


def test_several_reads_at_once(reader):
    part = NBYTES // 8
    handles = [reader.post([(i * part, i * part, part)]) for i in range(8)]
    assert [reader.finish(handle) for handle in handles] == [ReadState.DONE] * 8
    assert np.array_equal(reader.into, reader.peer.memory)
    for handle in handles:
        reader.agent.release(handle)


@pytest.mark.parametrize(
    "run", [(0, NBYTES - 4, 8), (NBYTES - 4, 0, 8), (0, -8, 8), (-8, 0, 8)]
)
def test_runs_outside_registered_memory_are_refused(reader, run):
    with pytest.raises(TransferFailed):
        reader.post([run])
    assert not reader.into.any()
    assert reader.finish(reader.post([(0, 0, 8)])) is ReadState.DONE


def test_unknown_peers_and_bad_metadata_are_refused(reader):
    with pytest.raises(TransferFailed):
        reader.agent.add_peer(b"garbage")
    reader.name = "nobody"
    with pytest.raises(TransferFailed):
        reader.post([(0, 0, 8)])


def test_a_peer_can_be_added_twice(reader):
    assert reader.agent.add_peer(reader.peer.metadata) == reader.name
    assert reader.finish(reader.post([(0, 0, 64)])) is ReadState.DONE
    assert np.array_equal(reader.into[:64], reader.peer.memory[:64])


def test_read_from_a_dead_peer_fails_and_other_peers_stay_readable(reader):
    assert reader.finish(reader.post([(0, 0, 8)])) is ReadState.DONE
    reader.peer.kill()

    def fails() -> bool:
        try:
            return reader.finish(reader.post([(0, 0, 8)])) is ReadState.ERROR
        except TransferFailed:
            return True

    wait_until(fails)  # some transports detect a dead peer only after a delay
    second = LocalPeer(reader.agent.new_sibling())
    assert second.agent.name != reader.agent.name
    try:
        reader.peer = second
        reader.name = reader.agent.add_peer(second.metadata)
        assert reader.finish(reader.post([(8, 8, 8)])) is ReadState.DONE
    finally:
        second.close()


def test_an_agent_can_be_handed_to_a_second_thread(reader):
    states: list[ReadState] = []

    def work() -> None:
        reader.agent.bind_thread()
        states.append(reader.finish(reader.post([(0, 0, NBYTES)])))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE_S)
    assert states == [ReadState.DONE]
    assert np.array_equal(reader.into, reader.peer.memory)


def test_error_of_an_invalid_transport_names_the_variable():
    program = "from kvcache.transfer.nixl_agent import CannotStart, NixlAgent\n" + (
        "try: NixlAgent()\nexcept CannotStart as error: print(error)"
    )
    message = run_program(program, UCX_TLS="nonsense")
    assert "NIXL cannot start UCX (" in message and "UCX_TLS=nonsense" in message


def test_nixl_binds_its_device_on_every_thread_that_uses_it(monkeypatch):
    bound: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "torch.cuda.set_device", lambda i: bound.append((threading.get_ident(), i))
    )
    agent = nixl_agent(device_id=3)
    thread = threading.Thread(target=agent.bind_thread)
    thread.start()
    thread.join()
    agent.close()
    assert [device for _, device in bound] == [3, 3]
    assert bound[0][0] == threading.get_ident() != bound[1][0]


READER_OVER_TCP = """
import signal, sys, time
import numpy as np
import tests.kvcache.transfer.test_agent as t
from kvcache.transfer.agent import ReadState

def stopped_in_mid_read():
    assert reader.finish(reader.post([(0, 0, 8)])) is ReadState.DONE  # connected
    reader.peer.signal(signal.SIGSTOP)
    handle = reader.post([(0, 0, t.NBYTES)])
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert reader.agent.poll(handle) is ReadState.ACTIVE
        time.sleep(0.01)
    try:
        reader.agent.release(handle)
        raise SystemExit("released an active READ")
    except RuntimeError:
        return handle

peers = [t.MemoryPeer(t.NBYTES) for _ in range(2)]
reader = t.Reader(t.nixl_agent(), peers[0])
handle = stopped_in_mid_read()
reader.peer.signal(signal.SIGCONT)
assert reader.finish(handle) is ReadState.DONE
assert np.array_equal(reader.into, reader.peer.memory)
handle = stopped_in_mid_read()
reader.peer.kill()
print(reader.finish(handle))
reader.agent.close()

reader = t.Reader(t.nixl_agent(), peers[1])
handle = stopped_in_mid_read()
reader.agent.close()  # ends the READ
reader.peer.close()
"""


def test_read_from_a_stopped_peer_stays_active_until_it_ends():
    """The READ uses TCP, because over TCP a READ does not progress while the peer is
    stopped.
    """
    assert "ReadState.ERROR\n" in run_program(READER_OVER_TCP, UCX_TLS="tcp,self")


def test_idle_nixl_agents_use_no_cpu_time():
    peer = LocalPeer(nixl_agent())
    agent = nixl_agent()
    agent.add_peer(peer.metadata)
    before = time.process_time()
    threading.Event().wait(0.5)  # the duration of the measurement
    used_s = time.process_time() - before
    agent.close()
    peer.close()
    # A single spinning thread would use 0.5 s.
    assert used_s < 0.25
