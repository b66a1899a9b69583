"""Remembers which servers took the last request with each `prompt_cache_key`."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from proxy.placement.request_profile import RequestProfile
from proxy.placement.server_load import ServerLoad

_MAX_KEYS = 16_384  # remembered keys, for each leg

ServerT = TypeVar("ServerT")


class KeyAffinity:
    """Remembers, for each key and leg, the server of the last request.

    Placement chooses the first of equally good servers. So the remembered server is
    moved to the front of the list. It is not chosen if another server is better.
    """

    def __init__(self) -> None:
        # ServerLoad.index by the key and whether the leg generates.
        self._servers = OrderedDict[tuple[int, bool], int]()

    def record(self, profile: RequestProfile, server: int, *, generates: bool) -> None:
        """Record that the server with this ServerLoad.index gets a leg."""
        if profile.cache_key is None:
            return
        key = (profile.cache_key, generates)
        self._servers[key] = server
        self._servers.move_to_end(key)
        if len(self._servers) > 2 * _MAX_KEYS:
            self._servers.popitem(last=False)

    def preferred_first(
        self,
        servers: Sequence[ServerT],
        loads: Mapping[object, ServerLoad],
        profile: RequestProfile,
        *,
        generates: bool,
    ) -> Sequence[ServerT]:
        """Return the servers in the same order, with the remembered server first."""
        if profile.cache_key is None:
            return servers
        preferred = self._servers.get((profile.cache_key, generates))
        if preferred is None:
            return servers
        return sorted(servers, key=lambda server: loads[server].index != preferred)
