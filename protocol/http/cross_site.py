"""Refuses requests that a web page of another site makes in a user's browser.

A browser lets any page send certain POST requests to any server: requests with the
Content-Type of a form, with `text/plain`, or without a Content-Type. The page cannot
read the response, but the server would process the request. Before a request with
`application/json` the browser sends a preflight request, which fails unless
`--cors-origin` names the page's origin. Therefore a server refuses a request with a
Content-Type other than `application/json` if it comes from a page of another site. The
browser reports the site in headers that no page can set.
"""

from collections.abc import Mapping
from typing import Any

from protocol.errors import UnsupportedMediaType
from protocol.short_repr import short_repr

_JSON = b"application/json"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}


def is_from_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Returns whether a browser sent these headers for a page of another origin.

    Clients that are not browsers send neither `Sec-Fetch-Site` nor `Origin`.
    """
    site = headers.get(b"sec-fetch-site", b"none")
    if site == b"same-origin":
        return False
    if site != b"none":
        return True
    origin = headers.get(b"origin")
    return origin is not None and not _is_origin_of(origin, headers.get(b"host", b""))


def check_content_type(scope: Mapping[str, Any]) -> None:
    """Raises UnsupportedMediaType if a page of another site sent this request without a
    preflight request.

    GET, HEAD and OPTIONS change nothing, so they are not checked.
    """
    if scope["method"] in _SAFE_METHODS:
        return
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"")
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type == _JSON or not is_from_another_site(headers):
        return
    shown = "missing"
    if content_type:
        shown = short_repr(content_type.decode("latin-1"))
    raise UnsupportedMediaType(
        f"the header Content-Type is {shown} in a request from a page of another site; "
        "send application/json, from an origin that --cors-origin names"
    )


def _is_origin_of(origin: bytes, host: bytes) -> bool:
    scheme, _, authority = origin.lower().partition(b"://")
    default = _DEFAULT_PORTS.get(scheme, b"")
    if not authority:
        return False
    return authority.removesuffix(default) == host.lower().removesuffix(default)
