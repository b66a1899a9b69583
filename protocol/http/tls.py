"""TLS for servers and clients."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, NoReturn

from protocol.process.logging import get_logger
from protocol.settings.server_options import AccessOptions

logger = get_logger(__name__)

RELOAD_INTERVAL_S = 60.0
# Contexts by CA file. All connections with the same CA file share one context.
_client_contexts: dict[str, ssl.SSLContext] = {}


class Certificate:
    """The certificate of a server. Without --tls-cert the server uses plain HTTP.

    Raises:
        ValueError: A file cannot be used. The message has the file and the fix.
    """

    def __init__(self, options: AccessOptions) -> None:
        self._files = [file for file in (options.tls_cert, options.tls_key) if file]
        self._ca_file = options.tls_ca
        self._newest = _load(*self._files) if self._files else None
        self.scheme = "https" if self._files else "http"

    def for_uvicorn(self) -> dict[str, Any]:
        """Returns the TLS arguments of uvicorn.Config; without TLS, none."""
        initial = self._newest
        if initial is None:
            return {}

        def use_newest(
            connection: ssl.SSLObject, _name: str | None, _initial: ssl.SSLContext
        ) -> None:
            connection.context = self._newest or initial

        # OpenSSL calls this function at every handshake, even if the client sends no
        # server name. Therefore new connections use the newest certificate.
        initial.sni_callback = use_newest
        return {"ssl_context_factory": lambda *_: initial}

    async def keep_reloading(self, interval_s: float = RELOAD_INTERVAL_S) -> None:
        """Reloads the files periodically, including --tls-ca, for new connections.

        If a file cannot be used, an error is logged, and the previous content of the
        file stays in use. The method returns immediately if there are no files.
        """
        while self._files or self._ca_file:
            await asyncio.sleep(interval_s)
            await _reload(client_context, self._ca_file)
            self._newest = await _reload(_load, *self._files) or self._newest


async def _reload(
    load: Callable[..., ssl.SSLContext], *files: str | None
) -> ssl.SSLContext | None:
    """Reads the files again and returns their context; None if there are no files.

    If a file cannot be used, an error is logged and the result is None.
    """
    try:
        return await asyncio.to_thread(load, *files) if any(files) else None
    except ValueError as error:
        logger.error("TLS still uses the previous files: %s", error)
        return None


def _load(cert: str, key: str) -> ssl.SSLContext:
    def no_password() -> NoReturn:
        raise ValueError(
            f"--tls-key {key} is encrypted; give an unencrypted key (openssl pkey)"
        )

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, no_password)
    except OSError as error:  # including ssl.SSLError
        fix = "give readable PEM files with a certificate and its key"
        raise ValueError(
            f"--tls-cert {cert}, --tls-key {key}: {_reason(error)}; {fix}"
        ) from None
    return context


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """Returns the TLS context for connections that this process opens.

    The context trusts the certificate authorities in `ca_file`, or those of the system
    if `ca_file` is None. All calls with the same file return the same context.
    Authorities that were in an earlier version of the file stay trusted.

    Raises:
        ValueError: The file cannot be used.
    """
    try:
        if ca_file is None:
            return ssl.create_default_context()
        context = _client_contexts.setdefault(
            ca_file, ssl.create_default_context(cafile=ca_file)
        )
        context.load_verify_locations(ca_file)
        return context
    except OSError as error:
        fix = "give a PEM file of certificate authorities"
        raise ValueError(f"--tls-ca {ca_file}: {_reason(error)}; {fix}") from None


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror)
