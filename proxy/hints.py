"""Whom a server that computes a prompt is told of: another one that may have its beginning."""

from urllib.parse import urlsplit

from protocol.handshake import may_pair
from protocol.kv_hint import signed_hint
from protocol.kv_params import HINT
from protocol.messages import KVHint
from proxy import body as bodies
from proxy.knowledge import Knowledge
from proxy.membership import Server
from proxy.placement import Ask

PARAM = f"kv_transfer_params.{HINT}"  # what a server names that refuses one
_MAX_TOKENS = 1 << 24
_TOLD = 4  # as many tokens as are known of: text may have one for each byte


def hint(server: Server, ask: Ask, knowledge: Knowledge) -> KVHint | None:
    """What a server is told that shall compute this prompt; None: no other is known to have more.
    One that is wrong costs a question, one whose lender is dead a second; so it is of one that
    is well."""
    own = server.health
    if own.is_foreign or not own.subscribes:
        return None
    for lender, num_tokens in knowledge.lenders(server, ask):
        if not isinstance(lender, Server) or lender.url == server.url:
            continue
        health = lender.health
        channel, is_well = health.side_channel, health.ready and health.open_until is None
        known = health.kv_digest and own.kv_digest
        if channel and is_well and known and may_pair(health.kv_digest, own.kv_digest):
            told = min(num_tokens * _TOLD, _MAX_TOKENS)
            host = channel.host or urlsplit(lender.url).hostname or ""
            about = {"engine_id": channel.engine_id, "incarnation": channel.incarnation}
            return KVHint(host=host, port=channel.port, num_tokens=told, **about)
    return None


def hinted(leg: bytes, told: KVHint, secret: bytes) -> bytes:
    """The request to a server, with the hint beside whatever its kv_transfer_params say."""
    return bodies.with_kv_member(leg, HINT, signed_hint(told, secret))
