"""Registers this server with proxies, and deregisters it when it shuts down.

Each registration is repeated before it expires.
"""

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp
import msgspec
from yarl import URL

from protocol.http.tls import client_context
from protocol.messages import EngineReady
from protocol.process.logging import get_logger
from protocol.registration import REGISTER_PATH, Record, http_url, seal
from protocol.settings.settings import EngineSettings

logger = get_logger(__name__)

TIMEOUT_S = 5.0  # for one registration, and for one look-up of a host name
LEAVE_TIMEOUT_S = 1.0  # for deregistering from all proxies
# The pause after the first failure is twice this value. Each further failure in a row
# doubles the pause, up to the interval between successful registrations.
RETRY_S = 0.5
# Each pause is shortened by a random fraction, which is at most this number. Otherwise
# servers that started together would register at the same times.
JITTER = 0.2
MAX_ANSWER_BYTES = 2**16  # maximum number of bytes read from a proxy's response
MAX_ADDRESSES = 64  # maximum number of addresses used per host name


class Registrar:
    """Registers one server with proxies, on one event loop.

    Args:
        proxies: the proxies' URLs. A host name may resolve to several proxies.
        record: the server's record. Each registration sets `issued_ms` and `leaving`.
        secret: the cluster secret, which signs the record.
        ca_file: a file with the certificate authorities for https:// proxies; None: the
            system's certificate authorities.
    """

    def __init__(
        self,
        proxies: Sequence[str],
        record: Record,
        secret: bytes,
        ca_file: str | None = None,
    ) -> None:
        self._proxies = proxies
        self._record = record
        self._secret = secret
        self._tasks: list[asyncio.Task[None]] = []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=client_context(ca_file)),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    def start(self) -> None:
        """Register with all proxies, repeatedly until `leave` is called."""
        self._tasks = [
            asyncio.create_task(self._keep_registered(proxy)) for proxy in self._proxies
        ]

    async def leave(self) -> None:
        """Deregister from all proxies, which then send no new requests to this server.

        Gives up after LEAVE_TIMEOUT_S. Call this only once: it closes the session.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.gather(
                    *(self._register(proxy, leaving=True) for proxy in self._proxies)
                )
        except TimeoutError:
            logger.info(
                "A proxy did not confirm within %g s that this server is leaving; the "
                "proxy removes the server when its registration expires.",
                LEAVE_TIMEOUT_S,
            )
        finally:
            await self._session.close()

    async def _keep_registered(self, proxy: str) -> None:
        """Register with one proxy until cancelled. Log each change of the result."""
        interval_s = self._record.ttl_s / 3
        retry_s = RETRY_S
        last_problem: str | None = None
        while True:
            problem = await self._register(proxy)
            if problem and problem != last_problem:
                logger.warning("not registered with %s: %s; retrying", proxy, problem)
            elif last_problem != problem:
                logger.info("registered with %s as %s", proxy, self._record.url)
            last_problem = problem
            retry_s = min(2 * retry_s, interval_s) if problem else RETRY_S
            pause_s = retry_s if problem else interval_s
            await asyncio.sleep(pause_s * random.uniform(1 - JITTER, 1))

    async def _register(self, proxy: str, leaving: bool = False) -> str:
        """Send the record to all proxies that share a host name.

        Args:
            proxy: the URL with the host name.
            leaving: whether the server is shutting down and must get no new requests.

        Returns:
            "" if all proxies accepted the record. Otherwise, the reason why one of the
            proxies did not accept it.
        """
        url = URL(proxy)
        posts = [
            self._post(url.with_host(address), url, leaving)
            for address in await addresses_of(url)
        ]
        problems = await asyncio.gather(*posts)
        return next(filter(None, problems), "")

    async def _post(self, proxy: URL, named_proxy: URL, leaving: bool) -> str:
        """Send the record to one proxy.

        Args:
            proxy: the proxy's URL, with its address instead of the host name.
            named_proxy: the proxy's URL with the host name.

        Returns:
            The reason why the proxy did not accept the record; "" if it accepted.
        """
        record = msgspec.structs.replace(
            self._record, issued_ms=int(time.time() * 1000), leaving=leaving
        )
        headers = {"content-type": "application/json", "host": named_proxy.authority}
        try:
            async with self._session.post(
                proxy.with_path(named_proxy.path.rstrip("/") + REGISTER_PATH),
                data=seal(record, self._secret),
                headers=headers,
                allow_redirects=False,
                server_hostname=(
                    named_proxy.host if named_proxy.scheme == "https" else None
                ),
            ) as answer:
                body = await answer.content.read(MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            return str(error) or "no response"
        if answer.status == 200:
            return ""
        try:
            return str(msgspec.json.decode(body)["error"]["message"])
        except (msgspec.DecodeError, LookupError, TypeError):
            return (
                f"status {answer.status}; check that --register is the URL of a "
                "Baton proxy"
            )


async def addresses_of(url: URL) -> list[str]:
    """Return the addresses of a host name that several proxies share.

    Only the address family with the most addresses counts, and at most MAX_ADDRESSES
    are returned. The host name itself is returned if no family has two addresses, or
    if it cannot be resolved.
    """
    assert url.host is not None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            infos = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):  # the connection attempt reports the problem
        return [url.host]
    # A single proxy can have an IPv4 and an IPv6 address, and may listen on only one of
    # them. So only the address family with the most addresses is used.
    (family, count), *_ = Counter(info[0] for info in infos).most_common()
    if count == 1:
        return [url.host]
    addresses = [
        str(address[0])
        for address_family, *_, address in infos
        if address_family == family
    ]
    return addresses[:MAX_ADDRESSES]


def create_registrar(
    settings: EngineSettings, port: int, engine: EngineReady | None, secret: bytes
) -> Registrar:
    """Return the registrar of a server that listens on `port`.

    Args:
        engine: the engine's report about itself. It must not be None: only servers that
            are ready register.
        secret: the cluster secret.
    """
    assert engine is not None
    scheme = "https" if settings.tls_cert else "http"
    record = Record(
        role=settings.role,
        url=settings.advertise_url or http_url(settings.host, port, scheme),
        model=settings.served_model_name or settings.model,
        kv_digest=str(engine.geometry.get("kv_digest", "")),
        ttl_s=settings.register_ttl_s,
        issued_ms=0,
    )
    return Registrar(settings.register_with, record, secret, settings.tls_ca)
