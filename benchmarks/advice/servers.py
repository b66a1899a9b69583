"""Starts the servers and proxies that `baton bench advise` measures, on this host."""

import asyncio
import itertools
import json
import queue
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.advice.client import probe_url
from benchmarks.advice.deployments import Deployment, split
from benchmarks.bench.errors import BenchError
from deploy.commands import PROGRAMS, Kind
from deploy.healthcheck import LOOPBACK, fetch
from protocol.process import lifecycle

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_STOP_S = 30.0


@dataclass(frozen=True)
class ServerOptions:
    """The options with which all servers are started.

    Attributes:
        options: further options of the command line, such as --threads=1.
        devices: GPUs that are assigned to the servers round-robin; empty: servers start
            without --devices.
        start_timeout_s: time within which all servers have to be ready.
    """

    model: str
    device: str
    options: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    start_timeout_s: float = 600.0


@dataclass
class RunningServers:
    """Server processes that were started, with their URLs once they are ready.

    Attributes:
        prefills: URLs of prefill servers.
        decodes: URLs of decode servers, or of complete servers.
    """

    prefills: list[str]
    decodes: list[str]
    secret: str
    timeout_s: float
    children: list[lifecycle.Child] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        """The servers' processes, prefill servers first."""
        return [child.pid for child in self.children]


@contextmanager
def running_servers(
    options: ServerOptions, prefills: int, decodes: int
) -> Iterator[RunningServers]:
    """Start servers, wait until they are ready, and stop them when the block ends.

    Args:
        prefills: number of prefill servers; 0: start complete servers instead of decode
            servers.
        decodes: number of decode servers or complete servers.

    Raises:
        BenchError: a server ended, or was not ready in time.
    """
    servers = RunningServers([], [], secrets.token_hex(32), options.start_timeout_s)
    kinds: list[Kind] = ["prefill"] * prefills
    kinds += ["decode"] * decodes
    commands = []
    for index, kind in enumerate(kinds):
        argv = [
            *PROGRAMS[kind],
            f"--model={options.model}",
            f"--device={options.device}",
        ]
        argv += [f"--host={LOOPBACK}", "--port=0", "--log-level=warning"]
        argv += options.options
        if not prefills:
            argv.append("--role=both")
        if options.devices:
            argv.append(f"--devices={options.devices[index % len(options.devices)]}")
        commands.append((f"{kind}-{index}", argv))
    try:
        ports = _start(servers, commands)
        for kind, port in zip(kinds, ports, strict=True):
            urls = servers.prefills if kind == "prefill" else servers.decodes
            urls.append(f"http://{LOOPBACK}:{port}")
        yield servers
    finally:
        lifecycle.terminate(servers.children, _STOP_S)


class RunningProxy(NamedTuple):
    url: str
    pid: int


@contextmanager
def running_proxy(
    servers: RunningServers, deployment: Deployment
) -> Iterator[RunningProxy]:
    """Start a proxy in front of servers, and stop it when the block ends.

    Raises:
        BenchError: the proxy ended, or was not ready in time.
    """
    argv = [*PROGRAMS["proxy"], f"--host={LOOPBACK}", "--port=0", "--log-level=warning"]
    argv += [f"--routing={deployment.routing}"]
    argv += [f"--disaggregate={deployment.disaggregate}"]
    argv += [f"--prefill={url}" for url in servers.prefills]
    argv += [f"--decode={url}" for url in servers.decodes]
    if not deployment.pulls:
        argv.append("--prefix-blocks=0")
    proxy = RunningServers([], [], servers.secret, servers.timeout_s)
    try:
        (port,) = _start(proxy, [("proxy", argv)])
        url = f"http://{LOOPBACK}:{port}"
        _wait_until_ready(url, servers.timeout_s)
        yield RunningProxy(url, proxy.pids[0])
    finally:
        lifecycle.terminate(proxy.children, _STOP_S)


def connect_servers(servers: RunningServers) -> None:
    """Let each decode server pull KV from each prefill server, to connect them.

    Otherwise the first requests of a run would wait until the servers have connected,
    which takes seconds on a busy host.

    Raises:
        BenchError: a proxy was not ready, or a request failed.
    """
    for prefill, decode in itertools.product(servers.prefills, servers.decodes):
        pair = RunningServers([prefill], [decode], servers.secret, servers.timeout_s)
        with running_proxy(pair, split(1, 1, "always")) as proxy:
            asyncio.run(probe_url(proxy.url))


def _start(
    servers: RunningServers, commands: Sequence[tuple[str, Sequence[str]]]
) -> list[int]:
    """Start programs, wait until all are ready, and return their ports."""
    events: queue.SimpleQueue[lifecycle.Event] = queue.SimpleQueue()
    for name, argv in commands:
        child = lifecycle.spawn(
            argv,
            name=name,
            env={"BATON_CLUSTER_SECRET": servers.secret},
            on_event=events.put,
        )
        servers.children.append(child)
    ports: dict[lifecycle.Child, int] = {}
    deadline = time.monotonic() + servers.timeout_s
    while len(ports) < len(commands):
        try:
            event = events.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            missing = [each.name for each in servers.children if each not in ports]
            raise BenchError(
                f"{', '.join(missing)} not ready in {servers.timeout_s:g} s; give more "
                "time with --start-timeout-s"
            ) from None
        match event:
            case lifecycle.Event(child, "ready", info):
                ports[child] = int(info["port"])
            case lifecycle.Event(child, "failed", reason):
                raise BenchError(f"{child.name}: {reason}")
            case lifecycle.Event(child, "exited"):
                raise BenchError(f"{child.name} ended: {child.reason()}")
    return [ports[child] for child in servers.children]


def _wait_until_ready(url: str, timeout_s: float) -> None:
    """Wait until a proxy and all of its servers are ready.

    Raises:
        BenchError: the proxy or a server was not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            status, body = fetch(f"{url}/ready", _PROBE_TIMEOUT_S)
        except OSError:
            status, body = 0, b"{}"
        if status == 200 and all(json.loads(body).get("servers", {}).values()):
            return
        if time.monotonic() > deadline:
            raise BenchError(f"the proxy was not ready in {timeout_s:g} s")
        time.sleep(_POLL_S)
