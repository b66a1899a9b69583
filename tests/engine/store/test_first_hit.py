"""The first hit in a region costs no more than later hits: engines connect to the
region, or map its memory, before a request needs it.
"""

from typing import Any

import pytest

from kvcache.shared_memory import SharedMemory
from kvcache.transfer.move import peer_memory
from protocol.ipc.kv_store import STORE_PREFIX
from tests.engine.store.test_region import PROMPT, evict_all
from tests.rigs.engines import Engine
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.stores import Store, TieredGroup


def is_connected(engine: Engine) -> bool:
    """True if all ranks can read the region, from mapped memory or over a link."""
    peers = [
        peer
        for worker in engine.workers
        for peer in worker._peers.values()
        if peer.engine_id.startswith(STORE_PREFIX)
    ]
    links = [peer.link for peer in peers]
    return len(peers) == len(engine.workers) and all(
        peer.memories or (link is not None and link.is_ready)
        for peer, link in zip(peers, links, strict=True)
    )


@pytest.mark.parametrize("transfer", ["nixl", "mapped"])
def test_first_promotion_registers_and_maps_no_memory(monkeypatch, transfer):
    calls: list[str] = []

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)

    count(MemoryAgent, "register")
    count(MemoryAgent, "add_peer")
    count(peer_memory, "open_memory")
    count(SharedMemory, "__init__")
    options: dict[str, Any] = {"launch_bytes": 64} if transfer == "mapped" else {}
    store = Store(transfer=transfer)
    a, b = (Engine(store_link=store.link(), **options) for _ in range(2))
    with TieredGroup(store, a, b) as group:
        group.complete(a, PROMPT)
        group.until_stored(PROMPT, 28)
        group.until(lambda: is_connected(a) and is_connected(b))
        group.settle()
        assert calls, "the test counts nothing"
        calls.clear()
        evict_all(a)
        for engine in (a, b):
            assert group.complete(engine, PROMPT)[1] == (28, 2, 0)
            assert calls == []
