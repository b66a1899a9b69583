"""Asking a Baton process of this machine over HTTP. As a program, whether it answers /health:

python -m deploy.healthcheck        # exit status 0 for 200; at BATON_HOST and BATON_PORT, over TLS
                                    # where BATON_TLS_CERT is set
"""

import os
import sys

# `python -m` puts the working directory first: a model.py there would hide Baton's own package.
if __name__ == "__main__" and not sys.flags.safe_path:
    if sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]

import ssl
import urllib.error
import urllib.request

TIMEOUT_S = 2.0
LOOPBACK = "127.0.0.1"
# Without the proxy of the environment's http_proxy, which could not reach this machine's loopback.
# Certificates are of the name that users call, which is not this machine's loopback.
_direct = urllib.request.build_opener(
    urllib.request.ProxyHandler({}),
    urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
)


def url_host(host: str) -> str:
    """How a client on this machine writes the address that a process listens on."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def get(url: str, timeout_s: float, key: str | None = None) -> bytes:
    """The response's body, requested with this API key.

    Raises:
        OSError: nothing answers, or the status is 400 or above.
    """
    status, body = fetch(url, timeout_s, key)
    if status >= 400:
        raise OSError(f"HTTP status {status}")
    return body


def fetch(url: str, timeout_s: float, key: str | None = None) -> tuple[int, bytes]:
    """Status and body of the response to a GET, whatever the status.

    Raises:
        OSError: nothing answers.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with _direct.open(request, timeout=timeout_s) as response:
            return response.status, bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, bytes(error.read())


def main() -> int:
    host = url_host(os.environ.get("BATON_HOST", LOOPBACK))
    scheme = "https" if os.environ.get("BATON_TLS_CERT") else "http"
    url = f"{scheme}://{host}:{os.environ.get('BATON_PORT', '8000')}/health"
    try:
        get(url, TIMEOUT_S)
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
