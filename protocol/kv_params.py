"""`kv_transfer_params`: the reference to a prompt's KV that travels P -> proxy -> D.

Keys and flow are the field's convention, so that any proxy that relays the object untouched can
drive these servers. Proxies decode and encode JSON in other languages, therefore the signature
covers the *typed* values in a normal form of our own: `30` or `30.0`, `1e-05` or `0.00001`, an
absent member or `null` all verify alike. Integers that may exceed 2**53 travel as text. Members
this version does not know are ignored and not signed.
"""

import array
import contextlib
import hashlib
import hmac
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any, NoReturn

import msgspec

from protocol.errors import KVParamsRejected
from protocol.messages import FirstToken, RemotePrefill, SamplingParams, TokenLogprobs

MAX_TOKENS = 1 << 24
_UNSIGNED = ("signature", "prompt_token_ids")
MAX_CHOICES = 128
MAX_LOGPROBS = 1000
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, kw_only=True)
class KVTransferParams:
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
        return replace(self, signature=_signature(self, secret))

    def verify(self, secret: bytes) -> None:
        """Raises KVParamsRejected unless a holder of the cluster secret signed these values."""
        if not hmac.compare_digest(self.signature.encode(), _signature(self, secret).encode()):
            _reject(
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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
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
        KVParamsRejected: a value is out of range; what is built here always parses there.
    """
    values["remote_block_ids"] = tuple(values["remote_block_ids"])
    values["first_tokens"] = tuple(values["first_tokens"])
    for name in ("prompt_logprobs", "prompt_token_ids"):
        if values.get(name) is not None:
            values[name] = tuple(values[name])
    unsigned = KVTransferParams(**values, signature="0" * 64)
    return parse(unsigned.to_json()).sign(secret)


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
    members = _object(obj, "")
    wanted = _optional_bool(members, "do_remote_decode")
    if not wanted:
        return False
    if _optional_bool(members, "do_remote_prefill"):
        _reject("do_remote_prefill", "must be false or null when do_remote_decode is true")
    for field in fields(KVTransferParams):
        if members.get(field.name) is not None:
            _reject(field.name, "must be null when do_remote_decode is true")
    return True


def parse_list(obj: object, num_prompts: int) -> list[KVTransferParams]:
    """The params of every prompt: one object for one prompt, a list for several."""
    items = obj if isinstance(obj, list) else [obj]
    if len(items) != num_prompts:
        _reject("", f"holds {len(items)} objects for {num_prompts} prompts; send one for each")
    return [parse(item) for item in items]


def parse(obj: object) -> KVTransferParams:
    """Checks every field by type and range; not yet that it is authentic (see `verify`).

    Raises:
        KVParamsRejected: names the field, its value and what is allowed.
    """
    members = _object(obj, "")
    if _optional_bool(members, "do_remote_decode"):
        _reject("do_remote_decode", "must be false or null in a request to a decode server")
    if not _optional_bool(members, "do_remote_prefill"):
        _reject("do_remote_prefill", "must be true: there is a reference but no order to use it")
    values = {name: check(members.get(name), name) for name, check in _CHECKS.items()}
    params = KVTransferParams(**values)
    _check_together(params)
    return params


def prompt_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 over the token ids as little-endian int64: the prompt these KV bytes belong to."""
    ids = array.array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(b"baton prompt\0" + ids.tobytes()).hexdigest()


def sampling_digest(sampling: SamplingParams, stop_token_ids: Sequence[int] = ()) -> str:
    """SHA-256 over what shapes the distribution the first token was drawn from.

    The seed is not in it (it travels), nor what only changes the report (logprobs).

    Args:
        stop_token_ids: of the request; no first token may be one of them where min_tokens is set.
    """
    numbers = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    return _shape_digest(
        numbers,
        sampling.top_k,
        tuple(sorted(sampling.logit_bias.items())),
        tuple(sorted(set(stop_token_ids))) if sampling.min_tokens > 0 else (),
        None if sampling.grammar is None else (sampling.grammar.kind, sampling.grammar.text),
    )


@lru_cache(maxsize=64)  # most requests of a client, and all that give nothing, have one shape
def _shape_digest(
    numbers: tuple[float, ...],
    top_k: int,
    logit_bias: tuple[tuple[int, float], ...],
    stop_token_ids: tuple[int, ...],
    grammar: tuple[str, str] | None,
) -> str:
    shape = [
        [_float_text(value) for value in numbers],
        top_k,
        [[token, _float_text(bias)] for token, bias in logit_bias],
        stop_token_ids,
        grammar,
    ]
    text = json.dumps(shape, separators=(",", ":"))
    return hashlib.sha256(b"baton sampling\0" + text.encode()).hexdigest()


def to_remote_prefill(params: KVTransferParams) -> RemotePrefill:
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
    )


def _signature(params: KVTransferParams, secret: bytes) -> str:
    message = b"baton kv_transfer_params\0" + _normal_form(params)
    return hmac.digest(secret, message, hashlib.sha256).hex()


def _normal_form(params: KVTransferParams) -> bytes:
    """Canonical JSON without a single float: those are written as the hex of their bits."""
    values = {f.name: getattr(params, f.name) for f in fields(params) if f.name not in _UNSIGNED}
    values["lease_s"] = _float_text(params.lease_s)
    values["first_tokens"] = [
        [token.id, token.logprobs and _logprobs_text(token.logprobs)]
        for token in params.first_tokens
    ]
    if params.prompt_logprobs is not None:
        values["prompt_logprobs"] = [row and _logprobs_text(row) for row in params.prompt_logprobs]
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _logprobs_text(logprobs: TokenLogprobs) -> list[Any]:
    tops = [_float_text(value) for value in logprobs.top_logprobs]
    return [_float_text(logprobs.logprob), logprobs.top_ids, tops]


def _float_text(value: float) -> str:
    return (float(value) + 0.0).hex()  # + 0.0: some languages write -0.0 as 0


def _token_to_json(token: FirstToken) -> dict[str, Any]:
    if token.logprobs is None:
        return {"id": token.id, "logprobs": None}
    report = {
        "logprob": _finite(token.logprobs.logprob),
        "top_ids": list(token.logprobs.top_ids),
        "top_logprobs": [_finite(value) for value in token.logprobs.top_logprobs],
    }
    return {"id": token.id, "logprobs": report}


def _row_to_json(row: TokenLogprobs | None) -> list[Any] | None:
    if row is None:
        return None
    return [_finite(row.logprob), list(row.top_ids), [_finite(value) for value in row.top_logprobs]]


def _finite(value: float) -> float:
    return max(float(value), _LOWEST_LOGPROB)


def _reject(name: str, problem: str) -> NoReturn:
    param = f"kv_transfer_params.{name}" if name else "kv_transfer_params"
    raise KVParamsRejected(f"{param} {problem}.", param=param)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _reject(name, f"must be an object, got {type(value).__name__}")
    return value


def _optional_bool(members: dict[str, Any], name: str) -> bool:
    value = members.get(name)
    if value is not None and not isinstance(value, bool):
        _reject(name, f"must be true, false or null, got {_shown(value)}")
    return bool(value)


Check = Callable[[Any, str], Any]


def _integer(low: int, high: int) -> Check:
    def check(value: Any, name: str) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # some JSON writers know floats only
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            _reject(name, f"must be an integer from {low} to {high}, got {_shown(value)}")
        return value

    return check


def _big_integer(low: int, high: int) -> Check:
    check_range = _integer(low, high)

    def check(value: Any, name: str) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value, re.ASCII):
            value = int(value)
        return int(check_range(value, name))

    return check


def _number(low: float, high: float) -> Check:
    def check(value: Any, name: str) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # nan is not
            _reject(name, f"must be a number from {low} to {high}, got {_shown(value)}")
        return float(value)

    return check


def _text(low: int, high: int) -> Check:
    def check(value: Any, name: str) -> str:
        if not isinstance(value, str) or not low <= len(value) <= high:
            _reject(name, f"must be text of {low} to {high} characters, got {_shown(value)}")
        return value

    return check


def _hex(digits: int) -> Check:
    def check(value: Any, name: str) -> str:
        if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
            _reject(name, f"must be {digits} lower-case hex digits, got {_shown(value)}")
        return value

    return check


def _list(item: Check, low: int, high: int) -> Check:
    def check(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list) or not low <= len(value) <= high:
            _reject(name, f"must be a list of {low} to {high} items, got {_shown(value)}")
        return [item(entry, f"{name}[{index}]") for index, entry in enumerate(value)]

    return check


_token_id = _integer(0, (1 << 31) - 1)
_logprob = _number(-1e30, 1e-3)  # rounding may lift a certain token a little above 0
_top_ids = _list(_token_id, 0, MAX_LOGPROBS)
_top_logprobs = _list(_logprob, 0, MAX_LOGPROBS)


def _first_token(value: Any, name: str) -> FirstToken:
    members = _object(value, name)
    token_id = _token_id(members.get("id"), f"{name}.id")
    if members.get("logprobs") is None:
        return FirstToken(token_id)
    where = f"{name}.logprobs"
    report = _object(members["logprobs"], where)
    logprobs = TokenLogprobs(
        logprob=_logprob(report.get("logprob"), f"{where}.logprob"),
        top_ids=_top_ids(report.get("top_ids") or [], f"{where}.top_ids"),
        top_logprobs=_top_logprobs(report.get("top_logprobs") or [], f"{where}.top_logprobs"),
    )
    if len(logprobs.top_ids) != len(logprobs.top_logprobs):
        _reject(f"{where}.top_logprobs", "must be as long as top_ids")
    return FirstToken(token_id, logprobs)


def _prompt_logprobs(value: Any, name: str) -> tuple[TokenLogprobs | None, ...] | None:
    if value is None:
        return None
    rows = _list(_prompt_row, 1, MAX_TOKENS)(value, name)
    if rows[0] is not None or None in rows[1:]:
        _reject(name, "must be null for the first token and for no other")
    return tuple(rows)


def _prompt_row(value: Any, name: str) -> TokenLogprobs | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        _reject(name, f"must be null or a list of 3 items, got {_shown(value)}")
    row = TokenLogprobs(
        _logprob(value[0], f"{name}[0]"),
        _top_ids(value[1], f"{name}[1]"),
        _top_logprobs(value[2], f"{name}[2]"),
    )
    if len(row.top_ids) != len(row.top_logprobs):
        _reject(name, "must hold as many logprobs as top ids")
    return row


def _tuple(check: Check) -> Check:
    return lambda value, name: tuple(check(value, name))


def _optional(check: Check) -> Check:
    return lambda value, name: None if value is None else check(value, name)


_Ids = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...]


def _prompt_token_ids(value: Any, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return msgspec.convert(value, _Ids)
    except msgspec.ValidationError:  # numbers written as floats, or worse
        return tuple(_list(_token_id, 1, MAX_TOKENS)(value, name))


_CHECKS: dict[str, Check] = {
    "remote_engine_id": _text(1, 128),
    "remote_request_id": _text(1, 1024),
    "remote_block_ids": _tuple(_list(_integer(0, 1 << 32), 1, MAX_TOKENS)),
    "remote_host": _text(1, 255),
    "remote_port": _integer(1, 65535),
    "tp_size": _integer(1, 4096),
    "lease_id": _hex(32),
    "lease_s": _number(0.001, 86400.0),
    "incarnation": _text(1, 128),
    "remote_num_tokens": _integer(1, MAX_TOKENS),
    "remote_block_size": _integer(1, 256),
    "remote_cached_tokens": _integer(0, MAX_TOKENS),
    "prompt_digest": _hex(64),
    "sampling_digest": _hex(64),
    "seed": _big_integer(0, 2**63 - 1),
    "first_tokens": _tuple(_list(_first_token, 1, MAX_CHOICES)),
    "prompt_logprobs": _prompt_logprobs,
    "text_digest": _optional(_hex(64)),
    "prompt_token_ids": _prompt_token_ids,
    "signature": _hex(64),
}


def _check_together(params: KVTransferParams) -> None:
    ids, tokens = params.remote_block_ids, params.remote_num_tokens
    needed = -(-tokens // params.remote_block_size)
    if len(ids) != needed:
        _reject(
            "remote_block_ids",
            f"holds {len(ids)} blocks, but {tokens} tokens in blocks of "
            f"{params.remote_block_size} need {needed}",
        )
    if len(set(ids)) != len(ids):
        _reject("remote_block_ids", "names a block twice")
    if params.prompt_logprobs is not None and len(params.prompt_logprobs) != tokens:
        _reject("prompt_logprobs", f"must hold an item for each of {tokens} tokens")
    if params.prompt_token_ids is not None and len(params.prompt_token_ids) != tokens:
        _reject("prompt_token_ids", f"must hold {tokens} ids")
    if params.remote_cached_tokens > tokens:
        _reject("remote_cached_tokens", f"exceeds remote_num_tokens, {tokens}")
