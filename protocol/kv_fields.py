"""The fields of `kv_transfer_params` as JSON has them: what each may be, and reading them.

Almost all references are read in one go by types equivalent to the checks here (in a tenth of the
time). What these types do not accept is checked field by field: numbers that a relay wrote as
floats, and errors, which are named.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from protocol.errors import KVParamsRejected
from protocol.messages import FirstToken, TokenLogprobs
from protocol.shown import shown

MAX_TOKENS = 1 << 24
MAX_CHOICES = 128
MAX_LOGPROBS = 1000

Check = Callable[[Any, str], Any]


@dataclass(frozen=True)
class _Typed:
    """A check, and a type that takes nothing but what it takes, with the same result."""

    check: Check
    kind: Any
    default: Any = msgspec.NODEFAULT

    def __call__(self, value: Any, name: str) -> Any:
        return self.check(value, name)


def reject(name: str, problem: str) -> NoReturn:
    param = f"kv_transfer_params.{name}" if name else "kv_transfer_params"
    raise KVParamsRejected(f"{param} {problem}.", param=param)


def as_object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        reject(name, f"must be an object, got {shown(value)}")
    return value


def optional_bool(members: dict[str, Any], name: str) -> bool:
    value = members.get(name)
    if value is not None and not isinstance(value, bool):
        reject(name, f"must be true, false or null, got {shown(value)}")
    return bool(value)


def _integer(low: int, high: int) -> _Typed:
    def check(value: Any, name: str) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # some JSON writers know floats only
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            reject(name, f"must be an integer from {low} to {high}, got {shown(value)}")
        return value

    return _Typed(check, Annotated[int, Meta(ge=low, le=high)])


def _big_integer(low: int, high: int) -> Check:
    check_range = _integer(low, high)

    def check(value: Any, name: str) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value, re.ASCII):
            value = int(value)
        return int(check_range(value, name))

    return check


def _number(low: float, high: float) -> _Typed:
    def check(value: Any, name: str) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # nan is not
            reject(name, f"must be a number from {low} to {high}, got {shown(value)}")
        return float(value)

    return _Typed(check, Annotated[float, Meta(ge=low, le=high)])


def _text(low: int, high: int) -> _Typed:
    def check(value: Any, name: str) -> str:
        if not isinstance(value, str) or not low <= len(value) <= high:
            reject(name, f"must be text of {low} to {high} characters, got {shown(value)}")
        return value

    return _Typed(check, Annotated[str, Meta(min_length=low, max_length=high)])


def _hex(digits: int) -> _Typed:
    pattern = rf"\A[0-9a-f]{{{digits}}}\Z"

    def check(value: Any, name: str) -> str:
        if not isinstance(value, str) or not re.search(pattern, value):
            reject(name, f"must be {digits} lower-case hex digits, got {shown(value)}")
        return value

    return _Typed(check, Annotated[str, Meta(pattern=pattern)])


def _list(item: Check, low: int, high: int) -> Check:
    def check(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list) or not low <= len(value) <= high:
            reject(name, f"must be a list of {low} to {high} items, got {shown(value)}")
        return [item(entry, f"{name}[{index}]") for index, entry in enumerate(value)]

    return check


_token_id = _integer(0, (1 << 31) - 1)
_logprob = _number(-1e30, 1e-3)  # rounding may lift a certain token a little above 0
_top_ids = _list(_token_id, 0, MAX_LOGPROBS)
_top_logprobs = _list(_logprob, 0, MAX_LOGPROBS)


def _first_token(value: Any, name: str) -> FirstToken:
    members = as_object(value, name)
    token_id = _token_id(members.get("id"), f"{name}.id")
    if members.get("logprobs") is None:
        return FirstToken(token_id)
    where = f"{name}.logprobs"
    report = as_object(members["logprobs"], where)
    logprobs = TokenLogprobs(
        logprob=_logprob(report.get("logprob"), f"{where}.logprob"),
        top_ids=_top_ids(report.get("top_ids") or [], f"{where}.top_ids"),
        top_logprobs=_top_logprobs(report.get("top_logprobs") or [], f"{where}.top_logprobs"),
    )
    if len(logprobs.top_ids) != len(logprobs.top_logprobs):
        reject(f"{where}.top_logprobs", "must be as long as top_ids")
    return FirstToken(token_id, logprobs)


def _first_tokens(value: Any, name: str) -> tuple[FirstToken, ...]:
    return tuple(_list(_first_token, 1, MAX_CHOICES)(value, name))


def _prompt_logprobs(value: Any, name: str) -> tuple[TokenLogprobs | None, ...] | None:
    if value is None:
        return None
    rows = _list(_prompt_row, 1, MAX_TOKENS)(value, name)
    if rows[0] is not None or None in rows[1:]:
        reject(name, "must be null for the first token and for no other")
    return tuple(rows)


def _prompt_row(value: Any, name: str) -> TokenLogprobs | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        reject(name, f"must be null or a list of 3 items, got {shown(value)}")
    row = TokenLogprobs(
        _logprob(value[0], f"{name}[0]"),
        _top_ids(value[1], f"{name}[1]"),
        _top_logprobs(value[2], f"{name}[2]"),
    )
    if len(row.top_ids) != len(row.top_logprobs):
        reject(name, "must hold as many logprobs as top ids")
    return row


def _integers(item: _Typed, low: int, high: int) -> _Typed:
    check = _list(item, low, high)
    ids: Any = tuple.__class_getitem__((item.kind, ...))
    kind = Annotated[ids, Meta(min_length=low, max_length=high)]
    return _Typed(lambda value, name: tuple(check(value, name)), kind)


def _optional(of: _Typed) -> _Typed:
    check = of.check
    return _Typed(
        lambda value, name: None if value is None else check(value, name), of.kind | None, None
    )


_CHECKS: dict[str, Check] = {
    "remote_engine_id": _text(1, 128),
    "remote_request_id": _text(1, 1024),
    "remote_block_ids": _integers(_integer(0, 1 << 32), 1, MAX_TOKENS),
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
    "first_tokens": _first_tokens,
    "prompt_logprobs": _prompt_logprobs,
    "text_digest": _optional(_hex(64)),
    "prompt_token_ids": _optional(_integers(_token_id, 1, MAX_TOKENS)),
    "signature": _hex(64),
}
_TYPED = {name: check for name, check in _CHECKS.items() if isinstance(check, _Typed)}
_OTHERS = {name: check for name, check in _CHECKS.items() if name not in _TYPED}
_Members = msgspec.defstruct(
    "_Members", [(name, typed.kind, typed.default) for name, typed in _TYPED.items()], kw_only=True
)


def read_fields(members: dict[str, Any]) -> dict[str, Any]:
    """The value of every field, those that are absent as None; further members are ignored.

    Raises:
        KVParamsRejected: one is not what it may be.
    """
    try:
        values = msgspec.structs.asdict(msgspec.convert(members, _Members))
        checks = _OTHERS
    except msgspec.ValidationError:
        values, checks = {}, _CHECKS
    for name, check in checks.items():
        values[name] = check(members.get(name), name)
    return values
