"""The KV side channel: an engine's metadata and the messages between engines.

Engines of different software versions can be compatible. Unknown fields are ignored,
and missing optional fields have defaults. Only the protocol version and the fields that
determine the meaning of KV bytes (`check_compatible`) must match. The protocol version
increases only if an older reader would misread a new message.

A message consists of a MAC and a msgpack payload. The MAC is the HMAC-SHA256 of a label
and the payload, with the cluster secret as its key. Requests and replies have different
labels, so an attacker cannot use a copied request as a reply. A reply, except Refused,
repeats the nonce of its request. Therefore a late reply cannot be taken for the reply
to a different request.
"""

import hashlib
import hmac
import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from protocol.cache_salt import SALT_BYTES
from protocol.errors import PeerIncompatible
from protocol.messages import RemotePrefill, Retention
from protocol.short_repr import short_repr

PROTOCOL_VERSION = 2

# Bytes per element, by dtype.
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
FP8 = "float8_e4m3fn"
# Fields of CompatRecord that may differ if the reader has --kv-convert.
CONVERTIBLE = ("kv_dtype", "kv_scales")
AXES = "BHLCND"  # axes of KV: block, head, layer, component (K or V), token, element
DIGEST_VERSION: Final = 1  # version of the digests that kvcache/verify computes
MAX_GROUPS: Final = 16  # maximum number of layer groups; see kvcache/groups.py
# Maximum size of the KV of one rank. No device has this much memory, and a sum of a few
# sizes up to this maximum does not overflow 64 bits.
MAX_BYTES = 1 << 48


def check_order(order: str) -> str:
    """Returns `order`. Raises ValueError unless it has each of AXES once, D last."""
    missing = [axis for axis in AXES if axis not in order]
    if missing:
        problem = f"lacks axis {', '.join(missing)}"
    elif len(order) != len(AXES) or not order.endswith("D"):
        problem = "is not an order of the axes"
    else:
        return order
    raise ValueError(f"{short_repr(order)} {problem}: use each of {AXES} once, D last")


class LayoutRecord(msgspec.Struct, frozen=True):
    """A kvcache.layout.KVLayout as a message: the order and the sizes of the six axes,
    and the dtype.
    """

    order: str  # permutation of AXES ending in D, outermost axis first
    num_blocks: int  # B, including the null block
    num_heads: int  # H, KV heads on this rank (1 for MLA)
    num_layers: int  # L, layers of the largest layer group (kvcache/groups.py)
    num_components: int  # C: 2 (K, V) or 1 (MLA latent)
    block_size: int  # N, tokens per block, 1..256
    head_dim: int  # D, elements per head and token
    dtype: str  # a key of ITEMSIZE

    @property
    def nbytes(self) -> int:
        """Size of a KV pool with this layout, in bytes."""
        sizes = (self.num_blocks, self.num_heads, self.num_layers, self.num_components)
        return math.prod(sizes) * self.block_size * self.head_dim * ITEMSIZE[self.dtype]


class CompatRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that must be equal on two engines before one of them can read the
    KV of the other. With --kv-convert, the CONVERTIBLE fields may differ.

    Attributes:
        rope: Canonical JSON of the RoPE parameters.
        kv_scales: The factors by which FP8 elements are multiplied on reading. They are
            ordered by layer, and within a layer by component: K, V. Empty for a dtype
            other than FP8.
        kv_windows: For each layer group (kvcache/groups.py), the number of tokens in
            its attention window, or 0 for unlimited attention. Empty if all layers are
            one group with unlimited attention.
    """

    model_fingerprint: str
    kv_dtype: str
    num_layers: int
    total_kv_heads: int
    num_components: int
    head_dim: int
    rope: str
    kv_scales: tuple[float, ...] = ()
    kv_windows: tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...] = ()


class DraftPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of a drafter's KV on one rank.

    Attributes:
        base: Offset of the pool in the rank's allocation, in bytes.
    """

    layout: LayoutRecord
    base: int


class DraftKV(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's drafter, whose KV other engines with the same drafter may read.

    Attributes:
        fingerprint: Identifies the drafter, the dtype of its KV and the type of its
            device. Engines share draft KV only if their fingerprints are equal.
    """

    fingerprint: Annotated[str, Meta(max_length=128)]
    total_kv_heads: int


class RankMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The data by which other engines reach one rank's KV allocation.

    Attributes:
        extra: Values that only some transports need, such as the offer of mapped memory
            (kvcache/transfer/move/peer_memory.py).
        pid: The process id of the rank in the rank's own PID namespace.
        host: The address of the rank's host, for error messages; empty if it is
            unknown. The ranks of one engine may be on several hosts.
        draft: The KV pool of the engine's drafter, in the same allocation. None if
            EngineMetadata.draft is None.
    """

    rank: int
    agent_metadata: bytes
    base_address: int
    nbytes: int
    device_id: int
    device_kind: str  # "cpu" | "cuda"
    layout: LayoutRecord
    extra: dict[str, Any] = {}
    pid: int | None = None
    host: Annotated[str, Meta(max_length=256)] = ""
    draft: DraftPool | None = None


class EngineMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The data that another engine needs to read the KV of this engine's ranks.

    Attributes:
        draft: The engine's drafter, if other engines may read its KV; else None.
    """

    protocol_version: int
    engine_id: str
    incarnation: str  # an id that is new at every start of the engine
    compat: CompatRecord
    tp_size: int
    dcp_size: int = 1
    ranks: list[RankMetadata]
    digests: int = 0  # DIGEST_VERSION if this engine answers GetDigest, else 0
    draft: DraftKV | None = None

    @property
    def hosts(self) -> list[str]:
        """The distinct known hosts of the ranks, in the order of the ranks."""
        return [host for host in dict.fromkeys(r.host for r in self.ranks) if host]


def check_compatible(
    local: CompatRecord, remote: CompatRecord, allow_convert: bool = False
) -> None:
    """Raises PeerIncompatible if a field differs. The error names the first such field
    and both values.

    Args:
        allow_convert: True if the local engine converts KV of other dtypes and scales,
            so that the CONVERTIBLE fields may differ.
    """
    for field in CompatRecord.__struct_fields__:
        ours = getattr(local, field)
        theirs = getattr(remote, field)
        if ours == theirs or (allow_convert and field in CONVERTIBLE):
            continue
        where = ""
        fix = ""
        if field == "kv_scales" and len(ours) == len(theirs):
            index = next(i for i in range(len(ours)) if ours[i] != theirs[i])
            where = f" at index {index}"
            ours = ours[index]
            theirs = theirs[index]
        if field == "model_fingerprint" and "longrope" in local.rope != remote.rope:
            fix = (
                ", and both with the same --max-model-len, which selects longrope's "
                "factors"
            )
        if field in CONVERTIBLE:
            fix = ", or let the decode server convert with --kv-convert"
        raise PeerIncompatible(
            f"{field} differs{where}: {short_repr(ours)} here, {short_repr(theirs)} on "
            "the prefill server. "
            f"Start both with the same model, revision, KV dtype and KV scales{fix}.",
            param=field,
        )


def shares_draft_kv(local: DraftKV | None, remote: EngineMetadata) -> bool:
    """Returns whether the local engine can pull the KV of the remote engine's drafter.

    The drafters must be the same, and the tokens of a sequence must not be distributed
    over the remote ranks.
    """
    return local is not None and local == remote.draft and remote.dcp_size == 1


_Id = Annotated[str, Meta(min_length=1, max_length=128)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 24)]


class GetMetadata(msgspec.Struct, frozen=True, tag="get_metadata", kw_only=True):
    nonce: _Id


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request about one lease.

    The `lease_id` of an AbortLease may be the transfer id of a subscription. The
    message then ends the subscription.
    """

    nonce: _Id
    incarnation: _Id
    lease_id: _Id


class Renew(LeaseRequest, frozen=True, tag="renew"): ...


class Complete(LeaseRequest, frozen=True, tag="complete", kw_only=True):
    """The fence: ends a lease, and requests confirmation that the bytes read under the
    lease may be used.

    Attributes:
        attempt_id: Identifies the pull. If the reply is lost, the reader repeats the
            message with the same id and receives the same confirmation.
    """

    attempt_id: _Id


class AbortLease(LeaseRequest, frozen=True, tag="abort"): ...


class GetDigest(LeaseRequest, frozen=True, tag="get_digest", kw_only=True):
    """Requests digests of the KV of the tokens from `token_start` to `token_stop - 1`.

    If the request is repeated with the same nonce while the digests are being computed,
    the engine does not compute them twice.

    Attributes:
        samples: True: digests of a sample of the layers; False: of all layers.
        min_resume_tokens: See KVGroups.token_ranges in kvcache/groups.py. An engine
            without attention windows ignores this field. The field's name in messages
            is `reach`, as in earlier releases.
    """

    token_start: _Count
    token_stop: _Count
    samples: bool
    min_resume_tokens: Annotated[int, Meta(ge=0)] = msgspec.field(
        default=0, name="reach"
    )


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe", kw_only=True):
    """Requests a Progress message whenever more of a prompt's KV is computed.

    The reader repeats the request periodically. Each repetition renews the lease, and
    requests again the Progress messages that were lost with a connection.

    Attributes:
        num_blocks: Number of the prompt's blocks that Progress messages have already
            announced to the reader. The next Progress begins after these blocks.
    """

    nonce: _Id
    incarnation: _Id
    transfer_id: _Id
    prompt_digest: _Id
    num_blocks: Annotated[int, Meta(ge=0)] = 0


class Progress(msgspec.Struct, frozen=True, tag="progress", kw_only=True):
    """Reports that more KV of a subscribed prompt is computed.

    One lease covers all blocks of the prompt.

    Attributes:
        block_size: Tokens per block.
        first: Index of the first new block within the blocks of the prompt.
        block_ids: The new blocks. All of them are full, except that the prompt's last
            block may be partial.
        reference: The kv_transfer_params of the whole prompt, as JSON. Empty except in
            the Progress with the prompt's last blocks.
    """

    nonce: str
    lease_id: str
    lease_s: float
    block_size: int
    first: int
    block_ids: list[int]
    reference: bytes = b""


class Lookup(msgspec.Struct, frozen=True, tag="lookup", kw_only=True):
    """Requests a lease of the longest prefix of `token_ids` that the engine has cached
    under `cache_salt`.

    The engine leases a shorter prefix if it may not lease more blocks now. It never
    leases a prefix of fewer than `min_tokens` tokens.
    """

    nonce: _Id
    incarnation: _Id
    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 31)]]
    min_tokens: Annotated[int, Meta(ge=1)]
    cache_salt: Annotated[bytes, Meta(max_length=SALT_BYTES)] = b""


class LookupResult(msgspec.Struct, frozen=True, tag="lookup_result", kw_only=True):
    """The reply to a Lookup.

    Attributes:
        remote: The leased prefix, without first tokens. None if the engine has too few
            cached tokens, too many leased blocks or too many waiting lookups.
    """

    nonce: str
    remote: RemotePrefill | None


# Maximum number of the retentions of a Demote, and maximum length of its owner. A
# request has at most three retentions (engine/http/text_encoder.py).
_MAX_RETENTIONS = 8
_MAX_OWNER_CHARS = 256


class Demote(msgspec.Struct, frozen=True, tag="demote", kw_only=True):
    """Offers KV to a host's KV store, which pulls the KV of the tokens that it lacks.

    If the store then has all offered tokens that fill complete blocks of the store, it
    completes the lease of `remote`. Otherwise, it aborts the lease or lets it expire.

    Attributes:
        remote: Leased full blocks, without first tokens.
        token_ids: The tokens of the sequence from its start to the last offered token.
        first_token: Index of the first offered token. `remote` does not have the blocks
            of earlier tokens, because the store is expected to have their KV.
        retention: Parts of the prompt that the client asks to keep.
        owner: The owner of the pins of `retention`: AddRequest.share of the request.
    """

    nonce: _Id
    incarnation: _Id
    remote: RemotePrefill
    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 31)]]
    first_token: _Count = 0
    cache_salt: Annotated[bytes, Meta(max_length=SALT_BYTES)] = b""
    retention: Annotated[list[Retention], Meta(max_length=_MAX_RETENTIONS)] = []
    owner: Annotated[str, Meta(max_length=_MAX_OWNER_CHARS)] = ""


class Metadata(msgspec.Struct, frozen=True, tag="metadata", kw_only=True):
    nonce: str
    engine: EngineMetadata


class Ok(msgspec.Struct, frozen=True, tag="ok", kw_only=True):
    nonce: str


class LeaseEnded(msgspec.Struct, frozen=True, tag="lease_ended", kw_only=True):
    """The lease is unknown, has ended or cannot be completed yet, or the request has a
    different `incarnation`.

    The message also reports that a subscription was refused or has ended, and that an
    engine is no KV store. The receiver must not use any byte that it read under the
    lease.
    """

    nonce: str
    reason: str = ""


class Digest(msgspec.Struct, frozen=True, tag="digest", kw_only=True):
    nonce: str
    # The digests in the format of kvcache/verify/scope.py; empty if the engine cannot
    # compute them.
    sums: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """The request was malformed or not authentic.

    If the two engines have different secrets, the receiver finds the MAC of this reply
    wrong, too.
    """

    nonce: str = ""
    reason: str = ""


class MessageError(ValueError):
    """A message is malformed or not authentic. The text of the error has the reason."""


Request = GetMetadata | LeaseRequest | Subscribe | Lookup | Demote
Reply = Metadata | Ok | LeaseEnded | Progress | Digest | LookupResult | Refused

_lease_requests = Renew | Complete | AbortLease | GetDigest
_requests = GetMetadata | _lease_requests | Subscribe | Lookup | Demote
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(_requests)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_REQUEST = b"baton side channel request"
_REPLY = b"baton side channel reply"
MAC_BYTES = 32  # length of the MAC, which precedes the payload of a message


def _mac(label: bytes, payload: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + payload, hashlib.sha256)


def sealed(label: bytes, message: msgspec.Struct, secret: bytes) -> bytes:
    """Returns the bytes to send for a message: the MAC and the encoded message.

    Args:
        label: Identifies the direction and the kind of message.
    """
    payload = msgspec.msgpack.encode(message)
    return _mac(label, payload, secret) + payload


seal_request: Callable[[Request, bytes], bytes] = partial(sealed, _REQUEST)
seal_reply: Callable[[Reply, bytes], bytes] = partial(sealed, _REPLY)


def open_request(message: bytes, secret: bytes) -> Request:
    """Returns the request in `message`.

    Raises:
        MessageError: The message is malformed or not authentic.
    """
    check_authentic(message, _REQUEST, secret)
    try:
        return _request_decoder.decode(message[MAC_BYTES:])
    except msgspec.MsgspecError as error:
        raise MessageError(f"request is malformed: {error}") from error


def open_reply(message: bytes, secret: bytes) -> Reply:
    """Returns the reply in `message`.

    A Refused is accepted without a valid MAC. A peer with another secret cannot compute
    a valid MAC, and a forged Refused can only make requests fail.

    Raises:
        MessageError: The message is malformed or not authentic.
    """
    try:
        reply = _reply_decoder.decode(message[MAC_BYTES:])
    except msgspec.MsgspecError as error:
        raise MessageError(f"reply is malformed: {error}") from error
    if not isinstance(reply, Refused):
        check_authentic(message, _REPLY, secret)
    return reply


def check_authentic(message: bytes, label: bytes, secret: bytes) -> None:
    """Raises MessageError if the MAC of a message is wrong."""
    expected = _mac(label, message[MAC_BYTES:], secret)
    if not hmac.compare_digest(message[:MAC_BYTES], expected):
        raise MessageError(
            "the MAC is wrong: the two engines have different cluster secrets; give "
            "both servers the same BATON_CLUSTER_SECRET"
        )
