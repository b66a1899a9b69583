"""Sends HTTP requests to a Baton process, by default one on this machine.

`baton health` checks /health at BATON_HOST and BATON_PORT, over TLS if BATON_TLS_CERT
is set. It imports little, because containers run it every few seconds.
"""

import argparse
import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

TIMEOUT_S = 2.0
LOOPBACK = "127.0.0.1"
# Opens URLs of this machine. An HTTP proxy set in the environment (http_proxy) could
# not reach the loopback address, so it is bypassed. TLS certificates are issued for the
# public name of this machine, so they are not verified here.
direct = urllib.request.build_opener(
    urllib.request.ProxyHandler({}),
    urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
)


def url_host(host: str) -> str:
    """Returns the host part of URLs by which this machine reaches a local process.

    Args:
        host: The address that the process listens on. For 0.0.0.0, for example, the
            result is 127.0.0.1.
    """
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def get(url: str, timeout_s: float, key: str | None = None) -> bytes:
    """Sends a GET and returns the body of the response.

    Args:
        key: The API key, if the server needs one.

    Raises:
        OSError: The request fails (see `fetch`), or the status is 400 or above. The
            message names the URL.
    """
    try:
        status, body = fetch(url, timeout_s, key)
    except OSError as error:
        raise OSError(f"{url}: {error}") from error
    if status >= 400:
        raise OSError(f"{url}: HTTP status {status}")
    return body


def fetch(
    url: str,
    timeout_s: float,
    key: str | None = None,
    *,
    body: bytes | None = None,
    opener: urllib.request.OpenerDirector = direct,
) -> tuple[int, bytes]:
    """Sends a GET, or a POST if `body` is given.

    Args:
        opener: Opens the URL; by default without a check of certificates.

    Returns:
        The status and the body of the response.

    Raises:
        OSError: No server responds, or its response is not HTTP or is incomplete.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["content-type"] = "application/json"
    request = urllib.request.Request(url, headers=headers, data=body)
    try:
        try:
            response = opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            response = error  # a response with a status of 400 or above
        with response:
            return int(response.status), bytes(response.read())
    except http.client.HTTPException as error:
        raise OSError(f"the response is not complete HTTP: {error!r}") from error


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of `baton health`, which has no options."""
    return argparse.ArgumentParser(
        prog="baton health",
        description="Ends with 0 if GET /health of the process at BATON_HOST and "
        "BATON_PORT (default: 127.0.0.1 and 8000) returns 200, else with 1.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Checks /health. Returns the exit status: 0 if the server is healthy, else 1."""
    make_parser().parse_args(argv)
    host = url_host(os.environ.get("BATON_HOST", LOOPBACK))
    scheme = "https" if os.environ.get("BATON_TLS_CERT") else "http"
    url = f"{scheme}://{host}:{os.environ.get('BATON_PORT', '8000')}/health"
    try:
        get(url, TIMEOUT_S)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
