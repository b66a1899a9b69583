"""Members that a file or a DNS name tells, looked at again and again, off the event loop.

A look that fails changes nothing: a bad file keeps the last good state, a name that cannot be
looked up its last answer, for `STALE_S`.
"""

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from protocol.process.logging import get_logger
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
        raise BadFile(f"unknown key {short_repr(unknown[0])}; use {' and '.join(kinds)}")
    return {Kind(key): _urls(key, value) for key, value in found.items()}


def _urls(key: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(url, str) for url in value):
        raise BadFile(f"{key} is {short_repr(value)}; it must be a list of URLs, perhaps []")
    if len(value) > MAX_SERVERS:
        raise BadFile(f"{key} has {len(value)} URLs, {MAX_SERVERS} are the most")
    try:
        return [base_url(url) for url in value]
    except ValueError as error:
        raise BadFile(f"{key}: {error}") from None


async def resolve(name: str, port: int) -> list[str]:
    """All addresses of a name, looked up in a thread. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
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
        given = {Kind.PREFILL: settings.prefill, Kind.DECODE: settings.decode}
        is_name = {url: url.startswith(DNS_SCHEME) for urls in given.values() for url in urls}
        self._names = [(kind, url) for kind, urls in given.items() for url in urls if is_name[url]]
        listed = {kind: [url for url in urls if not is_name[url]] for kind, urls in given.items()}
        fleet.name_members(LISTED, listed)
        self._problem: dict[str, str] = {}  # what was told of a source that failed
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        looks = [self._names_look(kind, url, self._clock()) for kind, url in self._names]
        if self._file is not None:
            looks.append(self._file_looks(self._file))
        self._tasks = [asyncio.create_task(look) for look in looks]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _file_looks(self, name: str) -> None:
        seen: object = None
        while True:
            try:
                if (stamp := await asyncio.to_thread(_stamp, name)) != seen:
                    self._fleet.name_members(name, await asyncio.to_thread(read_servers, name))
                    seen = stamp
                self._told(name, "")
            except BadFile as error:
                self._told(name, f"--servers-file {name}: {error}; the servers stay as they are")
            await self._pause()

    async def _names_look(self, kind: Kind, url: str, known_at: float) -> None:
        plain = url.removeprefix(DNS_SCHEME)
        parts, source = urlsplit(plain), f"{kind.value} {url}"
        port = parts.port or 80
        while True:
            try:
                async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                    found = await self._resolve(parts.hostname or "", port)
                addresses = sorted(set(found))[:MAX_SERVERS]
                hosts = [f"[{each}]" if ":" in each else each for each in addresses]
                self._fleet.name_members(source, {kind: [f"http://{h}:{port}" for h in hosts]})
                known_at = self._clock()
                self._told(source, "")
            except (OSError, UnicodeError) as error:  # TimeoutError is one
                why = f"cannot be looked up: {error or 'no answer'}"
                if self._clock() - known_at > STALE_S:
                    self._fleet.name_members(source, {})
                    why += f"; its last answer, older than {STALE_S:g} s, is forgotten"
                self._told(source, f"--{kind.value} {url} {why}")
            await self._pause()

    def _told(self, source: str, problem: str) -> None:
        """Logs what is wrong with a source, once."""
        before = self._problem.get(source, "")
        self._problem[source] = problem
        if problem and problem != before:
            logger.warning("%s", problem)
        elif before and not problem:
            logger.info("%s is well again", source)

    async def _pause(self) -> None:
        await asyncio.sleep(self._interval_s * random.uniform(1 - JITTER, 1 + JITTER))


def _stamp(name: str) -> object:
    """What changes with a file's content."""
    try:
        found = Path(name).stat()
    except OSError as error:
        raise BadFile(error.strerror or str(error)) from None
    return found.st_mtime_ns, found.st_size, found.st_ino
