"""Offers and hints: signed members of `kv_transfer_params` that only proxies create.

An offer names a prefill server that is computing a prompt now, so that the decode
server can subscribe to its KV. A hint names a server that may hold the KV of a prompt's
beginning. Both name a host to connect to, so both must be signed.
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
_OFFER_S = 3.0  # provisional lease time, until the subscription reports the lease


class Offer(Struct, frozen=True, kw_only=True):
    """A prompt that a prefill server is computing now, and where to subscribe to its
    KV.

    Only proxies create offers, because an offer names a host to connect to.

    Attributes:
        host: Address of the prefill server's side channel.
        issued_s: Seconds since 1970.
    """

    transfer_id: _Text
    engine_id: _Text
    incarnation: _Text
    host: Annotated[str, Meta(min_length=1, max_length=255)]  # of the side channel
    port: Annotated[int, Meta(ge=1, le=65535)]
    issued_s: Annotated[int, Meta(ge=0)] = 0  # since 1970
    signature: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""

    def to_json(self, secret: bytes) -> dict[str, Any]:
        """Returns the `kv_transfer_params` of the decode leg."""
        return {"do_remote_prefill": True, "subscribe": sealed(self, secret)}

    def to_remote(
        self, index: int, token_ids: Sequence[int], cache_salt: bytes = b""
    ) -> RemotePrefill:
        """Returns the engine's form of the offer for the prompt with this index."""
        return RemotePrefill(
            host=self.host,
            port=self.port,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            request_id=self.transfer_id,
            lease_id="",
            lease_s=_OFFER_S,
            block_ids=[],
            block_size=0,
            num_tokens=len(token_ids),
            cached_tokens=0,
            tp_size=0,
            first_tokens=[],
            sender_releases=True,
            transfer_id=prompt_name(self.transfer_id, index),
            prompt_digest=prompt_digest(token_ids, cache_salt),
        )


def prompt_name(transfer_id: str, index: int) -> str:
    """Returns the name by which the KV of one prompt of a transfer is subscribed to."""
    return f"{transfer_id[:100]}-{index}"


class _Members(Struct):
    subscribe: Offer | None = None
    hint: KVHint | None = None


def offer_of(obj: object, secret: bytes, now_s: float) -> Offer | None:
    """Returns the offer in `kv_transfer_params`, if there is one.

    Raises:
        KVParamsRejected: The offer is malformed, expired or not signed by this cluster.
    """
    offer: Offer | None = _signed_member(obj, "subscribe", secret, now_s)
    return offer


def hint_of(obj: object, secret: bytes, now_s: float) -> KVHint | None:
    """Returns the hint in `kv_transfer_params`, if there is one.

    A wrong hint costs its reader one lookup.

    Raises:
        KVParamsRejected: The hint is malformed, expired or not signed by this cluster.
    """
    hint: KVHint | None = _signed_member(obj, HINT, secret, now_s)
    return hint and msgspec.structs.replace(hint, issued_s=0, signature="")


def _signed_member(obj: object, name: str, secret: bytes, now_s: float) -> Any:
    value = obj.get(name) if isinstance(obj, dict) else None
    member = getattr(convert({name: value}, _Members), name)
    if member is None:
        return None
    if not hmac.compare_digest(member.signature, _sign(member, secret)):
        reject(
            f"{name}.signature",
            "does not match: only proxies of this cluster may send this member",
        )
    age_s = now_s - member.issued_s
    if abs(age_s) > MAX_AGE_S:
        reject(
            f"{name}.issued_s",
            f"is {age_s:.0f} s old by this server's clock, and the maximum is "
            f"{MAX_AGE_S:g} s: either it is a copy, or a clock is wrong",
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
