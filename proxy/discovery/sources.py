"""Members that a file or a DNS name tells, looked at again and again, off the event loop.

A look that fails changes nothing: a bad file keeps the last good state, a name that cannot be
looked up its last answer, for `STALE_S`.
"""

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from protocol.process.logging import get_logger
from protocol.registration import http_url
from protocol.settings.settings import ProxySettings
from protocol.settings.sources import DNS_SCHEME, UniqueKeys, base_url
from protocol.short_repr import short_repr
from proxy.membership import LISTED, Fleet, Kind

logger = get_logger(__name__)

MAX_FILE_BYTES = 2**20
MAX_SERVERS = 1024  # of one source
STALE_S = 300.0
LOOKUP_TIMEOUT_S = 10.0
JITTER = 0.2  # of the interval, so that many proxies do not ask in step

Urls = dict[Kind, list[str]]
Found = tuple[Urls | None, str]  # None: as before; what is wrong
Look = Callable[[], Awaitable[Found]]
Resolve = Callable[[str, int], Awaitable[list[str]]]


class BadFile(ValueError):
    """Says what is wrong with a file of servers."""


def read_servers(name: str) -> Urls:
    """The servers that a file names: YAML or JSON, `prefill` and `decode`, each a list of URLs.

    Raises:
        BadFile: it cannot be read, or says anything else.
    """
    try:
        with Path(name).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        found = yaml.load(text.decode(), UniqueKeys)
    except OSError as error:
        raise BadFile(error.strerror or str(error)) from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise BadFile(f"not YAML: {' '.join(str(error).split())}") from None
    kinds = [kind.value for kind in Kind]
    if len(text) > MAX_FILE_BYTES:
        raise BadFile(f"it is longer than {MAX_FILE_BYTES} bytes")
    if not isinstance(found, dict) or not found:  # perhaps being written
        raise BadFile("it must say `prefill: [URL, ..]` and `decode: [URL, ..]`")
    if unknown := [key for key in found if key not in kinds]:
        raise BadFile(
            f"unknown key {short_repr(unknown[0])}; use {' and '.join(kinds)}"
        )
    return {Kind(key): _urls(key, value) for key, value in found.items()}


def _urls(key: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(url, str) for url in value):
        raise BadFile(
            f"{key} is {short_repr(value)}; it must be a list of URLs, perhaps []"
        )
    if len(value) > MAX_SERVERS:
        raise BadFile(f"{key} has {len(value)} URLs, {MAX_SERVERS} are the most")
    try:
        return [base_url(url) for url in value]
    except ValueError as error:
        raise BadFile(f"{key}: {error}") from None


async def resolve(name: str, port: int) -> list[str]:
    """All addresses of a name, looked up in a thread. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        name, port, type=socket.SOCK_STREAM
    )
    return [str(address[0]) for *_, address in found]


class Discovery:
    """Keeps a fleet to what its settings' command line, file and names tell.

    Args:
        resolve: gives all addresses of a name, or raises OSError.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: ProxySettings,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._resolve, self._clock = fleet, resolve, clock
        self._interval_s = settings.discovery_interval_s
        self._file = settings.servers_file
        self._seen: object = None  # of it
        given = {Kind.PREFILL: settings.prefill, Kind.DECODE: settings.decode}
        dns = DNS_SCHEME
        self._listed = {
            k: [u for u in urls if not u.startswith(dns)] for k, urls in given.items()
        }
        self._known_at = {
            (k, u): clock() for k in given for u in given[k] if u.startswith(dns)
        }
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._fleet.name_members(LISTED, self._listed)
        looks: dict[str, Look] = {}
        for kind, url in self._known_at:
            looks[f"{kind.value} {url}"] = partial(self._look_up, kind, url)
        if self._file is not None:
            looks[self._file] = partial(asyncio.to_thread, self._look_at, self._file)
        self._tasks = [
            asyncio.create_task(self._follow(*each)) for each in looks.items()
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, source: str, look: Look) -> None:
        before = ""
        while True:
            try:
                urls, problem = await look()
                if urls is not None:
                    self._fleet.name_members(source, urls)
            except Exception:  # our own bug must not leave a source unwatched
                logger.exception("what the look at %s found", source)
                problem = before
            if problem and problem != before:
                logger.warning("%s", problem)
            elif before and not problem:
                logger.info("%s is well again", source)
            before = problem
            await asyncio.sleep(
                self._interval_s * random.uniform(1 - JITTER, 1 + JITTER)
            )

    def _look_at(self, name: str) -> Found:
        try:
            found = Path(name).stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            urls = read_servers(name) if stamp != self._seen else None
            self._seen = stamp
        except (OSError, BadFile) as error:
            return None, f"--servers-file {name}: {error}; the servers stay as they are"
        return urls, ""

    async def _look_up(self, kind: Kind, url: str) -> Found:
        parts = urlsplit(url.removeprefix(DNS_SCHEME))
        host, port = parts.hostname or "", parts.port or 80
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                found = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:  # TimeoutError is one
            why = f"--{kind.value} {url} cannot be looked up: {error or 'no answer'}"
            if self._clock() - self._known_at[kind, url] <= STALE_S:
                return None, why
            return {}, f"{why}; its last answer, older than {STALE_S:g} s, is forgotten"
        self._known_at[kind, url] = self._clock()
        return {
            kind: [http_url(each, port) for each in sorted(set(found))[:MAX_SERVERS]]
        }, ""
