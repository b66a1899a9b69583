"""The API with which operators list and change the members of a proxy.

GET  /admin/members                                    list all members
POST /admin/members          {"role": .., "url": ..}   add a member until it is removed
POST /admin/members/remove   {"server": NAME or URL}   remove a member; a file or a
                                                       server may add it again
POST /admin/members/drain    {"server": NAME or URL}   send no new requests to a member
POST /admin/members/undrain  {"server": NAME or URL}   send new requests to it again

Each answer is a JSON object with the members that were listed or changed. For the paths
for a launcher, see proxy/discovery/launcher.py.
"""

from typing import Any

import msgspec

from protocol.errors import InvalidRequest
from protocol.process.logging import get_logger
from protocol.settings.sources import base_url
from protocol.short_repr import short_repr
from proxy.discovery import launcher
from proxy.errors import UnknownServer
from proxy.membership import Fleet, Kind, Server

logger = get_logger(__name__)

MEMBERS_PATH = "/admin/members"
_ACTIONS = {f"{MEMBERS_PATH}/{name}": name for name in ("remove", "drain", "undrain")}
# Only requests with an admin key may use these paths. If the proxy has no keys, only
# clients on this machine may use them.
ADMIN_PATHS = (MEMBERS_PATH, *_ACTIONS)
MAX_BODY_BYTES = 4096
OPERATOR = "operator"  # the source of members that operators add
_MAX_NAMES = 64  # members that an error message names


class _NewMember(msgspec.Struct, forbid_unknown_fields=True):
    role: Kind
    url: str


class _ServerName(msgspec.Struct, forbid_unknown_fields=True):
    server: str


class AdminApi:
    """Answers requests to the paths of operators.

    Attributes:
        paths: the paths of POST requests.
        read_paths: the paths that also answer GET.
    """

    paths = (*ADMIN_PATHS, *launcher.PATHS)
    read_paths = (MEMBERS_PATH, launcher.CLUSTER_PATH)

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._launcher = launcher.Launcher()

    @staticmethod
    def max_body_bytes(path: str) -> int:
        is_report = path == launcher.CLUSTER_PATH
        return launcher.MAX_BODY_BYTES if is_report else MAX_BODY_BYTES

    def read(self, path: str) -> dict[str, Any]:
        """Return the answer to a GET of one of `read_paths`. Raises InvalidRequest."""
        if path == launcher.CLUSTER_PATH:
            return self._launcher.report()
        return {"members": [_describe(server) for server in self._fleet.servers]}

    def change(self, path: str, body: bytes) -> dict[str, Any]:
        """Execute a POST to one of `paths`; return the answer.

        Raises:
            InvalidRequest: the body is invalid.
            UnknownServer: no member has this name or URL.
        """
        if path in launcher.PATHS:
            return self._launcher.take(path, body)
        return _change_members(self._fleet, path, body)


def _change_members(fleet: Fleet, path: str, body: bytes) -> dict[str, Any]:
    """Execute a POST to one of ADMIN_PATHS; return the members that it changed."""
    try:
        if path == MEMBERS_PATH:
            new = msgspec.json.decode(body, type=_NewMember)
            servers = [fleet.join(new.role, base_url(new.url), OPERATOR)]
        else:
            name = msgspec.json.decode(body, type=_ServerName).server
            servers = _find(fleet, name)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"the body of {path}: {error}") from None
    action = _ACTIONS.get(path, "add")
    logger.info("an operator requested: %s %s", action, ", ".join(map(str, servers)))
    for server in servers:
        if action == "remove":
            for source in list(server.sources):
                fleet.leave(server, source)
        elif action != "add":
            fleet.drain(server, action == "drain")
    return {"members": [_describe(server) for server in servers]}


def _find(fleet: Fleet, name: str) -> list[Server]:
    """Return the members with this name or URL. Raises UnknownServer."""
    servers = [each for each in fleet.servers if name in (each.name, each.url)]
    if servers:
        return servers
    names = ", ".join(server.name for server in fleet.servers[:_MAX_NAMES]) or "none"
    raise UnknownServer(
        f"`server` is {short_repr(name, 200)}; the members are {names}", param="server"
    )


def _describe(server: Server) -> dict[str, Any]:
    return {
        "server": server.name,
        "role": server.kind.value,
        "url": server.url,
        "sources": sorted(server.sources),
        "state": server.state,
        "reason": server.health.reason,
        "circuit": server.circuit,
        "in_flight": server.in_flight,
        "models": list(server.health.models),
        "kv_digest": server.health.kv_digest,
    }
