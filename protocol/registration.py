"""How a server tells a proxy that it is there: a record signed with the cluster secret.

A record is believed for `MAX_AGE_S` and a proxy takes none that is not newer than the last of its
server: so nobody who has seen one can use it again, or for long at another proxy.
"""

import hashlib
import hmac
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from protocol.settings.machine import WILDCARDS

REGISTER_PATH = "/register"  # of a proxy
MAX_AGE_S = 60.0
MIN_TTL_S, MAX_TTL_S = 1.0, 3600.0
_LABEL = b"baton registration\n"

Role = Literal["prefill", "decode", "both"]
_Text = Annotated[str, Meta(min_length=1, max_length=1024)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself.

    Attributes:
        kv_digest: of what its KV means; see protocol.handshake.kv_digest.
        issued_ms: since 1970, by its own clock.
        leaving: it is about to end, and wants nothing new.
    """

    role: Role
    url: _Text
    model: _Text
    kv_digest: Annotated[str, Meta(max_length=128)] = ""
    ttl_s: Annotated[float, Meta(ge=MIN_TTL_S, le=MAX_TTL_S)]
    issued_ms: int
    leaving: bool = False


class BadRecord(ValueError):
    """No record to believe; says why, and what to do."""


class _Envelope(msgspec.Struct):
    record: msgspec.Raw
    mac: str


def seal(record: Record, secret: bytes) -> bytes:
    """The body of a POST to REGISTER_PATH."""
    text = msgspec.json.encode(record)
    return msgspec.json.encode(_Envelope(msgspec.Raw(text), _mac(text, secret)))


def open_record(body: bytes, secret: bytes, now_ms: int) -> Record:
    """Raises BadRecord unless the record is well-formed, authentic and fresh."""
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
        record = msgspec.json.decode(envelope.record, type=Record)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRecord(f"it is malformed: {error}") from None
    if not hmac.compare_digest(
        envelope.mac.encode(), _mac(envelope.record, secret).encode()
    ):
        raise BadRecord(
            f"{record.url} has another cluster secret: give it and this proxy one "
            "BATON_CLUSTER_SECRET"
        )
    age_s = (now_ms - record.issued_ms) / 1000
    if abs(age_s) > MAX_AGE_S:
        raise BadRecord(
            f"the record of {record.url} is {age_s:.0f} s old by this proxy's clock, "
            f"{MAX_AGE_S:g} are the most: it is a copy, or a clock is wrong"
        )
    return record


def _mac(text: bytes | msgspec.Raw, secret: bytes) -> str:
    return hmac.digest(secret, _LABEL + bytes(text), hashlib.sha256).hex()


def http_url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_advertised(url: str) -> str:
    """`url`, unless its host is one that nobody can connect to. Raises ValueError."""
    host = urlsplit(url).hostname
    if host in WILDCARDS:
        raise ValueError(
            f"proxies cannot connect to {host}, which means every address of this machine; give "
            "--advertise-url with the name or address that they reach it at"
        )
    return url
