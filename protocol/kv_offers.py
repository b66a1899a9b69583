"""Offers and hints: signed members of `kv_transfer_params` that only proxies create.

An offer names a prefill server that is computing a prompt now, so that the decode
server can subscribe to the prompt's KV. A hint names a server that may hold the KV of a
prompt's beginning. Both name a host to connect to. Therefore both must be signed;
otherwise a client could make a server connect to any host.
"""

import hmac
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from protocol.kv_params import HINT, convert, prompt_digest, reject
from protocol.messages import KVHint, RemotePrefill
from protocol.registration import MAX_AGE_S

_Text = Annotated[str, Meta(min_length=1, max_length=128)]
_PROVISIONAL_LEASE_S = 3.0  # lease duration until a Progress message reports it


class Offer(Struct, frozen=True, kw_only=True):
    """A request whose prompts a prefill server is computing now, and the address at
    which a decode server can subscribe to their KV.

    Attributes:
        host: Address of the prefill server's side channel.
        issued_s: Time at which the proxy signed the offer, in seconds since 1970.
    """

    transfer_id: _Text
    engine_id: _Text
    incarnation: _Text
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    issued_s: Annotated[int, Meta(ge=0)] = 0
    signature: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""

    def to_json(self, secret: bytes) -> dict[str, Any]:
        """Returns the decode leg's `kv_transfer_params`, with the signed offer."""
        return {"do_remote_prefill": True, "subscribe": sealed(self, secret)}

    def to_remote(
        self, index: int, token_ids: Sequence[int], cache_salt: bytes = b""
    ) -> RemotePrefill:
        """Returns the form of the offer that the decode engine receives for one prompt.

        Args:
            index: Index of the prompt in the request.
        """
        return RemotePrefill(
            host=self.host,
            port=self.port,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            request_id=self.transfer_id,
            lease_id="",
            lease_s=_PROVISIONAL_LEASE_S,
            block_ids=[],
            block_size=0,
            num_tokens=len(token_ids),
            cached_tokens=0,
            tp_size=0,
            first_tokens=[],
            sender_releases=True,
            transfer_id=prompt_transfer_id(self.transfer_id, index),
            prompt_digest=prompt_digest(token_ids, cache_salt),
        )


def prompt_transfer_id(transfer_id: str, index: int) -> str:
    """Returns the transfer id under which a reader subscribes to the KV of one prompt.

    Args:
        index: Index of the prompt in the request.
    """
    return f"{transfer_id[:100]}-{index}"


class _Members(Struct):
    subscribe: Offer | None = None
    hint: KVHint | None = None


def offer_of(obj: object, secret: bytes, now_s: float) -> Offer | None:
    """Returns the offer in `kv_transfer_params`, if there is one.

    Raises:
        KVParamsRejected: The offer is malformed, not signed by this cluster, or signed
            more than MAX_AGE_S before or after `now_s`.
    """
    offer: Offer | None = _signed_member(obj, "subscribe", secret, now_s)
    return offer


def hint_of(obj: object, secret: bytes, now_s: float) -> KVHint | None:
    """Returns the hint in `kv_transfer_params`, if there is one.

    If the named server does not hold the KV, the only cost is one lookup.

    Raises:
        KVParamsRejected: The hint is malformed, not signed by this cluster, or signed
            more than MAX_AGE_S before or after `now_s`.
    """
    hint: KVHint | None = _signed_member(obj, HINT, secret, now_s)
    return hint and msgspec.structs.replace(hint, issued_s=0, signature="")


def _signed_member(obj: object, name: str, secret: bytes, now_s: float) -> Any:
    """Returns the member `name` of `kv_transfer_params`; None if it is absent.

    Raises:
        KVParamsRejected: The member is malformed, not signed by this cluster, or signed
            more than MAX_AGE_S before or after `now_s`.
    """
    value = obj.get(name) if isinstance(obj, dict) else None
    member = getattr(convert({name: value}, _Members), name)
    if member is None:
        return None
    if not hmac.compare_digest(member.signature, _sign(member, secret)):
        reject(
            f"{name}.signature",
            f"does not match: only a proxy of this cluster may send {name}; leave it "
            "out, or give the proxy and this server the same BATON_CLUSTER_SECRET",
        )
    age_s = now_s - member.issued_s
    if abs(age_s) > MAX_AGE_S:
        reject(
            f"{name}.issued_s",
            f"is {age_s:.0f} s old by this server's clock, and the maximum is "
            f"{MAX_AGE_S:g} s: either the request is a copy of an old one, or the "
            "clock of the proxy or of this server is wrong",
        )
    return member


def sealed(member: Offer | KVHint, secret: bytes) -> dict[str, Any]:
    """Returns the signed JSON object of an offer or a hint."""
    return {**msgspec.structs.asdict(member), "signature": _sign(member, secret)}


def _sign(member: Offer | KVHint, secret: bytes) -> str:
    names = [name for name in member.__struct_fields__ if name != "signature"]
    values = [getattr(member, name) for name in names]
    text = f"baton {type(member).__name__} {values}"
    return hmac.digest(secret, text.encode(), "sha256").hex()
