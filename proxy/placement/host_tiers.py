"""Infers which prefixes the KV stores of hosts have.

Servers write the KV that they compute to the KV store of their host (`baton kv`), and
pull it back after they have evicted it. So if one server has computed a prompt, every
server that uses the same store can pull the prompt's KV. Servers of other hosts can
pull it, too, if they can reach the address of the store.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.messages import HostTierReport
from proxy.placement.prefix_index import PrefixIndex
from proxy.placement.request_profile import RequestProfile
from proxy.placement.server_load import HostTier, ServerLoad


class StoreLender(NamedTuple):
    """A KV store of another host, from which a server can pull.

    Attributes:
        servers: the servers that use the store.
    """

    report: HostTierReport
    servers: tuple[object, ...]


@dataclass
class _Store:
    """One store.

    Attributes:
        index: the store's bit in the prefix index.
        report: the latest report of a server that uses it.
        servers: the servers that use it, by ServerLoad.index.
    """

    index: int
    report: HostTierReport
    servers: dict[int, object] = field(default_factory=dict)


class HostTiers:
    """The stores of all hosts, and the prefixes that they have.

    A restarted store has a new id, and is empty. A store without servers is remembered,
    because its only server may be restarting. It is forgotten when a new store appears.

    Args:
        max_blocks: limit on the remembered blocks of prefixes, over all stores.
    """

    def __init__(self, max_blocks: int) -> None:
        self._prefixes = PrefixIndex(max_blocks)
        self._stores: dict[str, _Store] = {}

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._prefixes)

    def on_report(
        self, load: ServerLoad, report: HostTierReport | None, server: object = None
    ) -> None:
        """Record which store a server uses, and how fast the server reads the store.

        Args:
            report: the server's report about its store; None if it uses no store.
        """
        for store in self._stores.values():
            store.servers.pop(load.index, None)
        if report is None:
            load.host_tier = None
            return
        store = self._stores.get(report.store) or self._add_store(report)
        store.servers[load.index] = server
        store.report = report
        load.host_tier = HostTier(
            store=store.index, start_s=report.start_s, token_s=report.token_s
        )

    def _add_store(self, report: HostTierReport) -> _Store:
        taken = {store.index for store in self._stores.values()}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        for other_id, other in list(self._stores.items()):
            if not other.servers:
                self._prefixes.remove_server(other.index)
                del self._stores[other_id]
        store = _Store(index, report)
        self._stores[report.store] = store
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
                num_tokens = store.report.num_tokens
                max_blocks = int(num_tokens / (profile.block_tokens or 1.0))
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

    def lenders(
        self, load: ServerLoad, profile: RequestProfile, min_more_tokens: int
    ) -> list[tuple[object, int]]:
        """Return the stores of other hosts from which a server may pull a prompt.

        Args:
            load: the server that computes the prompt.
            min_more_tokens: a store must have this many tokens more than the store of
                the server's own host.

        Returns:
            A StoreLender for each store, with the number of tokens that it has.
        """
        reachable = [store for store in self._stores.values() if store.report.host]
        if not reachable:
            return []
        stored_tokens = self.cached_tokens(profile)
        min_tokens = float(min_more_tokens)
        if load.host_tier is not None:
            min_tokens += stored_tokens.get(load.host_tier.store, 0.0)
        lenders: list[tuple[object, int]] = []
        for store in reachable:
            num_tokens = stored_tokens.get(store.index, 0.0)
            if num_tokens >= min_tokens:
                lender = StoreLender(store.report, tuple(store.servers.values()))
                lenders.append((lender, int(num_tokens)))
        return lenders
