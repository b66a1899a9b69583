"""Collects what servers and proxies report, and checks whether they are reachable."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from deploy.cluster_check import side_channel
from deploy.cluster_check.client import Client, NoAnswer, Reply
from protocol.handshake import EngineMetadata
from protocol.http.access import REDACTED

MAX_SERVERS = 64  # beyond this number of servers, members of proxies are not checked


@dataclass(frozen=True)
class Proxy:
    """A proxy.

    Attributes:
        problems: why the proxy is not ready or cannot be inspected.
        members: the proxy's answer about each member; empty if the proxy
            refuses to list them.
    """

    url: str
    version: str = ""
    is_ready: bool = False
    problems: tuple[str, ...] = ()
    clock_offset_s: float | None = None
    members: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Server:
    """A prefill or decode server.

    Attributes:
        name: the name that a proxy gives the server, if only this server has it;
            otherwise the server's host and port.
        problem: why the server cannot be checked; empty if it can.
        report: the body of the server's response to GET /ready; empty if there is no
            response, or if it has no details.
        channel_problem: why the server's side channel cannot be used from this host;
            empty if it can, or if it was not checked.
        metadata: the engine's metadata; None without a handshake, which needs the
            cluster secret.
    """

    url: str
    name: str
    problem: str = ""
    clock_offset_s: float | None = None
    report: dict[str, Any] = field(default_factory=dict)
    channel_problem: str = ""
    metadata: EngineMetadata | None = None

    @property
    def role(self) -> str:
        return str(self.report.get("role", ""))

    @property
    def takes_prefill_legs(self) -> bool:
        """Whether this server can compute prompts for other servers."""
        return bool(self.report.get("side_channel_port")) and not self.divides_tokens

    @property
    def divides_tokens(self) -> bool:
        """Whether ranks have different tokens of a sequence (--dcp)."""
        return bool(self.report.get("dcp", 1) != 1)


@dataclass(frozen=True)
class Facts:
    """All processes that were found.

    Attributes:
        unknown: one line for each given URL that cannot be reached, or is neither a
            proxy's nor a server's.
    """

    proxies: tuple[Proxy, ...] = ()
    servers: tuple[Server, ...] = ()
    unknown: tuple[str, ...] = ()


async def collect(
    client: Client, urls: Sequence[str], secret: bytes | None, timeout_s: float
) -> Facts:
    """Inspect the processes at these URLs, and the members of the proxies among them.

    Args:
        secret: the cluster secret, for handshakes with the servers' side channels.
        timeout_s: timeout of each handshake.
    """
    answers = await asyncio.gather(*(_ready(client, url) for url in urls))
    proxies: list[Proxy] = []
    names: dict[str, str] = {}  # names of servers, by URL
    reports: dict[str, Reply | str] = {}
    unknown: list[str] = []
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, str):
            unknown.append(f"{url} cannot be reached from here ({answer})")
        elif _is_server(answer.body):
            names[url] = urlsplit(url).netloc
            reports[url] = answer
        elif answer.body is None or "status" not in answer.body:
            unknown.append(
                f"{url} is neither a proxy nor a server of Baton (GET /ready answers "
                f"with status {answer.status})"
            )
        else:
            proxies.append(await _inspect_proxy(client, url, answer))
    for member in (each for proxy in proxies for each in proxy.members):
        if len(names) < MAX_SERVERS:
            names[str(member["url"])] = str(member["server"])
    # Two proxies may give two servers the same name.
    counts = Counter(names.values())
    for url, name in names.items():
        if counts[name] > 1:
            names[url] = urlsplit(url).netloc
    new_urls = [url for url in names if url not in reports]
    new_answers = await asyncio.gather(*(_ready(client, url) for url in new_urls))
    reports |= dict(zip(new_urls, new_answers, strict=True))
    servers = await asyncio.gather(
        *(
            _inspect_server(url, name, reports[url], secret, timeout_s)
            for url, name in names.items()
        )
    )
    return Facts(tuple(proxies), tuple(servers), tuple(unknown))


async def _ready(client: Client, url: str) -> Reply | str:
    """Return the response to GET /ready, or why there is none."""
    try:
        return await client.get(f"{url}/ready")
    except NoAnswer as error:
        return str(error)


def _is_server(body: Any) -> bool:
    """Return whether the body of GET /ready is a server's.

    The body of a proxy has `status` instead of `ready`.
    """
    return isinstance(body, dict) and "ready" in body


async def _inspect_proxy(client: Client, url: str, answer: Reply) -> Proxy:
    missing = answer.body.get("missing", [])
    problems = [str(each) for each in missing] if answer.status != 200 else []
    version = ""
    members: Iterable[dict[str, Any]] = ()
    try:
        version = str(((await client.get(f"{url}/version")).body or {}).get("version"))
        listed = await client.get(f"{url}/admin/members")
        if listed.status == 200:
            members = listed.body["members"]
        else:
            problems.append(f"its servers are not listed ({listed.error})")
    except (NoAnswer, KeyError, TypeError, AttributeError) as error:
        problems.append(f"it cannot be inspected ({error})")
    return Proxy(
        url=url,
        version=version,
        is_ready=answer.status == 200,
        problems=tuple(problems),
        clock_offset_s=answer.clock_offset_s,
        members=tuple(members),
    )


async def _inspect_server(
    url: str, name: str, answer: Reply | str, secret: bytes | None, timeout_s: float
) -> Server:
    if isinstance(answer, str):
        return Server(url, name, problem=f"it cannot be reached from here ({answer})")
    if not _is_server(answer.body):
        return Server(
            url, name, problem=f"it is no server of Baton (status {answer.status})"
        )
    offset_s = answer.clock_offset_s
    report = answer.body
    if REDACTED.items() <= report.items():
        problem = "its details need an admin key: set BATON_ADMIN_KEY to one of its own"
        return Server(url, name, problem=problem, clock_offset_s=offset_s)
    problem = ""
    if answer.status != 200:
        problem = f"it is not ready ({report.get('reason', f'status {answer.status}')})"
    metadata = None
    channel_problem = ""
    port = report.get("side_channel_port")
    host = report.get("side_channel_host") or urlsplit(url).hostname or ""
    if port and not problem:
        try:
            metadata = await side_channel.check(host, port, secret, timeout_s)
        except side_channel.SideChannelError as error:
            channel_problem = f"{host}:{port}: {error}"
    return Server(
        url=url,
        name=name,
        problem=problem,
        clock_offset_s=offset_s,
        report=report,
        channel_problem=channel_problem,
        metadata=metadata,
    )
