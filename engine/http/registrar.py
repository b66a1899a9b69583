"""Tells proxies that this server is there, again and again, and at its end that it leaves."""

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp
import msgspec
from yarl import URL

from protocol.http.tls import trusted
from protocol.messages import EngineReady
from protocol.process.logging import get_logger
from protocol.registration import REGISTER_PATH, Record, http_url, seal
from protocol.settings.settings import EngineSettings

logger = get_logger(__name__)

TIMEOUT_S = 5.0  # of one registration
LEAVE_TIMEOUT_S = 1.0  # of all proxies together
RETRY_S = 0.5  # after a failure; doubles, up to the usual interval
JITTER = 0.2  # so that servers that were started together do not speak in step
MAX_ANSWER_BYTES = 2**16
MAX_ADDRESSES = 64  # of one name


class Registrar:
    """Registers one server with proxies; use it on one event loop.

    Args:
        record: what it says of itself; the time is filled in.
        ca_file: for proxies at https://, instead of the system's.
    """

    def __init__(
        self,
        proxies: Sequence[str],
        record: Record,
        secret: bytes,
        ca_file: str | None = None,
    ) -> None:
        self._proxies, self._record, self._secret = proxies, record, secret
        self._tasks: list[asyncio.Task[None]] = []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trusted(ca_file)),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep(proxy)) for proxy in self._proxies
        ]

    async def leave(self) -> None:
        """Tells every proxy that this server takes nothing new; to be called once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.gather(
                    *(self._tell(proxy, leaving=True) for proxy in self._proxies)
                )
        except TimeoutError:
            logger.info("a proxy was not told that this server leaves: no answer")
        finally:
            await self._session.close()

    async def _keep(self, proxy: str) -> None:
        usual_s = self._record.ttl_s / 3
        retry_s, before = RETRY_S, None
        while True:
            problem = await self._tell(proxy)
            if problem and problem != before:
                logger.warning("not registered with %s: %s", proxy, problem)
            elif before != problem:
                logger.info("registered with %s as %s", proxy, self._record.url)
            before = problem
            retry_s = min(2 * retry_s, usual_s) if problem else RETRY_S
            pause_s = retry_s if problem else usual_s
            await asyncio.sleep(pause_s * random.uniform(1 - JITTER, 1))

    async def _tell(self, proxy: str, leaving: bool = False) -> str:
        """Tells whoever is behind the name. Why one did not take it; empty: all did."""
        url = URL(proxy)
        told = [
            self._post(url.with_host(at), url, leaving)
            for at in await addresses_of(url)
        ]
        return next(filter(None, await asyncio.gather(*told)), "")

    async def _post(self, proxy: URL, named: URL, leaving: bool) -> str:
        record = msgspec.structs.replace(
            self._record, issued_ms=int(time.time() * 1000), leaving=leaving
        )
        body, headers = seal(record, self._secret), {"content-type": "application/json"}
        headers["host"] = named.authority
        try:
            async with self._session.post(
                proxy.with_path(named.path.rstrip("/") + REGISTER_PATH),
                data=body,
                headers=headers,
                allow_redirects=False,
                server_hostname=named.host if named.scheme == "https" else None,
            ) as answer:
                told = await answer.content.read(MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            return str(error) or "no answer"
        if answer.status == 200:
            return ""
        try:
            return str(msgspec.json.decode(told)["error"]["message"])
        except (msgspec.DecodeError, LookupError, TypeError):
            return f"status {answer.status}; is that a Baton proxy?"


async def addresses_of(url: URL) -> list[str]:
    """Those of a name that has several, as several proxies do; else the name itself."""
    assert url.host is not None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):  # who connects says what is wrong
        return [url.host]
    # One of each family may well be one proxy, which need not listen at both.
    (family, count), *_ = Counter(each[0] for each in found).most_common()
    if count == 1:
        return [url.host]
    return [str(address[0]) for each, *_, address in found if each == family][
        :MAX_ADDRESSES
    ]


def registrar_of(
    settings: EngineSettings, port: int, engine: EngineReady | None, secret: bytes
) -> Registrar:
    """That of a server whose engine is ready, at this port."""
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
