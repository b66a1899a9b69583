"""What engines tell each other: the metadata of a prefill engine and the side channel's messages.

Compatibility is semantic, never a software version: unknown fields are ignored, missing optional
ones have defaults. Only what changes the meaning of the bytes must match (`check_compatible`).
The version number rises only when an old reader would misread a new message.

A message is a MAC and its payload: HMAC-SHA256 with the cluster secret over the msgpack payload,
with a label of its own for requests and for replies, so that neither can be reflected as the other.
A reply repeats its request's nonce, so a late one answers no other question.
"""

import hashlib
import hmac
import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from protocol.cache_salt import SALT_BYTES
from protocol.errors import PeerIncompatible
from protocol.messages import RemotePrefill
from protocol.short_repr import short_repr

PROTOCOL_VERSION = 1

ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
}  # bytes per element
FP8 = "float8_e4m3fn"
_CONVERTIBLE = ("kv_dtype", "kv_scales")  # by a reader that is told to
AXES = "BHLCND"  # of KV: block, head, layer, component, token, element
DIGESTS: Final = 1  # rises when kvcache/verify computes others
MAX_GROUPS: Final = 16  # of layers, with blocks of their own
MAX_BYTES = 1 << 48  # no device has more; keeps sums far from 64-bit overflow


def check_order(order: str) -> str:
    """`order`, if it has each of AXES once and ends in D. Raises ValueError."""
    missing = [axis for axis in AXES if axis not in order]
    if missing or len(order) != len(AXES) or not order.endswith("D"):
        problem = (
            f"lacks axis {', '.join(missing)}" if missing else "is no order of the axes"
        )
        raise ValueError(
            f"{short_repr(order)} {problem}: use each of {AXES} once, D last"
        )
    return order


class LayoutRecord(msgspec.Struct, frozen=True):
    """A kvcache.layout.KVLayout on the wire: six axes in `order`, sizes in elements."""

    order: str  # permutation of AXES ending in D, outermost axis first
    num_blocks: int  # B, the null block included
    num_heads: int  # H, kv heads on this rank (1 for MLA)
    num_layers: int  # L
    num_components: int  # C: 2 (K, V) or 1 (MLA latent)
    block_size: int  # N, tokens per block, 1..256
    head_dim: int  # D, elements per head and token
    dtype: str  # a key of ITEMSIZE

    @property
    def nbytes(self) -> int:
        """Bytes of the whole allocation."""
        sizes = (self.num_blocks, self.num_heads, self.num_layers, self.num_components)
        return math.prod(sizes) * self.block_size * self.head_dim * ITEMSIZE[self.dtype]


class CompatRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for one engine's KV bytes to mean the same to another."""

    model_fingerprint: str
    kv_dtype: str
    num_layers: int
    total_kv_heads: int
    num_components: int
    head_dim: int
    rope: str  # canonical JSON of the rope parameters
    # What FP8 elements are multiplied by when read: K and V of layer 0, of layer 1, and so on.
    # Empty for any other dtype.
    kv_scales: tuple[float, ...] = ()
    # Of each group of layers with blocks of its own (kvcache/groups.py), how many tokens a token
    # sees; 0: all. Empty: one group that sees all.
    kv_windows: tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...] = ()


class RankMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one rank's KV allocation."""

    rank: int
    agent_metadata: bytes
    base_address: int
    nbytes: int
    device_id: int
    device_kind: str  # "cpu" | "cuda"
    layout: LayoutRecord
    extra: dict[str, Any] = {}
    pid: int | None = None  # on its own host


class EngineMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a decode engine needs to read from this engine, all ranks of it."""

    protocol_version: int
    engine_id: str
    incarnation: str  # new at every start
    compat: CompatRecord
    tp_size: int
    dcp_size: int = 1
    ranks: list[RankMetadata]
    digests: int = 0  # DIGESTS where it answers AskDigest just as we do


def check_compatible(
    local: CompatRecord, remote: CompatRecord, allow_convert: bool = False
) -> None:
    """Raises PeerIncompatible naming the first field that differs, and both values. A reader that
    is allowed to convert takes other KV dtypes and scales."""
    for field in CompatRecord.__struct_fields__:
        ours, theirs = getattr(local, field), getattr(remote, field)
        if ours == theirs or (allow_convert and field in _CONVERTIBLE):
            continue
        where, fix = "", ""
        if field == "kv_scales" and len(ours) == len(theirs):
            at = next(i for i in range(len(ours)) if ours[i] != theirs[i])
            where, ours, theirs = f" at index {at}", ours[at], theirs[at]
        if field == "model_fingerprint" and "longrope" in local.rope != remote.rope:
            fix = ", and both with the same --max-model-len, by which longrope takes its factors"
        if field in _CONVERTIBLE:
            fix = ", or let the decode server convert with --kv-convert"
        raise PeerIncompatible(
            f"{field} differs{where}: {short_repr(ours)} here, {short_repr(theirs)} on the "
            "prefill server. "
            f"Start both with the same model, revision, KV dtype and KV scales{fix}.",
            param=field,
        )


def kv_digest(compat: CompatRecord, converts: bool = False) -> str:
    """What of a record must agree, in short, for who pairs servers: the model, the form of its KV,
    and its dtype and scales (`*`: any, as of a reader that converts)."""

    def digest(*fields: str) -> str:
        text = msgspec.json.encode([getattr(compat, field) for field in fields])
        return hashlib.sha256(text).hexdigest()[:12]

    form = [name for name in CompatRecord.__struct_fields__ if name not in _CONVERTIBLE]
    form = (
        form if compat.kv_windows else form[: form.index("kv_windows")]
    )  # as it ever was
    stored = "*" if converts else digest(*_CONVERTIBLE)
    return ".".join((digest("model_fingerprint"), digest(*form), stored))


FOREIGN: Final = (
    "vllm"  # instead of a kv_digest: these see for themselves whether they fit
)


@lru_cache(4096)
def may_pair(prefill: str, decode: str) -> bool:
    """Whether servers of these kv_digests fit; one of ours that tells none fits every other."""
    if FOREIGN in (prefill, decode):
        return prefill == decode
    if not prefill or not decode:
        return True
    theirs, ours = prefill.split("."), decode.split(".")
    return len(theirs) == len(ours) and all(
        d in (p, "*") for p, d in zip(theirs, ours, strict=True)
    )


def same_model(one: str, other: str) -> bool:
    """Whether two kv_digests are of the same model, or one is unknown."""
    (ours, *form), (theirs, *other_form) = one.split("."), other.split(".")
    return ours == theirs or not form or not other_form


def check_consistent(metadata: EngineMetadata) -> None:
    """Raises PeerIncompatible, naming the field, when the metadata contradicts itself: a rank's KV
    lies inside a region that the peer registered. What must be as it is here, `check_compatible`
    and the plan see to."""
    for field, value, is_right, rule in _rules(metadata):
        if not is_right:
            told = f"{field} is {short_repr(value)} in the peer's metadata; it must {rule}."
            raise PeerIncompatible(told, param=field)


_Rule = tuple[
    str, object, bool, str
]  # field, its value, whether that is right, what it must be


def _within(field: str, value: int, low: int, high: int) -> _Rule:
    return field, value, low <= value <= high, f"be {low} to {high}"


def _one_of(field: str, value: str, allowed: Iterable[str]) -> _Rule:
    return field, value, value in allowed, f"be one of {sorted(allowed)}"


def _rules(metadata: EngineMetadata) -> Iterator[_Rule]:
    """In an order in which each may rely on those before it."""
    version, compat = metadata.protocol_version, metadata.compat
    groups = len(compat.kv_windows)
    yield (
        "protocol_version",
        version,
        version == PROTOCOL_VERSION,
        f"be {PROTOCOL_VERSION}",
    )
    yield _one_of("compat.kv_dtype", compat.kv_dtype, ITEMSIZE)
    count = compat.num_layers * compat.num_components if compat.kv_dtype == FP8 else 0
    scales, given = compat.kv_scales, len(compat.kv_scales)
    yield (
        "compat.kv_scales' length",
        given,
        given == count,
        f"be {count} of {compat.kv_dtype}",
    )
    are_scales = all(math.isfinite(scale) and scale > 0 for scale in scales)
    yield "compat.kv_scales", scales, are_scales, "be finite numbers above 0"
    numbers = [rank.rank for rank in metadata.ranks]
    are_all = (
        numbers == list(range(len(numbers))) and 0 < len(numbers) == metadata.tp_size
    )
    is_share = 0 < metadata.dcp_size and metadata.tp_size % metadata.dcp_size == 0
    yield "dcp_size", metadata.dcp_size, is_share, f"divide tp_size {metadata.tp_size}"
    yield (
        "ranks",
        numbers[:64],
        are_all,
        f"be all of tp_size {metadata.tp_size} in order",
    )
    yield _within("compat.kv_windows' length", groups, 0, MAX_GROUPS)
    are_one = groups < 2 or set(scales) <= {1.0}
    yield "compat.kv_scales", scales, are_one, "be 1 where there are several KV groups"
    for rank in metadata.ranks:
        where, layout = f"ranks[{rank.rank}]", rank.layout
        yield _one_of(f"{where}.device_kind", rank.device_kind, ("cpu", "cuda"))
        yield _within(f"{where}.device_id", rank.device_id, 0, 1 << 16)
        yield _within(f"{where}.nbytes", rank.nbytes, 1, MAX_BYTES)
        yield _within(
            f"{where}.base_address", rank.base_address, 1, (1 << 64) - rank.nbytes
        )
        is_order = sorted(layout.order) == sorted(AXES) and layout.order.endswith("D")
        yield (
            f"{where}.layout.order",
            layout.order,
            is_order,
            f"have each of {AXES} once, D last",
        )
        yield _one_of(f"{where}.layout.dtype", layout.dtype, (compat.kv_dtype,))
        for name in (
            "num_blocks",
            "num_heads",
            "num_layers",
            "num_components",
            "head_dim",
        ):
            yield _within(f"{where}.layout.{name}", getattr(layout, name), 1, 1 << 32)
        yield _within(f"{where}.layout.block_size", layout.block_size, 1, 256)
        fits = layout.nbytes <= rank.nbytes
        yield f"{where}.layout", layout.nbytes, fits, f"fit in nbytes {rank.nbytes}"


_Id = Annotated[str, Meta(min_length=1, max_length=128)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 24)]


class GetMetadata(msgspec.Struct, frozen=True, tag="get_metadata", kw_only=True):
    nonce: _Id


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """About one lease."""

    nonce: _Id
    incarnation: _Id
    lease_id: _Id


class Renew(LeaseRequest, frozen=True, tag="renew"): ...


class Complete(LeaseRequest, frozen=True, tag="complete", kw_only=True):
    """The fence: may the bytes read under this lease be used? Repeatable by the same attempt."""

    attempt_id: _Id


class AbortLease(LeaseRequest, frozen=True, tag="abort"): ...


class AskDigest(LeaseRequest, frozen=True, tag="ask_digest", kw_only=True):
    """What are the digests of these tokens' KV? Said again, it is computed once."""

    token_start: _Count
    token_stop: _Count
    samples: bool  # some layers of it
    reach: Annotated[int, Meta(ge=0)] = (
        0  # see kvcache/groups.py; of one group it says nothing
    )


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe", kw_only=True):
    """Tell of a prompt's KV while it is computed, from its block `num_blocks` on. Said again now
    and then: it renews the lease, and asks for what a lost connection has swallowed."""

    nonce: _Id
    incarnation: _Id
    transfer_id: _Id
    prompt_digest: _Id
    num_blocks: Annotated[int, Meta(ge=0)] = 0  # that the reader knows of


class Progress(msgspec.Struct, frozen=True, tag="progress", kw_only=True):
    """More of what was subscribed to is there, under one lease that grows."""

    nonce: str
    lease_id: str
    lease_s: float
    block_size: int  # tokens
    first: int  # which block of the prompt the first of these is
    block_ids: list[int]  # all full, unless there is a reference
    reference: bytes = (
        b""  # with the last ones: kv_transfer_params of the whole, as JSON
    )


class Lookup(msgspec.Struct, frozen=True, tag="lookup", kw_only=True):
    """Lease the longest prefix of these tokens whose KV is there under this salt, if it has
    `min_tokens`."""

    nonce: _Id
    incarnation: _Id
    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 31)]]
    min_tokens: Annotated[int, Meta(ge=1)]
    cache_salt: Annotated[bytes, Meta(max_length=SALT_BYTES)] = b""


class Found(msgspec.Struct, frozen=True, tag="found", kw_only=True):
    """What a lookup found: a reference to it, without first tokens; None: too little, or too much
    is lent already."""

    nonce: str
    remote: RemotePrefill | None


class Metadata(msgspec.Struct, frozen=True, tag="metadata", kw_only=True):
    nonce: str
    engine: EngineMetadata


class Ok(msgspec.Struct, frozen=True, tag="ok", kw_only=True):
    nonce: str


class Gone(msgspec.Struct, frozen=True, tag="gone", kw_only=True):
    """The lease is unknown, ended, or of another incarnation: use no byte read under it."""

    nonce: str
    reason: str = ""


class Digest(msgspec.Struct, frozen=True, tag="digest", kw_only=True):
    nonce: str
    sums: bytes  # as kvcache/verify/scope.py has them; empty: it cannot be computed


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """The request was malformed or not authentic. Not itself authentic when secrets differ."""

    nonce: str = ""
    reason: str = ""


class FrameError(ValueError):
    """No authentic message; the text says what is wrong with it."""


Request = GetMetadata | LeaseRequest | Subscribe | Lookup
Reply = Metadata | Ok | Gone | Progress | Digest | Found | Refused

_requests = GetMetadata | Renew | Complete | AbortLease | AskDigest | Subscribe | Lookup
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(_requests)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_REQUEST = b"baton side channel request"
_REPLY = b"baton side channel reply"
_MAC_BYTES = 32


def _mac(label: bytes, payload: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + payload, hashlib.sha256)


def _sealed(label: bytes, message: Request | Reply, secret: bytes) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return _mac(label, payload, secret) + payload


seal_request: Callable[[Request, bytes], bytes] = partial(_sealed, _REQUEST)
seal_reply: Callable[[Reply, bytes], bytes] = partial(_sealed, _REPLY)


def open_request(message: bytes, secret: bytes) -> Request:
    """Raises FrameError unless the message is an authentic, well-formed request."""
    _check_authentic(message, _REQUEST, secret)
    try:
        return _request_decoder.decode(message[_MAC_BYTES:])
    except msgspec.MsgspecError as error:
        raise FrameError(f"request is malformed: {error}") from error


def open_reply(message: bytes, secret: bytes) -> Reply:
    """Raises FrameError unless the message is an authentic, well-formed reply. A Refused needs no
    proof: a peer with another secret can give none, and it can only make a pull fail."""
    try:
        reply = _reply_decoder.decode(message[_MAC_BYTES:])
    except msgspec.MsgspecError as error:
        raise FrameError(f"reply is malformed: {error}") from error
    if not isinstance(reply, Refused):
        _check_authentic(message, _REPLY, secret)
    return reply


def _check_authentic(message: bytes, label: bytes, secret: bytes) -> None:
    expected = _mac(label, message[_MAC_BYTES:], secret)
    if not hmac.compare_digest(message[:_MAC_BYTES], expected):
        raise FrameError(
            "the MAC is wrong: the two engines have different cluster secrets"
        )
