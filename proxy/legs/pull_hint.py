"""Hints that name a source of cached KV to a server that computes a prompt.

The source is another server, or the KV store of a host.
"""

import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

from protocol.kv_params import HINT
from protocol.messages import HostTierReport, KVHint
from protocol.pairing import may_pair
from proxy.body import hinted
from proxy.membership import Server
from proxy.placement.host_tiers import StoreLender

# A server that refuses a hint names this parameter in its error.
HINT_PARAM = f"kv_transfer_params.{HINT}"
_MAX_HINT_TOKENS = 1 << 24
# The estimate assumes 4 bytes per token, but text may have one token per byte. A hint's
# `num_tokens` is therefore this many times the estimate.
_HINT_TOKENS_FACTOR = 4


def pull_hint(reader: Server, lenders: Iterable[tuple[object, int]]) -> KVHint | None:
    """Return the hint for a server that computes a prompt; None if no server can lend.

    A wrong hint costs the reader one query to the lender. If the lender is dead, the
    query times out after 1 s.

    Args:
        reader: the server that computes the prompt.
        lenders: servers and KV stores (StoreLender) in the order of preference, each
            with the estimated number of prompt tokens that it has cached.
    """
    if reader.health.is_foreign or not reader.health.subscribes:
        return None
    for lender, num_tokens in lenders:
        if isinstance(lender, StoreLender):
            if _store_can_lend(lender, reader):
                return _store_hint(lender.report, num_tokens)
            continue
        if not isinstance(lender, Server) or lender.url == reader.url:
            continue
        channel = lender.health.side_channel
        if channel is not None and _can_lend(lender, reader):
            return KVHint(
                host=channel.host or urlsplit(lender.url).hostname or "",
                port=channel.port,
                engine_id=channel.engine_id,
                incarnation=channel.incarnation,
                num_tokens=min(num_tokens * _HINT_TOKENS_FACTOR, _MAX_HINT_TOKENS),
            )
    return None


def with_hint(body: bytes, hint: KVHint, secret: bytes) -> bytes:
    """Return the body of a leg with this hint, signed now."""
    return hinted(
        body, msgspec.structs.replace(hint, issued_s=int(time.time())), secret
    )


def _store_can_lend(lender: StoreLender, reader: Server) -> bool:
    """Return whether `reader` can pull from a KV store.

    One server that uses the store must be ready, as a sign that the store's host is
    reachable. The kv_digest of that server must be compatible with `reader`.
    """
    return any(
        isinstance(server, Server) and _can_lend(server, reader)
        for server in lender.servers
    )


def _store_hint(report: HostTierReport, num_tokens: int) -> KVHint:
    return KVHint(
        host=report.host,
        port=report.port,
        engine_id=report.store,
        incarnation=report.incarnation,
        num_tokens=min(num_tokens * _HINT_TOKENS_FACTOR, _MAX_HINT_TOKENS),
    )


def _can_lend(lender: Server, reader: Server) -> bool:
    if not lender.health.ready or lender.health.open_until is not None:
        return False
    if not lender.health.kv_digest or not reader.health.kv_digest:
        return False
    return may_pair(lender.health.kv_digest, reader.health.kv_digest)
