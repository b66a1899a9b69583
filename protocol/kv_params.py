"""`kv_transfer_params`: a reference to a prompt's KV. A prefill server, or a server
that hands over a stream, sends the reference through the proxy to a decode server.

The flow and the names of the common members are those of vLLM. Therefore any proxy that
relays the object unchanged can drive Baton's servers. Proxies in some languages write
JSON numbers in a different format, or with limited precision. Therefore the object
contains no fractions: logprobs are float32 bit patterns, and integers that may exceed
2**53 are strings. `30` and `30.0` mean the same, and so do an absent member and `null`.
Unknown members are ignored, and the signature does not cover them.
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
    RemotePrefill,
    SamplingParams,
    TokenLogprobs,
)
from protocol.short_repr import short_repr

# The fields that the signature does not cover. Older servers do not sign
# `remote_drafted_tokens`, and no output token depends on it.
_UNSIGNED = ("signature", "checksums", "remote_drafted_tokens")
_MAX_TRANSFER_ID_CHARS = 128
HINT = "hint"  # the member that names a server which may hold KV; see kv_offers.py
SENDER_RELEASES = "sender_releases"  # see the function sender_releases
# Endpoint of a server: releases the KV of kv_transfer_params that no server will use.
RELEASE_PATH = "/release_kv"

# With these kv_transfer_params, a prefill server computes the prompt, samples the first
# token of each choice and leases the KV to a decode server. vLLM has the same members.
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# Lower bound of logprobs. It replaces the -inf of an impossible token, because clients
# do not expect an infinity.
_LOWEST_LOGPROB = -9999.0
_MAX_TOKENS = 1 << 24
_MAX_CHOICES = 128
# `verified_params` verifies at most this many references: one per prompt of a request.
# The maximum limits the work that a client with forged references can cause.
_MAX_VERIFIED = 1024
_MAX_LOGPROBS = 1000
_MAX_DEPTH = 5  # levels of nested JSON values that `_with_integers` converts

_Bits = Annotated[int, Meta(ge=0, lt=1 << 32)]  # a float32; see float_bits
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_T = TypeVar("_T")
_NumTokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
_Size = Meta(min_length=1, max_length=_MAX_TOKENS)
_Text = Annotated[str, Meta(min_length=1, max_length=128)]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class LogprobBits(Struct, frozen=True, array_like=True):
    """TokenLogprobs in a reference: `[logprob, [top ids], [top logprobs], rank]`."""

    logprob: _Bits
    top_ids: Annotated[list[_TokenId], Meta(max_length=_MAX_LOGPROBS)]
    top_logprobs: Annotated[list[_Bits], Meta(max_length=_MAX_LOGPROBS)]
    rank: _TokenId = 0


class FirstTokenBits(Struct, frozen=True):
    """A FirstToken in a reference."""

    id: _TokenId
    logprobs: LogprobBits | None = None


class KVTransferParams(Struct, frozen=True, kw_only=True):
    """A reference to one prompt's KV on a prefill server.

    Attributes:
        remote_block_ids: The block table (kvcache/groups.py) of exactly
            `remote_num_tokens` tokens.
        remote_host: Address of the prefill server's side channel.
        lease_ms: Duration of the lease, by the clock of the prefill server. The decode
            server can renew the lease.
        remote_num_tokens, remote_cached_tokens, remote_transferred_tokens,
            remote_drafted_tokens: See RemotePrefill (protocol/messages.py).
        remote_block_size: Tokens per block.
        seed: The seed with which the first tokens were sampled. If the decode server
            uses these tokens, it samples the following tokens with the same seed.
        first_tokens: One token per choice.
        prompt_logprobs: One entry per prompt token; the entry of the first token is
            None. The list is None if the decode server needs no prompt logprobs.
        checksums: A checksum of 16 bits, as hex, for each signed member in the order of
            the members. If the signature is wrong, the checksums show which member a
            proxy has changed.
    """

    remote_engine_id: _Text
    remote_request_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    remote_block_ids: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 32)]], _Size]
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    tp_size: Annotated[int, Meta(ge=1, le=4096)]
    lease_id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    lease_ms: Annotated[int, Meta(ge=1, le=86_400_000)]
    incarnation: _Text
    remote_num_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
    remote_block_size: Annotated[int, Meta(ge=1, le=256)]
    remote_cached_tokens: _NumTokens
    remote_transferred_tokens: _NumTokens = 0
    remote_drafted_tokens: _NumTokens = 0
    prompt_digest: _Digest
    sampling_digest: _Digest
    seed: Annotated[str, Meta(pattern=r"\A-?[0-9]{1,19}\Z")]
    first_tokens: Annotated[
        list[FirstTokenBits], Meta(min_length=1, max_length=_MAX_CHOICES)
    ]
    prompt_logprobs: Annotated[list[LogprobBits | None], _Size] | None = None
    checksums: Annotated[str, Meta(max_length=128)] | None = None
    signature: _Digest

    def sign(self, secret: bytes) -> "KVTransferParams":
        """Returns a copy with checksums and a signature."""
        texts = list(self._signed_texts().values())
        return msgspec.structs.replace(
            self,
            checksums="".join(map(_checksum, texts)),
            signature=_mac(texts, secret),
        )

    def verify(self, secret: bytes) -> None:
        """Raises KVParamsRejected unless the values were signed with this secret."""
        try:
            texts = self._signed_texts()
        except UnicodeEncodeError:  # an unpaired surrogate, which no server signs
            reject("signature", "does not match: a text has an unpaired surrogate")
        if hmac.compare_digest(self.signature, _mac(list(texts.values()), secret)):
            return
        expected_sums = re.findall("....", self.checksums or "")
        altered = [
            name
            for (name, text), expected_sum in zip(
                texts.items(), expected_sums, strict=False
            )
            if _checksum(text) != expected_sum
        ]
        if len(expected_sums) != len(texts):
            altered = ["checksums"]
        reason = (
            "the server that signed the object has a different cluster secret (give "
            "all servers the same BATON_CLUSTER_SECRET)"
        )
        if altered:
            reason = (
                f"{', '.join(altered)} changed between the prefill server and this one "
                "(a proxy that relays kv_transfer_params must not change their values)"
            )
        reject("signature", f"does not match: {reason}")

    def _signed_texts(self) -> dict[str, bytes]:
        """Returns the JSON text of each signed member. All servers write the same text,
        because no member has a fraction.
        """
        return {
            name: msgspec.json.encode(value)
            for name, value in msgspec.structs.asdict(self).items()
            if name not in _UNSIGNED
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the object for the response body, with JSON types only."""
        flags = {"do_remote_decode": False, "do_remote_prefill": True}
        return {**flags, **msgspec.to_builtins(self)}


def _mac(texts: Sequence[bytes], secret: bytes) -> str:
    message = b"\n".join([b"baton kv_transfer_params", *texts])
    return hmac.digest(secret, message, hashlib.sha256).hex()


def _checksum(text: bytes) -> str:
    return f"{zlib.crc32(text) & 0xFFFF:04x}"


def build(
    secret: bytes, remote: RemotePrefill, sampling_digest: str, seed: int
) -> KVTransferParams:
    """Returns signed params for leased KV. `to_remote_prefill` is the inverse.

    The first tokens were sampled with `seed`.
    """
    names = KVTransferParams.__struct_fields__
    remote_values = msgspec.structs.asdict(remote)
    members: dict[str, Any] = {
        name: remote_values.get(name.removeprefix("remote_")) for name in names
    }
    members |= {
        "sampling_digest": sampling_digest,
        "lease_ms": max(1, round(remote.lease_s * 1000)),
        "seed": str(seed),
        "first_tokens": [
            FirstTokenBits(t.id, _bits_of(t.logprobs)) for t in remote.first_tokens
        ],
        "prompt_logprobs": [*map(_bits_of, remote.prompt_logprobs or ())] or None,
        "signature": "",
    }
    return KVTransferParams(**members).sign(secret)


def verified_params(references: object, secret: bytes) -> Iterator[KVTransferParams]:
    """Yields the params in `references`, which is one object or a list. Skips objects
    that are invalid, not signed with this secret, or after the first _MAX_VERIFIED.
    """
    items = references[:_MAX_VERIFIED] if isinstance(references, list) else [references]
    for item in items:
        with contextlib.suppress(KVParamsRejected):
            params = parse(item)
            params.verify(secret)
            yield params


def is_absent(obj: object) -> bool:
    """Returns True for null, {}, and objects with null and false members only.

    Some clients send such an object instead of leaving the field out. The member `hint`
    does not count, because it is independent of the other members.
    """
    if obj is None:
        return True
    if not isinstance(obj, dict):
        return False
    return all(v is None or v is False or name == HINT for name, v in obj.items())


class _Flags(Struct):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


def is_prefill_request(obj: object) -> bool:
    """Returns whether `obj` requests that a prefill server retain the KV.

    Raises:
        KVParamsRejected: The object is malformed, or also refers to existing KV.
    """
    if is_absent(obj):
        return False
    flags = convert(obj, _Flags)
    if not flags.do_remote_decode:
        return False
    if flags.do_remote_prefill:
        reject(
            "do_remote_prefill", "must be false or null when do_remote_decode is true"
        )
    for name in KVTransferParams.__struct_fields__:
        if isinstance(obj, dict) and obj.get(name) is not None:
            reject(name, "must be null when do_remote_decode is true")
    return True


def transfer_id(obj: object) -> str | None:
    """Returns the id to subscribe to a prefill or to cancel it; None if not valid."""
    name = obj.get("transfer_id") if isinstance(obj, dict) else None
    is_valid = isinstance(name, str) and 0 < len(name) <= _MAX_TRANSFER_ID_CHARS
    return name if is_valid else None


def sender_releases(obj: object) -> bool:
    """Returns whether the request's sender ends the lease if no server pulls the KV.

    If a decode server refuses such a request without having read KV, it must not end
    the lease. The sender may retry the request at another decode server.
    """
    items = obj if isinstance(obj, list) else [obj]
    flags = [
        isinstance(item, dict) and item.get(SENDER_RELEASES) is True for item in items
    ]
    return bool(flags) and all(flags)


def parse_list(obj: object, num_prompts: int) -> list[KVTransferParams]:
    """Returns the params of every prompt, from one object or a list of objects.

    Raises:
        KVParamsRejected: The number of objects differs from `num_prompts`, or a member
            is invalid.
    """
    items = obj if isinstance(obj, list) else [obj]
    if len(items) != num_prompts:
        problem = f"holds {len(items)} objects for {num_prompts} prompts"
        reject("", f"{problem}; send one per prompt")
    return [parse(item) for item in items]


def parse(obj: object) -> KVTransferParams:
    """Returns `obj` as params with an unverified signature; see `verify`.

    Raises:
        KVParamsRejected: A member is invalid. The message has the member's name and the
            requirement.
    """
    flags = convert(obj, _Flags)
    if flags.do_remote_decode:
        reject(
            "do_remote_decode", "must be false or null in a request to a decode server"
        )
    if not flags.do_remote_prefill:
        reject(
            "do_remote_prefill",
            "must be true, because the object refers to KV on another server",
        )
    assert isinstance(obj, dict)
    members = {name: obj.get(name) for name in KVTransferParams.__struct_fields__}
    return convert(members, KVTransferParams)


def convert(value: object, kind: type[_T]) -> _T:
    """Returns `value` as an instance of `kind`. Floats such as 30.0 are accepted as
    integers.

    Raises:
        KVParamsRejected: A member is invalid. The message has its name and value.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        wrong_value = _value_at(value, path)
        # Some JSON encoders write integers as floats.
        is_float = isinstance(wrong_value, float)
        if is_float and isinstance(_with_integers(wrong_value), int):
            return convert(_with_integers(value), kind)
        requirement = re.sub("^Expected ", "must be ", problem.partition(", got ")[0])
        reject(path, f"{requirement}, got {short_repr(wrong_value)}")


def _with_integers(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Converts floats with integer values below 2**53, also in lists and objects."""
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


def _value_at(value: Any, path: str) -> Any:
    """Returns the value at a path such as `first_tokens[0].id`."""
    for key in re.findall(r"\w+", path):
        value = value.get(key) if isinstance(value, dict) else value[int(key)]
    return value


def prompt_digest(token_ids: Sequence[int], cache_salt: bytes = b"") -> str:
    """Returns the SHA-256 digest of a prompt's token ids, in hex.

    The ids are hashed as little-endian int64. The digest also depends on the salt, so
    that only requests with the same salt use the prompt's KV.
    """
    # struct.pack is twice as fast as array.array.
    ids = struct.pack(f"<{len(token_ids)}q", *token_ids)
    label = b"baton salted prompt\0" + cache_salt if cache_salt else b"baton prompt\0"
    return hashlib.sha256(label + ids).hexdigest()


def sampling_digest(
    sampling: SamplingParams, stop_token_ids: Sequence[int] = ()
) -> str:
    """Returns the SHA-256 digest of the parameters that the first token depends on.

    The first token also depends on the prompt's logits and on the seed. The digest does
    not include them; the seed is sent separately. tests/engine/test_first_token.py
    checks that the digest includes everything else. Numbers are rounded to float32.

    The digest leaves out parameters without an effect on the first token:

    - Greedy sampling ignores temperature, top_p, min_p and top_k.
    - Presence and frequency penalties begin with the second token.
    - Stop tokens, including end-of-sequence tokens, matter only while `min_tokens` bans
      them, or with a grammar. At the end of a grammar only stop tokens are allowed.
    """
    is_greedy = sampling.temperature <= 0
    distribution = (sampling.temperature, sampling.top_p, sampling.min_p)
    bias = (
        (token, *float_bits([value])) for token, value in sampling.logit_bias.items()
    )
    stop = sorted(set(stop_token_ids))
    bans_stops = sampling.min_tokens > 0 and bool(stop)
    grammar = sampling.grammar
    parameters = [
        None if is_greedy else [*float_bits(distribution), sampling.top_k],
        float_bits([sampling.repetition_penalty]),
        sorted((token, bits) for token, bits in bias if bits),
        bans_stops,
        stop if bans_stops or grammar else [],
        grammar and msgspec.to_builtins(grammar),
    ]
    text = json.dumps(parameters, separators=(",", ":"))
    return hashlib.sha256(b"baton sampling\0" + text.encode()).hexdigest()


def float_bits(values: Sequence[float]) -> tuple[int, ...]:
    """Returns the bit patterns of `values` as float32.

    -0.0 becomes 0.0, because JSON encoders of some languages write -0.0 as 0.
    """
    packed = struct.pack(f"<{len(values)}f", *[value + 0.0 for value in values])
    return struct.unpack(f"<{len(values)}I", packed)


def to_remote_prefill(
    params: KVTransferParams, *, sender_releases: bool = False
) -> RemotePrefill:
    """Converts verified params to the form that the decode engine receives."""
    values = msgspec.structs.asdict(params)
    members: dict[str, Any] = {
        name.removeprefix("remote_"): value for name, value in values.items()
    }
    members |= {
        "lease_s": params.lease_ms / 1000,
        "first_tokens": [
            FirstToken(token.id, _logprobs_of(token.logprobs))
            for token in params.first_tokens
        ],
        "prompt_logprobs": [*map(_logprobs_of, params.prompt_logprobs or ())] or None,
        "sender_releases": sender_releases,
    }
    names = RemotePrefill.__struct_fields__
    return RemotePrefill(**{name: members[name] for name in names if name in members})


def can_use_first_tokens(
    params: KVTransferParams, add: AddRequest, seed: int | None
) -> bool:
    """Returns True if this server would sample the same first tokens as in `params`,
    and if they have all logprobs that the request needs.

    Args:
        params: The params with the first tokens of the prefill server.
        add: The request on this server.
        seed: The seed of the client; None if the client sent none.
    """
    sampling = add.sampling
    num_logprobs = sampling.num_logprobs
    logprobs = [token.logprobs for token in params.first_tokens]
    has_logprobs = num_logprobs is None or all(
        entry is not None and len(entry.top_ids) >= num_logprobs for entry in logprobs
    )
    return (
        add.max_tokens > 0
        and len(params.first_tokens) == add.num_choices
        and params.sampling_digest == sampling_digest(sampling, add.stop_token_ids)
        and (sampling.temperature <= 0 or seed in (None, int(params.seed)))
        and has_logprobs
    )


def _bits_of(entry: TokenLogprobs | None) -> LogprobBits | None:
    if entry is None:
        return None
    values = [
        max(value, _LOWEST_LOGPROB) for value in (entry.logprob, *entry.top_logprobs)
    ]
    logprob, *top_logprobs = float_bits(values)
    return LogprobBits(logprob, entry.top_ids, top_logprobs, entry.rank)


def _logprobs_of(entry: LogprobBits | None) -> TokenLogprobs | None:
    if entry is None:
        return None
    bits = [entry.logprob, *entry.top_logprobs]
    data = struct.pack(f"<{len(bits)}I", *bits)
    logprob, *top_logprobs = struct.unpack(f"<{len(bits)}f", data)
    return TokenLogprobs(logprob, entry.top_ids, top_logprobs, entry.rank)


def reject(name: str, problem: str) -> NoReturn:
    """Raises KVParamsRejected about the member `name`; "" means the whole object."""
    param = f"kv_transfer_params.{name}" if name else "kv_transfer_params"
    raise KVParamsRejected(f"{param} {problem}.", param=param)
