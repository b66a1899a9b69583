"""What operators ask a proxy about its members, and tell it: JSON in, JSON out.

GET  /admin/members                                    all, with URL, sources and health
POST /admin/members          {"role": .., "url": ..}   a member from now on, until it is removed
POST /admin/members/remove   {"server": NAME or URL}   whoever names it; a source may name it again
POST /admin/members/drain    {"server": NAME or URL}   no new requests; it stays a member
POST /admin/members/undrain  {"server": NAME or URL}
"""

from typing import Any

import msgspec

from protocol.errors import InvalidRequest
from protocol.process.logging import get_logger
from protocol.settings.sources import base_url
from protocol.short_repr import short_repr
from proxy.errors import UnknownServer
from proxy.membership import Fleet, Kind, Server

logger = get_logger(__name__)

MEMBERS_PATH = "/admin/members"
_ACTIONS = {f"{MEMBERS_PATH}/{name}": name for name in ("remove", "drain", "undrain")}
ADMIN_PATHS = (
    MEMBERS_PATH,
    *_ACTIONS,
)  # for admin keys alone, or clients of this machine
MAX_BODY_BYTES = 4096
OPERATOR = "operator"  # the source


class _Member(msgspec.Struct, forbid_unknown_fields=True):
    role: Kind
    url: str


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    server: str


def members(fleet: Fleet) -> dict[str, Any]:
    return {"members": [_told(server) for server in fleet.servers]}


def change(fleet: Fleet, path: str, body: bytes) -> dict[str, Any]:
    """Does what a POST to one of ADMIN_PATHS asks; returns the members it was about.

    Raises:
        InvalidRequest, UnknownServer: it says something else.
    """
    try:
        if path == MEMBERS_PATH:
            asked = msgspec.json.decode(body, type=_Member)
            found = [fleet.join(asked.role, base_url(asked.url), OPERATOR)]
        else:
            name = msgspec.json.decode(body, type=_Named).server
            found = [each for each in fleet.servers if name in (each.name, each.url)]
            if not found:
                known = ", ".join(server.name for server in fleet.servers[:64])
                told = f"`server` is {short_repr(name, 200)}; the members are {known or 'none'}"
                raise UnknownServer(told, param="server")
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"the body of {path}: {error}") from None
    action = _ACTIONS.get(path, "add")
    logger.info("operator: %s %s", action, ", ".join(map(str, found)))
    for server in found:
        if action == "remove":
            for source in list(server.sources):
                fleet.leave(server, source)
        elif action != "add":
            fleet.drain(server, action == "drain")
    return {"members": [_told(server) for server in found]}


def _told(server: Server) -> dict[str, Any]:
    health = server.health
    return {
        "server": server.name,
        "role": server.kind.value,
        "url": server.url,
        "sources": sorted(server.sources),
        "state": server.state,
        "reason": health.reason,
        "circuit": server.circuit,
        "in_flight": server.in_flight,
        "models": list(health.models),
        "kv_digest": health.kv_digest,
    }
