"""Asking a Baton process of this machine over HTTP."""

import http.client
import urllib.request

LOOPBACK = "127.0.0.1"
# Without the proxy of the environment's http_proxy, which could not reach this machine's loopback.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def url_host(host: str) -> str:
    """How a client on this machine writes the address that a process listens on."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def get(url: str, timeout_s: float) -> http.client.HTTPResponse:
    """The answer, to be closed.

    Raises:
        OSError: nothing answers, or HTTPError for a status of 400 and above.
    """
    answer = _direct.open(url, timeout=timeout_s)
    assert isinstance(answer, http.client.HTTPResponse)
    return answer
