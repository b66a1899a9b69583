"""`kv_transfer_params`: the reference to a prompt's KV that travels P -> proxy -> D.

Keys and flow are the field's convention, so that any proxy that relays the object untouched can
drive these servers. Proxies decode and encode JSON in other languages, therefore the signature
covers the *typed* values in a normal form of our own: `30` or `30.0`, `1e-05` or `0.00001`, an
absent member or `null` all verify alike. Integers that may exceed 2**53 travel as text. Members
this version does not know are ignored and not signed.
"""

import contextlib
import hashlib
import hmac
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from protocol.errors import KVParamsRejected
from protocol.kv_fields import as_object, optional_bool, read_fields, reject
from protocol.messages import FirstToken, RemotePrefill, SamplingParams, TokenLogprobs

_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_UNSIGNED = ("signature", "prompt_token_ids")
_MAX_TRANSFER_ID = 128  # characters
SENDER_RELEASES = "sender_releases"  # see sender_releases
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's KV on a prefill server: where it lies, until when, and what it belongs to."""

    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: tuple[int, ...]  # exactly those that hold remote_num_tokens
    remote_host: str  # of the side channel
    remote_port: int
    tp_size: int
    lease_id: str  # 32 hex digits
    lease_s: float  # until expiry unless renewed, by the prefill server's clock
    incarnation: str
    remote_num_tokens: int  # the whole prompt
    remote_block_size: int  # tokens
    remote_cached_tokens: int  # of the prompt, what the prefill server did not compute
    prompt_digest: str
    sampling_digest: str
    seed: int  # what the first token was drawn with; the decode server goes on with it
    first_tokens: tuple[FirstToken, ...]  # one per choice
    # One per prompt token, None for the first; None altogether when nobody asked.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    # Of a prompt that came as text: what was tokenized, and the result (see engine/http_text.py).
    text_digest: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # not signed: prompt_digest vouches for them
    signature: str = ""

    def sign(self, secret: bytes) -> "KVTransferParams":
        return msgspec.structs.replace(self, signature=_signature(self, secret))

    def verify(self, secret: bytes) -> None:
        """Raises KVParamsRejected unless a holder of the cluster secret signed these values."""
        try:
            ours = _signature(self, secret)
        except UnicodeEncodeError:  # half a surrogate pair: nobody signs that
            ours = ""
        if not hmac.compare_digest(self.signature.encode(), ours.encode()):
            reject(
                "signature",
                "does not match: the object was altered, or who signed it has another cluster "
                "secret (give all servers one BATON_CLUSTER_SECRET)",
            )

    def tokenized(self) -> tuple[str, list[int]] | None:
        """The text digest and its token ids, where both are told and the ids are those of the
        prompt digest."""
        if self.text_digest is None or self.prompt_token_ids is None:
            return None
        ids = list(self.prompt_token_ids)
        return (self.text_digest, ids) if prompt_digest(ids) == self.prompt_digest else None

    def to_json(self) -> dict[str, Any]:
        """The object for the response body: JSON types only."""
        values = msgspec.structs.asdict(self)
        values["remote_block_ids"] = list(self.remote_block_ids)
        if self.prompt_token_ids is not None:
            values["prompt_token_ids"] = list(self.prompt_token_ids)
        values["seed"] = str(self.seed)
        values["first_tokens"] = [_token_to_json(token) for token in self.first_tokens]
        if self.prompt_logprobs is not None:
            values["prompt_logprobs"] = [_row_to_json(row) for row in self.prompt_logprobs]
        return {"do_remote_decode": False, "do_remote_prefill": True, **values}


def build(secret: bytes, **values: Any) -> KVTransferParams:
    """Signed params from the fields of KVTransferParams (lists for tuples are fine).

    Raises:
        KVParamsRejected: the values do not fit each other. Each is the engine's own and within its
            range: settings and requests are.
    """
    values["remote_block_ids"] = tuple(values["remote_block_ids"])
    values["first_tokens"] = tuple(
        FirstToken(token.id, _all_finite(token.logprobs)) for token in values["first_tokens"]
    )
    if values.get("prompt_logprobs") is not None:
        values["prompt_logprobs"] = tuple(map(_all_finite, values["prompt_logprobs"]))
    if values.get("prompt_token_ids") is not None:
        values["prompt_token_ids"] = tuple(values["prompt_token_ids"])
    unsigned = KVTransferParams(**values)
    _check_together(unsigned)
    return unsigned.sign(secret)


def signed(offered: object, secret: bytes) -> Iterator[KVTransferParams]:
    """Those of one object, or of a list of them, that a server of this cluster made."""
    for item in offered if isinstance(offered, list) else [offered]:
        with contextlib.suppress(KVParamsRejected):
            params = parse(item)
            params.verify(secret)
            yield params


def is_absent(obj: object) -> bool:
    """True for what some clients send to say nothing: null, {}, or all members null or false."""
    if obj is None:
        return True
    return isinstance(obj, dict) and all(v is None or v is False for v in obj.values())


def is_prefill_request(obj: object) -> bool:
    """True when a prefill server is asked to keep the KV for a decode server.

    Raises:
        KVParamsRejected: `do_remote_decode` is true beside a reference to another server's KV,
            or the object has a wrong type.
    """
    if is_absent(obj):
        return False
    members = as_object(obj, "")
    wanted = optional_bool(members, "do_remote_decode")
    if not wanted:
        return False
    if optional_bool(members, "do_remote_prefill"):
        reject("do_remote_prefill", "must be false or null when do_remote_decode is true")
    for name in KVTransferParams.__struct_fields__:
        if members.get(name) is not None:
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
    said = [isinstance(item, dict) and item.get(SENDER_RELEASES) is True for item in items]
    return bool(said) and all(said)


def parse_list(obj: object, num_prompts: int) -> list[KVTransferParams]:
    """The params of every prompt: one object for one prompt, a list for several."""
    items = obj if isinstance(obj, list) else [obj]
    if len(items) != num_prompts:
        reject("", f"holds {len(items)} objects for {num_prompts} prompts; send one for each")
    return [parse(item) for item in items]


def parse(obj: object) -> KVTransferParams:
    """Checks every field by type and range; not yet that it is authentic (see `verify`).

    Raises:
        KVParamsRejected: names the field, its value and what is allowed.
    """
    members = as_object(obj, "")
    if optional_bool(members, "do_remote_decode"):
        reject("do_remote_decode", "must be false or null in a request to a decode server")
    if not optional_bool(members, "do_remote_prefill"):
        reject("do_remote_prefill", "must be true: there is a reference but no order to use it")
    params = KVTransferParams(**read_fields(members))
    _check_together(params)
    return params


def prompt_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 over the token ids as little-endian int64: the prompt these KV bytes belong to."""
    ids = struct.pack(f"<{len(token_ids)}q", *token_ids)  # in half of the time of an array
    return hashlib.sha256(b"baton prompt\0" + ids).hexdigest()


def sampling_digest(sampling: SamplingParams, stop_token_ids: Sequence[int] = ()) -> str:
    """SHA-256 over what the first token depends on, beside the prompt's logits and the seed, which
    travels. This is where it says what that is; tests/engine/test_first_token.py holds it to it.

    Greedy draws know no shape of a distribution. Presence and frequency penalties begin with the
    second token. Stop tokens matter while they are banned, and to a grammar, which allows only
    those of them. Samplers compute in float32, so that is what numbers are compared in.

    Args:
        stop_token_ids: of the request, ends of sequence included.
    """
    is_greedy = sampling.temperature <= 0
    drawn_from = (sampling.temperature, sampling.top_p, sampling.min_p)
    bias = ((token, *float_bits([value])) for token, value in sampling.logit_bias.items())
    stop = sorted(set(stop_token_ids))
    is_banned = sampling.min_tokens > 0 and bool(stop)
    grammar = sampling.grammar
    shape = [
        None if is_greedy else [*float_bits(drawn_from), sampling.top_k],
        float_bits([sampling.repetition_penalty]),
        sorted((token, bits) for token, bits in bias if bits),
        is_banned,
        stop if is_banned or grammar else [],
        grammar and [grammar.kind, grammar.text],
    ]
    text = json.dumps(shape, separators=(",", ":"))
    return hashlib.sha256(b"baton sampling\0" + text.encode()).hexdigest()


def float_bits(values: Sequence[float]) -> tuple[int, ...]:
    """Float32 bit patterns; -0.0 is 0.0, as some languages write it."""
    packed = struct.pack(f"<{len(values)}f", *[value + 0.0 for value in values])
    return struct.unpack(f"<{len(values)}I", packed)


def to_remote_prefill(params: KVTransferParams, *, sender_releases: bool = False) -> RemotePrefill:
    """What the decode engine needs of verified params."""
    return RemotePrefill(
        host=params.remote_host,
        port=params.remote_port,
        engine_id=params.remote_engine_id,
        incarnation=params.incarnation,
        request_id=params.remote_request_id,
        lease_id=params.lease_id,
        lease_s=params.lease_s,
        block_ids=list(params.remote_block_ids),
        block_size=params.remote_block_size,
        num_tokens=params.remote_num_tokens,
        cached_tokens=params.remote_cached_tokens,
        tp_size=params.tp_size,
        first_tokens=list(params.first_tokens),
        prompt_logprobs=None if params.prompt_logprobs is None else list(params.prompt_logprobs),
        sender_releases=sender_releases,
    )


def _signature(params: KVTransferParams, secret: bytes) -> str:
    message = b"baton kv_transfer_params\0" + _normal_form(params)
    return hmac.digest(secret, message, hashlib.sha256).hex()


def _normal_form(params: KVTransferParams) -> bytes:
    """Canonical JSON without a single float: those are written as the hex of their bits."""
    values = msgspec.structs.asdict(params)
    for name in _UNSIGNED:
        del values[name]
    values["lease_s"] = _float_text(params.lease_s)
    values["first_tokens"] = [
        [token.id, token.logprobs and _logprobs_text(token.logprobs)]
        for token in params.first_tokens
    ]
    if params.prompt_logprobs is not None:
        values["prompt_logprobs"] = [row and _logprobs_text(row) for row in params.prompt_logprobs]
    return _encode_sorted(values)


def _logprobs_text(logprobs: TokenLogprobs) -> list[Any]:
    tops = [_float_text(value) for value in logprobs.top_logprobs]
    return [_float_text(logprobs.logprob), logprobs.top_ids, tops]


def _float_text(value: float) -> str:
    return (float(value) + 0.0).hex()  # + 0.0: some languages write -0.0 as 0


def _token_to_json(token: FirstToken) -> dict[str, Any]:
    if token.logprobs is None:
        return {"id": token.id, "logprobs": None}
    return {"id": token.id, "logprobs": msgspec.structs.asdict(token.logprobs)}


def _row_to_json(row: TokenLogprobs | None) -> list[Any] | None:
    return None if row is None else [row.logprob, row.top_ids, row.top_logprobs]


def _all_finite(logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
    if logprobs is None:
        return None
    tops = [_finite(value) for value in logprobs.top_logprobs]
    return TokenLogprobs(_finite(logprobs.logprob), logprobs.top_ids, tops)


def _finite(value: float) -> float:
    return max(float(value), _LOWEST_LOGPROB)


def _check_together(params: KVTransferParams) -> None:
    ids, tokens = params.remote_block_ids, params.remote_num_tokens
    needed = -(-tokens // params.remote_block_size)
    if len(ids) != needed:
        reject(
            "remote_block_ids",
            f"holds {len(ids)} blocks, but {tokens} tokens in blocks of "
            f"{params.remote_block_size} need {needed}",
        )
    if len(set(ids)) != len(ids):
        reject("remote_block_ids", "names a block twice")
    if params.prompt_logprobs is not None and len(params.prompt_logprobs) != tokens:
        reject("prompt_logprobs", f"must hold an item for each of {tokens} tokens")
    if params.prompt_token_ids is not None and len(params.prompt_token_ids) != tokens:
        reject("prompt_token_ids", f"must hold {tokens} ids")
    if params.remote_cached_tokens > tokens:
        reject("remote_cached_tokens", f"exceeds remote_num_tokens, {tokens}")
