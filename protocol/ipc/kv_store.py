"""The messages between an engine and the KV store of its host.

An engine opens a region of the store, and repeats OpenRegion while the engine runs. If
the region is open, the reply has the port of the region's side channel. Over the side
channel, KV is offered and pulled as between two engines (protocol/handshake.py). A
message consists of a MAC and a payload, as on the side channel.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.handshake import (
    MAC_BYTES,
    CompatRecord,
    MessageError,
    check_authentic,
    sealed,
)

_Id = Annotated[str, Meta(min_length=1, max_length=128)]
_Tokens = Annotated[int, Meta(ge=1, lt=1 << 32)]
_BlockSize = Annotated[int, Meta(ge=1, le=256)]
# Maximum size of a message. Its largest part is the list of KV scales, with one scale
# for each layer and component.
MAX_MESSAGE_BYTES: Final = 1 << 20
# The `engine_id` of a region begins with this text. The id of an engine begins with the
# engine's role instead.
STORE_PREFIX: Final = "store-"
# Outcomes of an offer to a store. "stored": the region has all tokens; "dropped": the
# store had too much to do, or no use for the offer; "evicted": the region no longer has
# the tokens before the offered tokens; "failed": the pull has failed, or the lease of a
# waiting offer has ended.
OFFER_OUTCOMES: Final = ("stored", "dropped", "evicted", "failed")


class RegionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the KV in a region. A region has all KV heads on one rank.

    Attributes:
        group_layers: Layers of the largest layer group (kvcache/groups.py).
        block_size: Tokens per block. An existing region keeps its block size.
        max_model_len: The region must hold at least one sequence of this many tokens.
    """

    compat: CompatRecord
    group_layers: Annotated[int, Meta(ge=1, lt=1 << 16)]
    block_size: _BlockSize
    max_model_len: _Tokens


class OpenRegion(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the region for the KV of an engine."""

    nonce: _Id
    engine_id: _Id
    spec: RegionSpec


class RegionOpened(msgspec.Struct, frozen=True, tag="opened", kw_only=True):
    """The reply to OpenRegion if the region is open.

    Attributes:
        port: The port of the region's side channel, at the address of the store.
        engine_id, incarnation: The region's ids in handshakes.
        stats: Values of the region, by metric series (protocol/metrics.py).
    """

    nonce: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    engine_id: _Id
    incarnation: _Id
    block_size: _BlockSize
    num_tokens: Annotated[int, Meta(ge=1)]
    stats: dict[str, float]


class RegionPending(msgspec.Struct, frozen=True, tag="pending", kw_only=True):
    """The reply to OpenRegion while the region is not open, for example because the
    store allocates its memory. The engine repeats its request until the region is open.

    Attributes:
        nbytes: The size of the region in bytes.
    """

    nonce: str
    nbytes: int


class RegionRefused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """The reply to an OpenRegion that the store cannot serve, with the reason. The MAC
    is wrong if the engine has a different cluster secret."""

    nonce: str = ""
    reason: str = ""


StoreReply = RegionOpened | RegionPending | RegionRefused

_REQUEST = b"baton kv store request"
_REPLY = b"baton kv store reply"
_request_decoder = msgspec.msgpack.Decoder(OpenRegion)
_reply_decoder: msgspec.msgpack.Decoder[StoreReply] = msgspec.msgpack.Decoder(
    StoreReply
)


def seal_open_region(request: OpenRegion, secret: bytes) -> bytes:
    return sealed(_REQUEST, request, secret)


def seal_store_reply(reply: StoreReply, secret: bytes) -> bytes:
    return sealed(_REPLY, reply, secret)


def read_open_region(message: bytes, secret: bytes) -> OpenRegion:
    """Returns the request in `message`.

    Raises:
        MessageError: The message is malformed or not authentic.
    """
    check_authentic(message, _REQUEST, secret)
    try:
        return _request_decoder.decode(message[MAC_BYTES:])
    except msgspec.MsgspecError as error:
        raise MessageError(f"request is malformed: {error}") from error


def read_store_reply(message: bytes, secret: bytes) -> StoreReply:
    """Returns the reply in `message`.

    A RegionRefused is accepted without a valid MAC, because a store with another secret
    cannot compute one. A forged refusal can only keep an engine from using the store.

    Raises:
        MessageError: The message is malformed or not authentic.
    """
    try:
        reply = _reply_decoder.decode(message[MAC_BYTES:])
    except msgspec.MsgspecError as error:
        raise MessageError(f"reply is malformed: {error}") from error
    if not isinstance(reply, RegionRefused):
        check_authentic(message, _REPLY, secret)
    return reply
