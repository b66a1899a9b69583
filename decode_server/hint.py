"""Which hints are believed: those that a holder of the cluster secret signed."""

import hmac
from typing import Annotated

import msgspec

from protocol.kv_hint import mac
from protocol.kv_params import HINT, convert, reject
from protocol.messages import KVHint


class _Signed(KVHint, frozen=True, kw_only=True):
    signature: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class _Params(msgspec.Struct):
    hint: _Signed | None = None


def hint_of(obj: object, secret: bytes) -> KVHint | None:
    """What some kv_transfer_params hint at. Raises KVParamsRejected for what is malformed, or what
    nobody of this cluster signed."""
    told = obj.get(HINT) if isinstance(obj, dict) else None
    hint = convert({HINT: told}, _Params).hint
    if hint is None:
        return None
    if not hmac.compare_digest(hint.signature, mac(hint, secret)):
        reject(f"{HINT}.signature", "does not match: only proxies of this cluster give hints")
    return KVHint(**{name: getattr(hint, name) for name in KVHint.__struct_fields__})
