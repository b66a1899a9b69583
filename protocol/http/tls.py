"""TLS for a process that listens or calls."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, NoReturn

from protocol.process.logging import get_logger
from protocol.settings.options import AccessOptions

logger = get_logger(__name__)

RENEW_INTERVAL_S = 60.0
_trusted: dict[str, ssl.SSLContext] = {}  # by file; whoever connects has one of these


class Certificate:
    """What a process serves HTTPS with; nothing, and plain HTTP, without --tls-cert.

    Raises:
        ValueError: a file cannot be used; names it and the fix.
    """

    def __init__(self, options: AccessOptions) -> None:
        self._files = [file for file in (options.tls_cert, options.tls_key) if file]
        self._ca_file = options.tls_ca
        self._newest = _load(*self._files) if self._files else None
        self.scheme = "https" if self._files else "http"

    def for_uvicorn(self) -> dict[str, Any]:
        """Arguments of uvicorn.Config."""
        if (first := self._newest) is None:
            return {}

        def choose(
            connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext
        ) -> None:
            connection.context = self._newest or first

        first.sni_callback = choose  # called at every handshake, with a name or without
        return {"ssl_context_factory": lambda *_: first}

    async def keep_new(self, interval_s: float = RENEW_INTERVAL_S) -> None:
        """New connections get what is in the files by then, --tls-ca's too, unless it is wrong."""
        while self._files or self._ca_file:
            await asyncio.sleep(interval_s)
            await _renewed(trusted, self._ca_file)
            self._newest = await _renewed(_load, *self._files) or self._newest


async def _renewed(
    load: Callable[..., ssl.SSLContext], *files: str | None
) -> ssl.SSLContext | None:
    """None where there are no files, or wrong ones, which is told in the log."""
    try:
        return await asyncio.to_thread(load, *files) if any(files) else None
    except ValueError as error:
        logger.error("what TLS uses stays as it was: %s", error)
        return None


def _load(cert: str, key: str) -> ssl.SSLContext:
    def no_password() -> NoReturn:
        raise ValueError(
            f"--tls-key {key}: is encrypted; give one that is not (openssl pkey)"
        )

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, no_password)
    except OSError as error:  # ssl's own among them
        fix = "give PEM files that can be read, a certificate and its own key"
        raise ValueError(
            f"--tls-cert {cert}, --tls-key {key}: {_why(error)}; {fix}"
        ) from None
    return context


def trusted(ca_file: str | None) -> ssl.SSLContext:
    """For connections to servers that `ca_file`, as it was at any call, or the system's store
    vouches for. Raises ValueError if it cannot be used."""
    try:
        if ca_file is None:
            return ssl.create_default_context()
        context = _trusted.setdefault(
            ca_file, ssl.create_default_context(cafile=ca_file)
        )
        context.load_verify_locations(ca_file)
        return context
    except OSError as error:
        fix = "give a PEM file of authorities"
        raise ValueError(f"--tls-ca {ca_file}: {_why(error)}; {fix}") from None


def _why(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror)
