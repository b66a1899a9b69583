"""The fence by P's word: when it counts, when D asks instead, and what P does to it in between."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcache.lease_words import TABLE_BYTES, is_held
from kvcache.pool import KVPool
from kvcache.shared_memory import OpenedMemory
from kvcache.transfer.host_mapper import HostMapper
from kvcache.transfer.mapped import MappedPath
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.pull import PullDone, PullDrained, PullFailed
from protocol.errors import LeaseGone, PeerUnreachable
from protocol.handshake import Alert, Complete, EngineMetadata

sys.path.insert(0, str(Path(__file__).parent))
from pull_rig import DEADLINE_S, PATIENT, Child, Decode, Prefill, expected

ROOT = Path(__file__).parents[3]
ENDINGS = (PullDone, PullFailed, PullDrained)


REUSER = """
import os, select, sys, uuid
from kvcache.lease import LeaseTable
from kvcache.shared_memory import SharedMemory
from kvcache.transfer.held_leases import PublishedWords
words, pool, size = PublishedWords.create(), SharedMemory(int(sys.argv[1]) + 32), int(sys.argv[1])
table = LeaseTable(words=words)
record = words._record
print(os.getpid(), record.fd, record.token.hex(), pool.fd, pool.token.hex(), flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    lease_id = uuid.uuid4().hex
    pool.mapping[:size] = bytes.fromhex(lease_id) * (size // 16)
    table.grant(lease_id, "r", [1], 60.0, now=0.0)
    pool.mapping[size : size + 32] = lease_id.encode()
    for _ in range(lease_id.encode()[0] * 5):
        pass
    table.abort(lease_id, now=0.0)
    for ended in table.drain_ended():  # its block is another's
        pool.mapping[:size] = bytes(size)
"""


class GatedMapper(HostMapper):
    """Its launches are not seen to end before the gate opens."""

    gate: threading.Event
    launched: threading.Event

    def launch(self, *args: Any) -> Any:
        token = super().launch(*args)
        self.launched.set()
        return token

    def finished(self, token: Any) -> bool:
        return self.gate.is_set() and super().finished(token)


class Gate:
    """Decode sides of the mapped path whose last byte is seen when the test says so."""

    def __init__(self) -> None:
        self.opened, self.launched = threading.Event(), threading.Event()

    def mapped(self, pool: KVPool) -> MappedPath:
        mapper = GatedMapper(pool)
        mapper.gate, mapper.launched = self.opened, self.launched
        return MappedPath(mapper, required=True)


@pytest.fixture
def close() -> Iterator[Callable[[Any], Any]]:
    made: list[Any] = []

    def keep(side: Any) -> Any:
        made.append(side)
        return side

    yield keep
    for side in reversed(made):
        side.close()


def edited(prefill: Prefill, edit: Callable[[EngineMetadata], EngineMetadata]) -> Prefill:
    prefill.server._metadata = edit(prefill.server._metadata)
    return prefill


def without(metadata: EngineMetadata) -> EngineMetadata:
    return msgspec.structs.replace(metadata, held_leases=None)


def of_another_file(metadata: EngineMetadata) -> EngineMetadata:
    record = metadata.held_leases
    assert record is not None
    other = msgspec.structs.replace(record, token=bytes(16))
    return msgspec.structs.replace(metadata, held_leases=other)


def of_unknown_ranks(metadata: EngineMetadata) -> EngineMetadata:
    ranks = [msgspec.structs.replace(rank, process=None) for rank in metadata.ranks]
    return msgspec.structs.replace(metadata, ranks=ranks)


def of_another_host(metadata: EngineMetadata) -> EngineMetadata:
    process = msgspec.structs.replace(metadata.held_leases.process, host="another")
    record = msgspec.structs.replace(metadata.held_leases, process=process)
    return msgspec.structs.replace(metadata, held_leases=record)


def test_a_pull_from_this_host_is_done_by_the_word_and_the_lease_comes_home(close: Any) -> None:
    prefill, decode = close(Prefill(MemoryAgent, tp=2)), close(Decode(MemoryAgent, tp=2))
    for pull in range(20):
        remote = prefill.lease([5], 8)
        decode.coordinator.pull(str(pull), remote, 0, 8, [3])
        done = decode.wait(*ENDINGS)
        assert isinstance(done, PullDone) and done.fence == "word", done
        assert np.array_equal(decode.tokens([3], 0, 8), expected(remote, 0, 8))
        assert prefill.outcomes() == ["completed"]


def test_a_word_that_stands_vouches_for_bytes_that_another_process_reuses_all_the_time() -> None:
    size = 1 << 16
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", REUSER, str(size)]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdin is not None
        pid, fd, token, pool_fd, pool_token = process.stdout.readline().split()
        words = OpenedMemory(int(pid), int(fd), bytes.fromhex(token.decode()), TABLE_BYTES)
        pool = OpenedMemory(int(pid), int(pool_fd), bytes.fromhex(pool_token.decode()), size + 32)
        held = reused = 0
        deadline = time.monotonic() + DEADLINE_S
        while (held < 500 or reused < 20) and time.monotonic() < deadline:
            lease_id = pool[size : size + 32].decode()
            if len(lease_id.strip("\0")) < 32:  # there is none yet
                continue
            found = pool[0:size]
            wanted = bytes.fromhex(lease_id) * (size // 16)
            if is_held(words, lease_id):
                assert found == wanted
                held += 1
            else:
                reused += found != wanted
        process.stdin.close()
    assert held >= 500 and reused >= 20


@pytest.mark.parametrize("edit", [without, of_another_file, of_unknown_ranks, of_another_host])
def test_where_no_word_can_be_seen_the_fence_is_asked(close: Any, edit: Any) -> None:
    prefill, decode = close(edited(Prefill(MemoryAgent), edit)), close(Decode(MemoryAgent))
    decode.coordinator.pull("a", prefill.lease([5], 8), 0, 8, [3])
    done = decode.wait(*ENDINGS)
    assert isinstance(done, PullDone) and done.fence == "asked", done
    assert prefill.outcomes() == ["completed"]


@pytest.mark.parametrize("shows_words", [True, False])
def test_only_a_peer_that_will_be_asked_is_alerted(close: Any, shows_words: bool) -> None:
    prefill = close(Prefill(MemoryAgent, shows_words=shows_words))
    decode = close(Decode(MemoryAgent))
    posted: list[type] = []
    post = decode.coordinator._side_channel.post
    decode.coordinator._side_channel.post = lambda address, request: (
        posted.append(type(request)) or post(address, request)
    )
    decode.agents[0].stall()
    decode.coordinator.pull("a", prefill.lease([5], 8), 0, 8, [3])
    while decode.agents[0].active == 0 or (Alert in posted) == shows_words:
        decode.woken.wait(0.01)
    decode.agents[0].resume()
    assert isinstance(decode.wait(*ENDINGS), PullDone)
    assert prefill.outcomes() == ["completed"]
    assert (Alert in posted) == (not shows_words) and Complete in posted


def test_a_short_pull_asks_nothing_but_to_complete(close: Any) -> None:
    prefill, decode = close(Prefill(MemoryAgent)), close(Decode(MemoryAgent))
    decode.coordinator.pull("a", prefill.lease([5], 8), 0, 8, [3])
    assert isinstance(decode.wait(*ENDINGS), PullDone)  # the handshake is done
    assert prefill.outcomes() == ["completed"]
    renewed = prefill.server.counters()["renewed"]
    for pull in range(5):
        decode.coordinator.hold(str(pull), remote := prefill.lease([5], 8))
        decode.coordinator.pull(str(pull), remote, 0, 8, [3])
        assert isinstance(decode.wait(*ENDINGS), PullDone)
        assert prefill.outcomes() == ["completed"]
    renewed_now = prefill.server.counters()["renewed"]
    assert renewed_now < renewed + 5  # unless this machine is very slow, not one
    decode.coordinator.hold("held", prefill.lease([5], 8))
    while prefill.server.counters()["renewed"] == renewed_now:
        decode.woken.wait(0.01)


def test_a_full_bucket_means_asking(close: Any) -> None:
    prefill, decode = close(Prefill(MemoryAgent)), close(Decode(MemoryAgent))
    prefill.server._words.put = lambda lease_id: False
    decode.coordinator.pull("a", prefill.lease([5], 8), 0, 8, [3])
    assert decode.wait(*ENDINGS).fence == "asked"


def test_the_fence_does_not_wait_for_the_lease_thread(close: Any) -> None:
    """Its lock is held while the pull ends: an answer could not come."""
    gate = Gate()
    prefill = close(Prefill(MemoryAgent))
    decode = close(Decode(MemoryAgent, make_mapped=gate.mapped))
    remote = prefill.lease([5], 8)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    assert gate.launched.wait(DEADLINE_S)
    with prefill.server._lock:
        gate.opened.set()
        done = decode.wait(*ENDINGS)
    assert isinstance(done, PullDone) and done.fence == "word", done
    assert prefill.outcomes() == ["completed"]


@pytest.mark.parametrize("how", ["expired", "aborted"])
def test_a_lease_that_ended_before_the_last_byte_fails_the_pull(close: Any, how: str) -> None:
    gate = Gate()
    prefill = close(Prefill(MemoryAgent))
    settings = {"renew_interval_s": 1000.0, **PATIENT}
    decode = close(Decode(MemoryAgent, make_mapped=gate.mapped, settings=settings))
    remote = prefill.lease([5], 8)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    assert gate.launched.wait(DEADLINE_S)
    if how == "aborted":
        assert prefill.server.abort(remote.lease_id)
    else:
        prefill.clock.skip(remote.lease_s)
    assert prefill.outcomes() == [how]
    gate.opened.set()
    failed = decode.wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and failed.drained, failed
    assert isinstance(failed.error, LeaseGone)


def test_of_two_readers_both_may_read_what_is_held_and_none_what_is_not(close: Any) -> None:
    prefill = close(Prefill(MemoryAgent))
    gates = [Gate(), Gate(), Gate()]
    readers = [close(Decode(MemoryAgent, make_mapped=gate.mapped)) for gate in gates]
    remote = prefill.lease([5], 8)
    for reader, gate in zip(readers, gates, strict=True):
        reader.coordinator.pull("a", remote, 0, 8, [3])
        assert gate.launched.wait(DEADLINE_S)
    with prefill.server._lock:  # the lease cannot end
        for reader, gate in zip(readers[:2], gates[:2], strict=True):
            gate.opened.set()
            done = reader.wait(*ENDINGS)
            assert isinstance(done, PullDone) and done.fence == "word", done
            assert np.array_equal(reader.tokens([3], 0, 8), expected(remote, 0, 8))
    assert prefill.outcomes() == ["completed"]
    gates[2].opened.set()
    failed = readers[2].wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and isinstance(failed.error, LeaseGone), failed


def test_the_word_of_a_killed_peer_is_not_believed(close: Any) -> None:
    """Its pool is mapped here and its word stands for ever; every byte comes."""
    gate, prefill = Gate(), close(Child("prefill"))
    settings = {"connection_timeout_s": 0.3, **PATIENT}
    decode = close(Decode(MemoryAgent, make_mapped=gate.mapped, settings=settings))
    remote = prefill.lease([5], 8)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    assert gate.launched.wait(DEADLINE_S)
    prefill.close()
    gate.opened.set()
    failed = decode.wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and failed.drained, failed
    assert isinstance(failed.error, PeerUnreachable)


def test_a_stopped_peer_s_word_counts_and_its_lease_comes_home_when_it_goes_on(close: Any) -> None:
    gate, prefill = Gate(), close(Child("prefill"))
    decode = close(Decode(MemoryAgent, make_mapped=gate.mapped))
    remote = prefill.lease([5], 8)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    assert gate.launched.wait(DEADLINE_S)
    prefill.signal(signal.SIGSTOP)
    gate.opened.set()
    done = decode.wait(*ENDINGS)
    assert isinstance(done, PullDone) and done.fence == "word", done
    assert np.array_equal(decode.tokens([3], 0, 8), expected(remote, 0, 8))
    prefill.signal(signal.SIGCONT)
    while decode.coordinator.counters()["pulls_open"]:
        decode.woken.wait(0.01)
    assert prefill.ask(counters=True)["completed"] == 1
