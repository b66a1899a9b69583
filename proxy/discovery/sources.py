"""Finds the members that a file or DNS names list, periodically, off the event loop.

If the file becomes invalid, the servers of its last valid version stay members. If a
name cannot be looked up, its last addresses stay members for STALE_S.
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
# Limit for each DNS name and for each key of the file. Further addresses of a name are
# ignored. A file that lists more servers is refused.
MAX_SERVERS = 1024
STALE_S = 300.0  # the last addresses of a DNS name stay valid for this long
LOOKUP_TIMEOUT_S = 10.0
JITTER = 0.2  # share of the interval, so that proxies do not check all at once

Urls = dict[Kind, list[str]]
# The URLs that a source lists, and a description of a problem. The URLs are None if the
# members of the source are to stay as they are. Without a problem, the text is "".
CheckResult = tuple[Urls | None, str]
Check = Callable[[], Awaitable[CheckResult]]
Resolve = Callable[[str, int], Awaitable[list[str]]]


class BadFile(ValueError):
    """A file of servers is invalid; the message says why."""


def read_servers(path: str) -> Urls:
    """Return the URLs that a file lists under the keys `prefill` and `decode`.

    Args:
        path: a file in YAML or JSON.

    Raises:
        BadFile: the file cannot be read, or its content is invalid.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        content = yaml.load(text.decode(), UniqueKeys)
    except OSError as error:
        raise BadFile(error.strerror or str(error)) from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise BadFile(f"not YAML: {' '.join(str(error).split())}") from None
    kinds = [kind.value for kind in Kind]
    if len(text) > MAX_FILE_BYTES:
        raise BadFile(f"it is longer than {MAX_FILE_BYTES} bytes")
    # An empty file is refused, because another process may be about to write it.
    if not isinstance(content, dict) or not content:
        raise BadFile("it must have `prefill: [URL, ..]` and `decode: [URL, ..]`")
    unknown = [key for key in content if key not in kinds]
    if unknown:
        raise BadFile(
            f"unknown key {short_repr(unknown[0])}; use {' and '.join(kinds)}"
        )
    return {Kind(key): _urls(key, value) for key, value in content.items()}


def _urls(key: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(url, str) for url in value):
        raise BadFile(
            f"{key} is {short_repr(value)}; it must be a list of URLs, which may be []"
        )
    if len(value) > MAX_SERVERS:
        raise BadFile(f"{key} has {len(value)} URLs, the limit is {MAX_SERVERS}")
    try:
        return [base_url(url) for url in value]
    except ValueError as error:
        raise BadFile(f"{key}: {error}") from None


async def resolve(name: str, port: int) -> list[str]:
    """Return all addresses of a name, looked up in a thread. Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(
        name, port, type=socket.SOCK_STREAM
    )
    return [str(address[0]) for *_, address in infos]


class Discovery:
    """Keeps a fleet in line with the command line, the file and the DNS names.

    Args:
        resolve: returns all addresses of a name, or raises OSError.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: ProxySettings,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._resolve = resolve
        self._clock = clock
        self._interval_s = settings.discovery_interval_s
        self._file = settings.servers_file
        self._file_stamp: object = None  # identifies the file's version that was read
        self._listed: Urls = {}
        # When each DNS name was last looked up successfully.
        self._resolved_at: dict[tuple[Kind, str], float] = {}
        urls = {Kind.PREFILL: settings.prefill, Kind.DECODE: settings.decode}
        for kind in Kind:
            self._listed[kind] = []
            for url in urls[kind]:
                if url.startswith(DNS_SCHEME):
                    self._resolved_at[kind, url] = clock()
                else:
                    self._listed[kind].append(url)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._fleet.name_members(LISTED, self._listed)
        checks: dict[str, Check] = {}
        for kind, url in self._resolved_at:
            checks[f"{kind.value} {url}"] = partial(self._look_up, kind, url)
        if self._file is not None:
            checks[self._file] = partial(
                asyncio.to_thread, self._check_file, self._file
            )
        for source, check in checks.items():
            self._tasks.append(asyncio.create_task(self._follow(source, check)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, source: str, check: Check) -> None:
        """Check a source periodically, and update its members."""
        last_problem = ""
        while True:
            try:
                urls, problem = await check()
                if urls is not None:
                    self._fleet.name_members(source, urls)
            except Exception:  # a bug must not end the checks of a source
                logger.exception("the check of %s failed", source)
                problem = last_problem
            if problem and problem != last_problem:
                logger.warning("%s", problem)
            elif last_problem and not problem:
                logger.info("%s is usable again", source)
            last_problem = problem
            jitter = random.uniform(1 - JITTER, 1 + JITTER)
            await asyncio.sleep(self._interval_s * jitter)

    def _check_file(self, name: str) -> CheckResult:
        try:
            status = Path(name).stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            urls = read_servers(name) if stamp != self._file_stamp else None
            self._file_stamp = stamp
        except (OSError, BadFile) as error:
            return None, f"--servers-file {name}: {error}; the servers stay as they are"
        return urls, ""

    async def _look_up(self, kind: Kind, url: str) -> CheckResult:
        parts = urlsplit(url.removeprefix(DNS_SCHEME))
        host = parts.hostname or ""
        port = parts.port or 80
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            reason = error or "no answer"
            problem = f"--{kind.value} {url} cannot be looked up: {reason}"
            if self._clock() - self._resolved_at[kind, url] <= STALE_S:
                return None, problem
            return {}, (
                f"{problem}; its last addresses, older than {STALE_S:g} s, are dropped"
            )
        self._resolved_at[kind, url] = self._clock()
        unique = sorted(set(addresses))[:MAX_SERVERS]
        return {kind: [http_url(address, port) for address in unique]}, ""
