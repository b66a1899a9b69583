"""`kv_transfer_params`: the reference to a prompt's KV that travels P -> proxy -> D.

Keys and flow are the field's convention, so that any proxy that relays the object untouched can
drive these servers. Proxies decode and encode JSON in other languages, which print numbers in
other ways and keep some of them only nearly. Therefore there is no fraction in it: logprobs are
float32 bit patterns, integers that may exceed 2**53 are text. `30` and `30.0`, an absent member
and `null` mean the same. Members this version does not know are ignored and not signed.
"""

import contextlib
import hashlib
import hmac
import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from protocol.errors import KVParamsRejected
from protocol.messages import (
    AddRequest,
    FirstToken,
    KVHint,
    RemotePrefill,
    SamplingParams,
    TokenLogprobs,
)
from protocol.registration import MAX_AGE_S
from protocol.short_repr import short_repr

_UNSIGNED = ("signature", "checksums")
_MAX_TRANSFER_ID = 128  # characters
HINT = "hint"  # the member by which proxies name who may have the KV of a prompt's beginning
SENDER_RELEASES = "sender_releases"  # see sender_releases
RELEASE_PATH = (
    "/release_kv"  # of a server: nobody will come for the KV of `kv_transfer_params`
)

# The field's convention: a prefill server is told by this object that it prefills only.
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_LOWEST_LOGPROB = -9999.0  # of a token that cannot be: nobody expects an infinity
_MAX_TOKENS = 1 << 24
_MAX_CHOICES = 128
_MAX_SIGNED = (
    1024  # references of a request, which has no more prompts; of a stranger's as many
)
_OFFER_S = 3.0  # of a lease that is not known yet
_MAX_LOGPROBS = 1000
_DEPTH = 5  # of an object, at most

_Bits = Annotated[int, Meta(ge=0, lt=1 << 32)]  # of a float32, see float_bits
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_T = TypeVar("_T")
_Tokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
_Size = Meta(min_length=1, max_length=_MAX_TOKENS)
_Text = Annotated[str, Meta(min_length=1, max_length=128)]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class LogprobBits(Struct, frozen=True, array_like=True):
    """TokenLogprobs as a reference has them: `[logprob, [top ids], [top logprobs], rank]`."""

    logprob: _Bits
    top_ids: Annotated[list[_TokenId], Meta(max_length=_MAX_LOGPROBS)]
    top_logprobs: Annotated[list[_Bits], Meta(max_length=_MAX_LOGPROBS)]
    rank: _TokenId = 0


class FirstTokenBits(Struct, frozen=True):
    """A FirstToken as a reference has it."""

    id: _TokenId
    logprobs: LogprobBits | None = None


class KVTransferParams(Struct, frozen=True, kw_only=True):
    """One prompt's KV on a prefill server: where it lies, until when, and what it belongs to."""

    remote_engine_id: _Text
    remote_request_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    # Exactly those that hold remote_num_tokens.
    remote_block_ids: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 32)]], _Size]
    remote_host: Annotated[
        str, Meta(min_length=1, max_length=255)
    ]  # of the side channel
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    tp_size: Annotated[int, Meta(ge=1, le=4096)]
    lease_id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    # Until expiry unless renewed, by the prefill server's clock.
    lease_ms: Annotated[int, Meta(ge=1, le=86_400_000)]
    incarnation: _Text
    remote_num_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]  # the whole prompt
    remote_block_size: Annotated[int, Meta(ge=1, le=256)]  # tokens
    remote_cached_tokens: (
        _Tokens  # of the prompt, what the prefill server did not compute
    )
    remote_transferred_tokens: _Tokens = (
        0  # of those, what it pulled from another server
    )
    prompt_digest: _Digest
    sampling_digest: _Digest
    # What the first token was drawn with; the decode server goes on with it.
    seed: Annotated[str, Meta(pattern=r"\A-?[0-9]{1,19}\Z")]
    # One per choice.
    first_tokens: Annotated[
        list[FirstTokenBits], Meta(min_length=1, max_length=_MAX_CHOICES)
    ]
    # One per prompt token, None for the first; None altogether when nobody asked.
    prompt_logprobs: Annotated[list[LogprobBits | None], _Size] | None = None
    # CRC-16s of the signed members, in this order: which of them somebody altered. Not signed.
    checksums: Annotated[str, Meta(max_length=128)] | None = None
    signature: _Digest

    def sign(self, secret: bytes) -> "KVTransferParams":
        texts = list(self._signed_texts().values())
        return msgspec.structs.replace(
            self,
            checksums="".join(map(_checksum, texts)),
            signature=_mac(texts, secret),
        )

    def verify(self, secret: bytes) -> None:
        """Raises KVParamsRejected unless a holder of the cluster secret signed these values."""
        try:
            texts = self._signed_texts()
        except UnicodeEncodeError:  # half a surrogate pair: nobody signs that
            reject("signature", "does not match: it is of no text that can be encoded")
        if hmac.compare_digest(self.signature, _mac(list(texts.values()), secret)):
            return
        told = re.findall("....", self.checksums or "")
        pairs = zip(texts.items(), told, strict=False)
        altered = [name for (name, text), sum_ in pairs if _checksum(text) != sum_]
        if len(told) != len(texts):
            altered = ["checksums"]
        why = "who signed the object has another cluster secret (give all servers one "
        why += "BATON_CLUSTER_SECRET)"
        if altered:
            why = f"{', '.join(altered)} changed between the prefill server and this one (whatever "
            why += "relays kv_transfer_params must leave their values alone)"
        reject("signature", f"does not match: {why}")

    def _signed_texts(self) -> dict[str, bytes]:
        """Each signed member in a normal form, which is JSON without fractions."""
        members = msgspec.structs.asdict(self).items()
        return {
            name: msgspec.json.encode(v) for name, v in members if name not in _UNSIGNED
        }

    def to_json(self) -> dict[str, Any]:
        """The object for the response body: JSON types only."""
        orders = {"do_remote_decode": False, "do_remote_prefill": True}
        return {**orders, **msgspec.to_builtins(self)}


def _mac(texts: Sequence[bytes], secret: bytes) -> str:
    message = b"\n".join([b"baton kv_transfer_params", *texts])
    return hmac.digest(secret, message, hashlib.sha256).hex()


def _checksum(text: bytes) -> str:
    return f"{zlib.crc32(text) & 0xFFFF:04x}"


def build(
    secret: bytes, remote: RemotePrefill, sampling_digest: str, seed: int
) -> KVTransferParams:
    """Signed params of what an engine lends; `to_remote_prefill` makes it a reference again."""
    found, names = msgspec.structs.asdict(remote), KVTransferParams.__struct_fields__
    told: dict[str, Any] = {
        name: found.get(name.removeprefix("remote_")) for name in names
    }
    told |= {
        "sampling_digest": sampling_digest,
        "lease_ms": max(1, round(remote.lease_s * 1000)),
        "seed": str(seed),
        "first_tokens": [
            FirstTokenBits(t.id, _bits_of(t.logprobs)) for t in remote.first_tokens
        ],
        "prompt_logprobs": [*map(_bits_of, remote.prompt_logprobs or ())] or None,
        "signature": "",
    }
    return KVTransferParams(**told).sign(secret)


class Offer(Struct, frozen=True, kw_only=True):
    """A prompt that a prefill server is asked for at this moment: where to subscribe to its KV.
    Only a proxy makes one, as it names a host to connect to."""

    transfer_id: _Text
    engine_id: _Text
    incarnation: _Text
    host: Annotated[str, Meta(min_length=1, max_length=255)]  # of the side channel
    port: Annotated[int, Meta(ge=1, le=65535)]
    issued_s: Annotated[int, Meta(ge=0)] = 0  # since 1970
    signature: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""

    def to_json(self, secret: bytes) -> dict[str, Any]:
        """The object for the decode leg's body."""
        return {"do_remote_prefill": True, "subscribe": sealed(self, secret)}

    def to_remote(
        self, index: int, token_ids: Sequence[int], cache_salt: bytes = b""
    ) -> RemotePrefill:
        """What the engine needs of it for the prompt of this index."""
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
    """By which one of a transfer's prompts is subscribed to."""
    return f"{transfer_id[:100]}-{index}"


class _Said(Struct):
    subscribe: Offer | None = None
    hint: KVHint | None = None


def offer_of(obj: object, secret: bytes, now_s: float) -> Offer | None:
    """What some kv_transfer_params offer. Raises KVParamsRejected, as `hint_of`."""
    offer: Offer | None = _said_of(obj, "subscribe", secret, now_s)
    return offer


def hint_of(obj: object, secret: bytes, now_s: float) -> KVHint | None:
    """What they hint at; a hint that is wrong costs its reader one question. Raises
    KVParamsRejected for what is malformed or old, or what nobody of this cluster signed."""
    hint: KVHint | None = _said_of(obj, HINT, secret, now_s)
    return hint and msgspec.structs.replace(hint, issued_s=0, signature="")


def _said_of(obj: object, name: str, secret: bytes, now_s: float) -> Any:
    given = obj.get(name) if isinstance(obj, dict) else None
    said = getattr(convert({name: given}, _Said), name)
    if said is None:
        return None
    if not hmac.compare_digest(said.signature, _seal(said, secret)):
        reject(
            f"{name}.signature", "does not match: only proxies of this cluster say so"
        )
    if abs(age_s := now_s - said.issued_s) > MAX_AGE_S:
        told = (
            f"is {age_s:.0f} s old by this server's clock, {MAX_AGE_S:g} are the most"
        )
        reject(f"{name}.issued_s", f"{told}: it is a copy, or a clock is wrong")
    return said


def sealed(told: Offer | KVHint, secret: bytes) -> dict[str, Any]:
    """Its members as they travel, signed."""
    return {**msgspec.structs.asdict(told), "signature": _seal(told, secret)}


def _seal(told: Offer | KVHint, secret: bytes) -> str:
    fields = told.__struct_fields__
    values = [getattr(told, name) for name in fields if name != "signature"]
    return hmac.digest(
        secret, f"baton {type(told).__name__} {values}".encode(), "sha256"
    ).hex()


def signed(offered: object, secret: bytes) -> Iterator[KVTransferParams]:
    """Those of one object, or of a list of them, that a server of this cluster made."""
    for item in offered[:_MAX_SIGNED] if isinstance(offered, list) else [offered]:
        with contextlib.suppress(KVParamsRejected):
            params = parse(item)
            params.verify(secret)
            yield params


def is_absent(obj: object) -> bool:
    """True for what some clients send to say nothing: null, {}, or all members null or false. A
    hint says nothing either: it is beside the rest."""
    if obj is None:
        return True
    if not isinstance(obj, dict):
        return False
    return all(v is None or v is False or name == HINT for name, v in obj.items())


class _Orders(Struct):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


def is_prefill_request(obj: object) -> bool:
    """True when a prefill server is asked to keep the KV for a decode server.

    Raises KVParamsRejected for an order beside a reference to another server's KV."""
    if is_absent(obj) or not (orders := convert(obj, _Orders)).do_remote_decode:
        return False
    if orders.do_remote_prefill:
        reject(
            "do_remote_prefill", "must be false or null when do_remote_decode is true"
        )
    for name in KVTransferParams.__struct_fields__:
        if isinstance(obj, dict) and obj.get(name) is not None:
            reject(name, "must be null when do_remote_decode is true")
    return True


def transfer_id(obj: object) -> str | None:
    """The name that whoever asks for a prefill gave it, to call it off by where no answer came."""
    name = obj.get("transfer_id") if isinstance(obj, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= _MAX_TRANSFER_ID else None


def sender_releases(obj: object) -> bool:
    """True when whoever sends the reference will end the lease where the request is not served: a
    decode server that has read nothing leaves it alone, as another one may be asked."""
    items = obj if isinstance(obj, list) else [obj]
    said = [
        isinstance(item, dict) and item.get(SENDER_RELEASES) is True for item in items
    ]
    return bool(said) and all(said)


def parse_list(obj: object, num_prompts: int) -> list[KVTransferParams]:
    """The params of every prompt: one object for one prompt, a list for several."""
    items = obj if isinstance(obj, list) else [obj]
    if len(items) != num_prompts:
        reject(
            "",
            f"holds {len(items)} objects for {num_prompts} prompts; send one for each",
        )
    return [parse(item) for item in items]


def parse(obj: object) -> KVTransferParams:
    """Checks every field by type and range; not yet that it is authentic (see `verify`).

    Raises KVParamsRejected, naming the field, its value and what is allowed."""
    orders = convert(obj, _Orders)
    if orders.do_remote_decode:
        reject(
            "do_remote_decode", "must be false or null in a request to a decode server"
        )
    if not orders.do_remote_prefill:
        reject(
            "do_remote_prefill",
            "must be true: there is a reference but no order to use it",
        )
    assert isinstance(obj, dict)
    members = {name: obj.get(name) for name in KVTransferParams.__struct_fields__}
    return convert(members, KVTransferParams)


def convert(value: object, kind: type[_T]) -> _T:
    """`value` as `kind`. Raises KVParamsRejected, which names the member and its value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        wrong = _at(value, path)
        if isinstance(wrong, float) and isinstance(_with_integers(wrong), int):
            return convert(
                _with_integers(value), kind
            )  # some JSON writers know floats only
        wanted = re.sub("^Expected ", "must be ", problem.partition(", got ")[0])
        reject(path, f"{wanted}, got {short_repr(wrong)}")


def _with_integers(value: Any, depth: int = _DEPTH) -> Any:
    match value:
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case list() if depth:
            return [_with_integers(item, depth - 1) for item in value]
        case dict() if depth:
            return {
                name: _with_integers(item, depth - 1) for name, item in value.items()
            }
    return value


def _at(value: Any, path: str) -> Any:
    """What is at a path such as `first_tokens[0].id`."""
    for key in re.findall(r"\w+", path):
        value = value.get(key) if isinstance(value, dict) else value[int(key)]
    return value


def prompt_digest(token_ids: Sequence[int], cache_salt: bytes = b"") -> str:
    """SHA-256 over the token ids as little-endian int64: the prompt these KV bytes belong to. A
    salted prompt has another digest, so that its KV is used by requests of its salt only."""
    ids = struct.pack(
        f"<{len(token_ids)}q", *token_ids
    )  # in half of the time of an array
    label = b"baton salted prompt\0" + cache_salt if cache_salt else b"baton prompt\0"
    return hashlib.sha256(label + ids).hexdigest()


def sampling_digest(
    sampling: SamplingParams, stop_token_ids: Sequence[int] = ()
) -> str:
    """SHA-256 over what the first token depends on, beside the prompt's logits and the seed, which
    travels; tests/engine/test_first_token.py holds it to that. Numbers count as float32.

    Greedy draws know no shape of a distribution. Presence and frequency penalties begin with the
    second token. Stop tokens, ends of sequence included, matter while they are banned, and to a
    grammar, which allows only those of them."""
    is_greedy = sampling.temperature <= 0
    drawn_from = (sampling.temperature, sampling.top_p, sampling.min_p)
    bias = (
        (token, *float_bits([value])) for token, value in sampling.logit_bias.items()
    )
    stop = sorted(set(stop_token_ids))
    is_banned = sampling.min_tokens > 0 and bool(stop)
    grammar = sampling.grammar
    shape = [
        None if is_greedy else [*float_bits(drawn_from), sampling.top_k],
        float_bits([sampling.repetition_penalty]),
        sorted((token, bits) for token, bits in bias if bits),
        is_banned,
        stop if is_banned or grammar else [],
        grammar and msgspec.to_builtins(grammar),
    ]
    text = json.dumps(shape, separators=(",", ":"))
    return hashlib.sha256(b"baton sampling\0" + text.encode()).hexdigest()


def float_bits(values: Sequence[float]) -> tuple[int, ...]:
    """Float32 bit patterns; -0.0 is 0.0, as some languages write it."""
    packed = struct.pack(f"<{len(values)}f", *[value + 0.0 for value in values])
    return struct.unpack(f"<{len(values)}I", packed)


def to_remote_prefill(
    params: KVTransferParams, *, sender_releases: bool = False
) -> RemotePrefill:
    """What the decode engine needs of verified params."""
    values = msgspec.structs.asdict(params)
    told: dict[str, Any] = {
        "lease_s": params.lease_ms / 1000,
        "first_tokens": [
            FirstToken(t.id, _logprobs_of(t.logprobs)) for t in params.first_tokens
        ],
        "prompt_logprobs": [*map(_logprobs_of, params.prompt_logprobs or ())] or None,
        "sender_releases": sender_releases,
    }
    told = {
        name.removeprefix("remote_"): value for name, value in values.items()
    } | told
    known = {
        name: told[name] for name in RemotePrefill.__struct_fields__ if name in told
    }
    return RemotePrefill(**known)


def are_first_tokens_of(
    params: KVTransferParams, add: AddRequest, seed: int | None
) -> bool:
    """Whether this request would draw the same first tokens here, and they tell all that it asks.

    Args:
        seed: the client's own, if any.
    """
    sampling, wanted = add.sampling, add.sampling.num_logprobs
    told = [token.logprobs for token in params.first_tokens]
    return (
        add.max_tokens > 0
        and len(params.first_tokens) == add.num_choices
        and params.sampling_digest == sampling_digest(sampling, add.stop_token_ids)
        and (sampling.temperature <= 0 or seed in (None, int(params.seed)))
        and (wanted is None or all(t and len(t.top_ids) >= wanted for t in told))
    )


def _bits_of(found: TokenLogprobs | None) -> LogprobBits | None:
    if found is None:
        return None
    values = [
        max(value, _LOWEST_LOGPROB) for value in (found.logprob, *found.top_logprobs)
    ]
    logprob, *tops = float_bits(values)
    return LogprobBits(logprob, found.top_ids, tops, found.rank)


def _logprobs_of(found: LogprobBits | None) -> TokenLogprobs | None:
    if found is None:
        return None
    bits = (found.logprob, *found.top_logprobs)
    logprob, *tops = struct.unpack(
        f"<{len(bits)}f", struct.pack(f"<{len(bits)}I", *bits)
    )
    return TokenLogprobs(logprob, found.top_ids, tops, found.rank)


def reject(name: str, problem: str) -> NoReturn:
    param = f"kv_transfer_params.{name}" if name else "kv_transfer_params"
    raise KVParamsRejected(f"{param} {problem}.", param=param)
