"""Which KV stores of hosts have which prefixes, as far as the proxy can infer it.

Servers write what they compute to the KV store of their host (`baton kv`), and pull it
back after they have evicted it. So a prompt that a server has computed is in its store
too, from which each server of the store can pull it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.messages import HostTierReport
from proxy.placement.prefix_index import PrefixIndex
from proxy.placement.request_profile import RequestProfile
from proxy.placement.server_load import HostTier, ServerLoad


@dataclass
class _Store:
    """One store.

    Attributes:
        index: the store's bit in the prefix index.
        num_tokens: tokens that it can hold.
        servers: the servers that use it, by ServerLoad.index.
    """

    index: int
    num_tokens: int = 0
    servers: set[int] = field(default_factory=set)


class HostTiers:
    """The stores of all hosts, and the prefixes that they have.

    A store that was restarted has another id, and has nothing. A store without servers
    is remembered, because its only server may be restarting. It is forgotten when
    another store appears.

    Args:
        max_blocks: limit on the remembered blocks of prefixes, over all stores.
    """

    def __init__(self, max_blocks: int) -> None:
        self._prefixes = PrefixIndex(max_blocks)
        self._stores: dict[str, _Store] = {}

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._prefixes)

    def on_report(self, load: ServerLoad, report: HostTierReport | None) -> None:
        """Record which store a server uses, and how fast; None if it uses none."""
        for store in self._stores.values():
            store.servers.discard(load.index)
        if report is None:
            load.host_tier = None
            return
        store = self._stores.get(report.store) or self._add_store(report.store)
        store.servers.add(load.index)
        store.num_tokens = report.num_tokens
        load.host_tier = HostTier(
            store=store.index, start_s=report.start_s, token_s=report.token_s
        )

    def _add_store(self, store_id: str) -> _Store:
        taken = {store.index for store in self._stores.values()}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        for other_id, other in list(self._stores.items()):
            if not other.servers:
                self._prefixes.remove_server(other.index)
                del self._stores[other_id]
        store = _Store(index)
        self._stores[store_id] = store
        return store

    def remove_server(self, load: ServerLoad) -> None:
        """Record that a server has left."""
        self.on_report(load, None)

    def add_prompt(self, load: ServerLoad, profile: RequestProfile) -> None:
        """Record that a server has computed a prompt, or pulled it."""
        tier = load.host_tier
        if tier is None:
            return
        for store in self._stores.values():
            if store.index == tier.store:
                max_blocks = int(store.num_tokens / (profile.block_tokens or 1.0))
                self._prefixes.add(store.index, profile.hashes, max_blocks)

    def cached_tokens(self, profile: RequestProfile) -> Mapping[int, float]:
        """Return the tokens of a prompt that each store has, by HostTier.store."""
        if not self._stores:
            return {}
        depths = self._prefixes.depths(profile.hashes)
        return {
            store: min(depth * profile.block_tokens, profile.tokens)
            for store, depth in depths.items()
        }
