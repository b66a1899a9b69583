"""Registration: a server announces itself to a proxy by a signed record.

The record is signed with the cluster secret and is valid for `MAX_AGE_S`. A proxy
accepts a record only if it is newer than the last record of the same server. Therefore
a copied record cannot be replayed to the same proxy. A replay to a different proxy
works only until the record is older than `MAX_AGE_S`.
"""

import hashlib
import hmac
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from protocol.settings.machine import WILDCARDS

REGISTER_PATH = "/register"  # endpoint of a proxy
# Maximum age of a record by the proxy's clock, in seconds. The age includes the
# difference between the clocks of the server and of the proxy.
MAX_AGE_S = 60.0
MIN_TTL_S, MAX_TTL_S = 1.0, 3600.0
_LABEL = b"baton registration\n"

Role = Literal["prefill", "decode", "both"]
_Text = Annotated[str, Meta(min_length=1, max_length=1024)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement of one server.

    Attributes:
        kv_digest: See kv_digest in protocol/pairing.py; empty if unknown.
        ttl_s: Seconds after this record until the registration expires, unless a newer
            record arrives.
        issued_ms: Time of signing by the server's clock, in milliseconds since 1970.
        leaving: Whether the server is shutting down, so that it must receive no new
            requests.
    """

    role: Role
    url: _Text
    model: _Text
    kv_digest: Annotated[str, Meta(max_length=128)] = ""
    ttl_s: Annotated[float, Meta(ge=MIN_TTL_S, le=MAX_TTL_S)]
    issued_ms: int
    leaving: bool = False


class BadRecord(ValueError):
    """A registration record is refused. The message has the reason."""


class _Envelope(msgspec.Struct):
    record: msgspec.Raw
    mac: str


def seal(record: Record, secret: bytes) -> bytes:
    """Signs a record, and returns the body of a POST to REGISTER_PATH."""
    text = msgspec.json.encode(record)
    return msgspec.json.encode(_Envelope(msgspec.Raw(text), _mac(text, secret)))


def open_record(body: bytes, secret: bytes, now_ms: int) -> Record:
    """Returns the record in `body`.

    The caller must check that the record is newer than the server's previous record.

    Raises:
        BadRecord: The record is malformed, not authentic, or signed more than MAX_AGE_S
            before or after `now_ms`.
    """
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
        record = msgspec.json.decode(envelope.record, type=Record)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRecord(f"the record is malformed: {error}") from None
    expected_mac = _mac(envelope.record, secret)
    if not hmac.compare_digest(envelope.mac.encode(), expected_mac.encode()):
        raise BadRecord(
            f"{record.url} has a different cluster secret: give this server and the "
            "proxy the same BATON_CLUSTER_SECRET"
        )
    age_s = (now_ms - record.issued_ms) / 1000
    if abs(age_s) > MAX_AGE_S:
        raise BadRecord(
            f"the record of {record.url} is {age_s:.0f} s old by this proxy's clock; "
            f"the maximum is {MAX_AGE_S:g} s. Either it is a copy of an old record, or "
            "the clock of the server or of the proxy is wrong"
        )
    return record


def _mac(text: bytes | msgspec.Raw, secret: bytes) -> str:
    return hmac.digest(secret, _LABEL + bytes(text), hashlib.sha256).hex()


def http_url(host: str, port: int, scheme: str = "http") -> str:
    """Returns the URL of a server. Brackets enclose an IPv6 address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_advertised(url: str) -> str:
    """Returns `url`. Raises ValueError if its host is a wildcard address."""
    host = urlsplit(url).hostname
    if host in WILDCARDS:
        raise ValueError(
            f"proxies cannot connect to {host}, which means every address of this "
            "machine; set --advertise-url to a name or an address that proxies reach"
        )
    return url
