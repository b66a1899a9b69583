"""`baton scale`: changes the number of servers of a running `baton up`.

The proxy forwards the request to its launcher (`baton up` or `baton serve`), and
returns the launcher's reports.
"""

import contextlib
import ssl
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from deploy.cluster.proxy_admin import ProxyAdmin, ProxyRefused
from protocol.settings import sources
from protocol.settings.options import ApiKey, Seconds
from protocol.settings.settings import BatonSettings, parse
from protocol.short_repr import short_repr

ROLES = ("prefill", "decode")
MAX_COUNT = 64
POLL_INTERVAL_S = 0.5


def _check_target(words: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError unless `words` are empty, or a role and a number of servers."""
    if not words:  # `main` refuses a missing target; --help needs none
        return words
    role, count = (*words, "", "")[:2]
    is_count = count.isascii() and count.isdigit() and 1 <= int(count) <= MAX_COUNT
    if len(words) != 2 or role not in ROLES or not is_count:
        raise ValueError(
            f"{short_repr(' '.join(words))} is not a role and a number; write for "
            f"example `baton scale decode 4` ({' or '.join(ROLES)}, 1 to {MAX_COUNT})"
        )
    return words


class ScaleSettings(BatonSettings):
    """Changes the number of servers of a running `baton up`.

    Servers that are no longer needed finish their requests before they end, for at most
    --drain-timeout-s of `baton up`.
    """

    positional: ClassVar[str] = "target"
    target: Annotated[sources.Listed[str], AfterValidator(_check_target)] = ()
    """role and number of the servers, such as decode 4"""
    url: sources.Url = "http://127.0.0.1:8000"
    """URL of the proxy"""
    admin_key: sources.Listed[ApiKey] = ()
    """admin key of the proxy; of several, the first is used. Prefer the variable
    BATON_ADMIN_KEY (none: the proxy has no keys, and runs on this machine)
    """
    tls_ca: str | None = Field(None, min_length=1)
    """PEM file with the certificate authorities of an https:// proxy (None: the
    authorities of the system)
    """
    timeout_s: Seconds = 1200.0
    """how long to wait until the servers are ready, or have ended (s)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Requests a number of servers, and waits until exactly that many are ready.

    Returns:
        The exit status: 0 if exactly that many are ready, 2 if the settings have no
        target, 130 after Ctrl-C, otherwise 1.
    """
    settings = parse(ScaleSettings, argv, prog="baton scale")
    if not settings.target:
        print(
            "baton scale: error: a role and a number are missing; write for example "
            "`baton scale decode 4`",
            file=sys.stderr,
        )
        return 2
    role, count = settings.target
    keys = [key.get_secret_value() for key in settings.admin_key]
    try:
        admin = ProxyAdmin(
            settings.url.rstrip("/"),
            keys[0] if keys else None,
            _opener(settings.tls_ca),
        )
        scale(admin, role, int(count), settings.timeout_s)
    except (OSError, ProxyRefused) as error:
        print(f"baton scale: error: {settings.url}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "baton scale: no longer waiting; the servers are still being changed",
            file=sys.stderr,
        )
        return 130
    return 0


def _opener(ca_file: str | None) -> urllib.request.OpenerDirector:
    """Returns an opener that checks certificates, and uses no HTTP proxy.

    Raises:
        OSError: `ca_file` cannot be used.
    """
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)),
    )


def scale(admin: ProxyAdmin, role: str, count: int, timeout_s: float) -> None:
    """Requests `count` servers of a role, and waits until exactly `count` are ready.

    Servers that are no longer needed must have ended. Prints each change of the
    servers' states.

    Raises:
        ProxyRefused: The proxy or its launcher cannot meet the request, or has not met
            it within `timeout_s`.
        OSError: The proxy does not respond to the request.
    """
    request_id = admin.scale(role, count)
    deadline = time.monotonic() + timeout_s
    printed = ""
    while True:
        report: Mapping[str, Any] = {}
        with contextlib.suppress(OSError):  # the proxy may be restarting
            report = admin.cluster()
        if report.get("id") == request_id:
            if report.get("problem"):
                raise ProxyRefused(report["problem"])
            parts = [part for part in report["parts"] if part["role"] == role]
            text = ", ".join(map(_describe, parts))
            if text != printed:
                print(text, flush=True)
                printed = text
            if [part["state"] for part in parts] == ["ready"] * count:
                return
        if time.monotonic() >= deadline:
            raise ProxyRefused(
                f"not done within {timeout_s:g} s (--timeout-s): "
                f"{printed or 'the launcher does not respond'}"
            )
        time.sleep(POLL_INTERVAL_S)


def _describe(part: Mapping[str, Any]) -> str:
    """Returns the name and the state of a server."""
    if part["state"] == "starting":
        return f"{part['name']} starting ({part['progress']})"
    return f"{part['name']} {part['state'].replace('_', ' ')}"
