"""Engines open regions of a store over its listener, and continue without a store that
refuses them, is too small, or has ended.
"""

import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import pytest
from msgspec.structs import replace

from engine.kv.store_link import StoreLink
from engine.store import front as front_module
from engine.store import store as store_module
from engine.store.front import StoreFront
from engine.store.memory import RegionOptions
from engine.store.store import Store
from protocol.handshake import FP8, MessageError
from protocol.ipc.kv_store import (
    OpenRegion,
    RegionOpened,
    RegionPending,
    RegionRefused,
    RegionSpec,
    read_store_reply,
    seal_store_reply,
)
from protocol.ipc.wire import Waker, listen
from tests.rigs.engines import COMPAT, OTHER_COMPAT, SECRET
from tests.rigs.memory_agent import MemoryAgent

SPEC = RegionSpec(compat=COMPAT, group_layers=2, block_size=4, max_model_len=64)
IMPOSSIBLE_KV: list[dict[str, Any]] = [
    {"total_kv_heads": 0},
    {"head_dim": -4},
    {"num_components": 0},
    {"num_layers": 0},
    {"kv_dtype": "float12"},
    {"kv_dtype": FP8, "kv_scales": (1.0,)},
    {"kv_windows": (4,) * 17},
]
IMPOSSIBLE_REGIONS: list[dict[str, Any]] = [
    {"port": 0},
    {"port": 1 << 16},
    {"block_size": 0},
    {"num_tokens": 0},
]
OPTIONS = RegionOptions(host_kv_bytes=1 << 16, staging_bytes=1 << 16)


class Listening:
    """A store that serves connections in a thread."""

    def __init__(
        self,
        options: RegionOptions = OPTIONS,
        port: int = 0,
        make_agent: Any = MemoryAgent,
    ) -> None:
        self.now_s = 1000.0
        selector = DefaultSelector()
        waker = Waker()
        selector.register(waker, EVENT_READ, waker.clear)
        listener = listen("127.0.0.1", port)
        self.address = ("127.0.0.1", int(listener.getsockname()[1]))
        self.store = Store(
            options, SECRET, make_agent, waker.wake, clock=lambda: self.now_s
        )
        self.front = StoreFront(listener, selector, SECRET, self.store.open_region)
        self._stopping = threading.Event()

        def serve() -> None:
            while not self._stopping.is_set():
                for key, _ in selector.select(0.02):
                    key.data()
                self.store.poll()
            self.front.close()
            self.store.close()

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(30)


@pytest.fixture
def listening() -> Iterator[Listening]:
    running = Listening()
    yield running
    running.close()


@contextmanager
def linked(
    address: tuple[str, int], spec: RegionSpec = SPEC, **options: Any
) -> Iterator[StoreLink]:
    secret = options.pop("secret", SECRET)
    link = StoreLink(address, secret, "engine-1", spec, **options)
    link.start()
    yield link
    link.close()


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.01)


def open_request(spec: RegionSpec = SPEC) -> OpenRegion:
    return OpenRegion(nonce="n", engine_id="engine-1", spec=spec)


@pytest.fixture
def make_store() -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def make(
        host_kv_bytes: int = 1 << 16,
        max_models: int = 1,
        make_agent: Any = MemoryAgent,
        **options: Any,
    ) -> Store:
        region_options = RegionOptions(
            host_kv_bytes=host_kv_bytes, max_models=max_models, staging_bytes=1 << 16
        )
        stores.append(
            Store(region_options, SECRET, make_agent, lambda: None, **options)
        )
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def refusal(store: Store, spec: RegionSpec) -> str:
    reply = store.open_region(open_request(spec))
    assert isinstance(reply, RegionRefused)
    return reply.reason


def opened(store: Store, spec: RegionSpec = SPEC) -> RegionOpened:
    """Request a region until it is open."""
    deadline_s = time.monotonic() + 30
    while isinstance(reply := store.open_region(open_request(spec)), RegionPending):
        assert time.monotonic() < deadline_s, "the region was not opened"
        time.sleep(0.01)
        store.poll()
    assert isinstance(reply, RegionOpened), reply
    return reply


def test_engines_of_one_model_share_a_region(make_store):
    store = make_store()
    first = opened(store)
    second = opened(store, replace(SPEC, block_size=8))
    assert first.incarnation == second.incarnation and second.block_size == 4


def test_region_for_less_than_one_sequence_is_refused_with_the_needed_size(make_store):
    store = make_store(host_kv_bytes=2048)
    reason = refusal(store, SPEC)
    assert "--host-kv-bytes 2048" in reason and "64 tokens" in reason
    needed = int(reason.partition("use --host-kv-bytes ")[2].split()[0])
    store = make_store(host_kv_bytes=needed)
    opened(store)
    refusal(make_store(host_kv_bytes=needed - 1), SPEC)


def test_region_of_another_model_is_replaced_only_when_it_is_stale(make_store):
    now_s = 0.0
    store = make_store(clock=lambda: now_s)
    first = opened(store)
    other = replace(SPEC, compat=OTHER_COMPAT)
    now_s += store_module.STALE_REGION_S - 1
    assert "in use by servers of another model" in refusal(store, other)
    store.open_region(open_request())
    now_s += store_module.STALE_REGION_S - 1
    assert "model_fingerprint differs" in refusal(store, other)
    now_s += 2
    # A region that could not be created replaces nothing.
    refusal(store, replace(other, max_model_len=1 << 20))
    assert store.open_region(open_request()).incarnation == first.incarnation
    now_s += store_module.STALE_REGION_S
    second = opened(store, other)
    assert second.incarnation != first.incarnation
    refusal(store, SPEC)


def test_models_have_equal_shares_of_the_store(make_store):
    now_s = 0.0
    store = make_store(max_models=2, clock=lambda: now_s)
    other = replace(SPEC, compat=OTHER_COMPAT)
    third = replace(SPEC, compat=replace(COMPAT, head_dim=COMPAT.head_dim * 2))
    replies = [opened(store, spec) for spec in (SPEC, other)]
    assert len({reply.incarnation for reply in replies}) == 2
    sizes = [region.memory.pool.nbytes for region in store.regions]
    assert sizes[0] == sizes[1] and sum(sizes) <= 1 << 16
    assert "--max-models 3" in refusal(store, third)
    # The third model takes the share that no server uses any more.
    now_s += store_module.STALE_REGION_S
    assert store.open_region(open_request(other)).incarnation == replies[1].incarnation
    opened(store, third)
    assert store.open_region(open_request(other)).incarnation == replies[1].incarnation
    assert "in use" in refusal(store, SPEC)
    assert len(store.regions) == 2


def test_share_for_less_than_one_sequence_is_refused_with_the_needed_size(make_store):
    reason = refusal(make_store(host_kv_bytes=4096, max_models=2), SPEC)
    needed = int(reason.partition("use --host-kv-bytes ")[2].split()[0])
    store = make_store(host_kv_bytes=needed, max_models=2)
    opened(store)
    assert len(store.regions) == 1
    too_small = make_store(host_kv_bytes=needed - 1, max_models=2)
    assert f"use --host-kv-bytes {needed}" in refusal(too_small, SPEC)


class SlowAgents:
    """Makes agents of regions. Each call waits until `may_continue` is set."""

    def __init__(self) -> None:
        self.may_continue = threading.Event()
        self.errors: list[Exception] = []

    def __call__(self, prefix: str) -> MemoryAgent:
        assert self.may_continue.wait(30)
        if self.errors:
            raise self.errors.pop()
        return MemoryAgent(prefix)


def test_store_answers_while_it_opens_a_region(make_store):
    agents = SlowAgents()
    store = make_store(make_agent=agents)
    for _ in range(2):
        reply = store.open_region(open_request())
        assert isinstance(reply, RegionPending)
        assert 0 < reply.nbytes <= 1 << 16
        store.poll()
        assert store.is_idle
    other = replace(SPEC, compat=OTHER_COMPAT)
    assert "in use by servers of another model" in refusal(store, other)
    agents.may_continue.set()
    assert opened(store).num_tokens > 0


def test_memory_that_cannot_be_allocated_is_refused_and_tried_again_later(make_store):
    now_s = 0.0
    agents = SlowAgents()
    agents.may_continue.set()
    agents.errors.append(MemoryError("88 GiB do not fit"))
    store = make_store(make_agent=agents, clock=lambda: now_s)
    assert isinstance(store.open_region(open_request()), RegionPending)
    until(lambda: store.poll() or "88 GiB do not fit" in store._open_error)
    assert "88 GiB do not fit" in refusal(store, SPEC)
    now_s += store_module.RETRY_OPEN_S
    opened(store)


def test_region_that_cannot_be_opened_is_refused_and_other_regions_keep_their_kv(
    make_store,
):
    agents = SlowAgents()
    agents.may_continue.set()
    store = make_store(make_agent=agents, max_models=2)
    first = opened(store)
    agents.errors.append(OSError("port 9001 is in use"))
    other = replace(SPEC, compat=OTHER_COMPAT)
    assert isinstance(store.open_region(open_request(other)), RegionPending)
    until(lambda: store.poll() or "port 9001 is in use" in store._open_error)
    assert "port 9001 is in use" in refusal(store, other)
    assert store.open_region(open_request(SPEC)).incarnation == first.incarnation


def test_memory_of_a_stale_region_is_freed_before_the_next_one_is_allocated(make_store):
    now_s = 0.0
    pools: list[weakref.ref] = []
    num_alive: list[int] = []

    def make_agent(prefix: str) -> MemoryAgent:
        num_alive.append(sum(pool() is not None for pool in pools))
        return MemoryAgent(prefix)

    store = make_store(make_agent=make_agent, clock=lambda: now_s)
    opened(store)
    pools.append(weakref.ref(store.regions[0].memory.pool))
    now_s += store_module.STALE_REGION_S
    opened(store, replace(SPEC, compat=OTHER_COMPAT))
    assert num_alive == [0, 0]


def test_engine_reports_once_that_the_store_allocates_memory(caplog):
    caplog.set_level("INFO")
    agents = SlowAgents()
    listening = Listening(make_agent=agents)
    try:
        with linked(listening.address) as link:
            until(lambda: any("GiB of host memory" in m for m in caplog.messages))
            assert link.region is None
            agents.may_continue.set()
            until(lambda: link.region is not None)
        lines = [m for m in caplog.messages if "continuing without it" in m]
        assert len(lines) == 1, lines
    finally:
        listening.close()


def test_link_knows_the_region_and_notices_the_end_of_the_store(listening):
    with linked(listening.address) as link:
        until(lambda: link.region is not None)
        region = link.region
        assert region.address[0] == "127.0.0.1" and region.block_size == 4
        assert link.stats["baton_host_kv_capacity_tokens"] == region.num_tokens
        listening.close()
        until(lambda: link.region is None)
        successor = Listening(port=listening.address[1])
        try:
            until(lambda: link.region is not None)
            assert link.region.incarnation != region.incarnation
        finally:
            successor.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"secret": b"another secret"}, "the MAC is wrong"),
        ({"spec": replace(SPEC, max_model_len=1 << 20)}, "use --host-kv-bytes"),
        ({"dcp": 2, "spec": replace(SPEC, block_size=2)}, "--block-size 4"),
    ],
)
def test_refused_engine_continues_without_the_store(listening, caplog, options, reason):
    with linked(listening.address) as other:
        until(lambda: other.region is not None)
        with linked(listening.address, **options) as link:
            until(lambda: any("continuing without" in line for line in caplog.messages))
            assert link.region is None
    lines = [line for line in caplog.messages if "continuing without" in line]
    assert reason in lines[0] and "\n" not in lines[0]


def test_malformed_and_unauthenticated_connections_do_no_harm(listening, monkeypatch):
    monkeypatch.setattr(front_module, "MAX_CONNECTIONS", 4)
    socks = [socket.create_connection(listening.address) for _ in range(8)]
    for index, sock in enumerate(socks):
        message = bytes([index]) * (index * 40)
        sock.sendall(len(message).to_bytes(4, "little") + message)
    huge = socket.create_connection(listening.address)
    huge.sendall(b"\xff\xff\xff\xff" + b"x" * 1000)
    with linked(listening.address) as link:
        until(lambda: link.region is not None)
    for sock in (*socks, huge):
        sock.close()


@pytest.mark.parametrize("changes", IMPOSSIBLE_KV, ids=str)
def test_region_for_impossible_kv_is_refused(make_store, changes):
    check_refused(make_store, replace(SPEC, compat=replace(COMPAT, **changes)))


@pytest.mark.parametrize("group_layers", [1, 3])
def test_region_with_other_layers_than_its_kv_is_refused(make_store, group_layers):
    check_refused(make_store, replace(SPEC, group_layers=group_layers))


def check_refused(make_store: Any, spec: RegionSpec) -> None:
    """Check that the store refuses a region, and still opens a valid region."""
    store = make_store()
    assert "it must" in refusal(store, spec)
    opened(store)


@pytest.mark.parametrize("changes", IMPOSSIBLE_REGIONS, ids=str)
def test_engine_refuses_an_impossible_region(changes):
    region = RegionOpened(
        nonce="n",
        port=1,
        engine_id="store-1",
        incarnation="1",
        block_size=16,
        num_tokens=1,
        stats={},
    )
    assert read_store_reply(seal_store_reply(region, SECRET), SECRET) == region
    message = seal_store_reply(replace(region, **changes), SECRET)
    with pytest.raises(MessageError, match="malformed"):
        read_store_reply(message, SECRET)
