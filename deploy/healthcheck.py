"""Asking a Baton process of this machine over HTTP. As a program, whether it answers /health:

python -m deploy.healthcheck        # exit status 0 for 200; at BATON_HOST and BATON_PORT
"""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 2.0
LOOPBACK = "127.0.0.1"
# Without the proxy of the environment's http_proxy, which could not reach this machine's loopback.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def url_host(host: str) -> str:
    """How a client on this machine writes the address that a process listens on."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def get(url: str, timeout_s: float) -> bytes:
    """The answer's body.

    Raises:
        OSError: nothing answers, or the status is 400 or above.
    """
    try:
        with _direct.open(url, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            raise


def main() -> int:
    host = url_host(os.environ.get("BATON_HOST", LOOPBACK))
    url = f"http://{host}:{os.environ.get('BATON_PORT', '8000')}/health"
    try:
        get(url, TIMEOUT_S)
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
