"""Requests that a web page of another site makes in somebody's browser.

A page may send certain POST requests anywhere without asking the server first: those whose
Content-Type is one of a form's, `text/plain`, or absent. It cannot read the answer, but the request
is served. For `application/json` a browser first asks by a preflight request, which is refused
unless `--cors-origin` names the page's origin. So a body of any other type is refused if the
browser says, in headers that no page can set, that the page is not the server's own.
"""

from collections.abc import Mapping
from typing import Any

from protocol.errors import UnsupportedMediaType
from protocol.short_repr import short_repr

_JSON = b"application/json"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}


def is_from_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sent a request with these headers for a page of another origin.

    A client that is no browser sends neither `Sec-Fetch-Site` nor `Origin`.
    """
    site = headers.get(b"sec-fetch-site", b"none")
    if site == b"same-origin":
        return False
    if site != b"none":
        return True
    origin = headers.get(b"origin")
    return origin is not None and not _is_origin_of(origin, headers.get(b"host", b""))


def check_content_type(scope: Mapping[str, Any]) -> None:
    """Raises UnsupportedMediaType if this request of ASGI changes something, comes from a page of
    another site, and could have been sent without a preflight request."""
    if scope["method"] in _SAFE_METHODS:
        return
    headers = dict(scope["headers"])
    given = headers.get(b"content-type", b"")
    if given.partition(b";")[0].strip().lower() == _JSON or not is_from_another_site(
        headers
    ):
        return
    shown = short_repr(given.decode("latin-1")) if given else "missing"
    raise UnsupportedMediaType(
        f"the header Content-Type is {shown} in a request from a page of another site; "
        "send application/json, from an origin that --cors-origin names"
    )


def _is_origin_of(origin: bytes, host: bytes) -> bool:
    scheme, _, authority = origin.lower().partition(b"://")
    default = _DEFAULT_PORTS.get(scheme, b"")
    return bool(authority) and authority.removesuffix(
        default
    ) == host.lower().removesuffix(default)
