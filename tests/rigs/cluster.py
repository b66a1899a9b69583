"""Real servers as processes, for end-to-end tests. The processes end with the test,
even if the test fails.
"""

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from protocol.process import lifecycle
from tests import stopping
from tests.rigs.metric import without_model
from tests.rigs.plain_http import http

START_TIMEOUT_S = 180.0
SECRET = "a secret of the tests' cluster"


@dataclass
class Server:
    """One running program and the address on which it listens."""

    name: str
    child: lifecycle.Child
    port: int
    info: dict[str, Any]
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def kill(self) -> None:
        """Send SIGKILL to the program. Its engine processes detect this and exit."""
        self.child.signal(signal.SIGKILL)
        assert self.child.exited.wait(30)

    def engine_pids(self) -> list[int]:
        """Return the pids of the program's child processes, which are its engine's
        ranks.
        """
        path = Path(f"/proc/{self.child.pid}/task")
        tasks = [task / "children" for task in path.iterdir()]
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    def signal_engine(self, number: int) -> None:
        for pid in self.engine_pids():
            stopping.send(pid, number)

    def free_blocks(self) -> float:
        """Return the number of blocks that no request uses: free or in the prefix
        cache.
        """
        metrics = self.metrics()
        states = ("free", "cached")
        return sum(metrics[f'baton_kv_blocks{{state="{state}"}}'] for state in states)

    def all_blocks_free(self) -> bool:
        return self.free_blocks() == self.metrics()["baton_kv_blocks_capacity"]

    def leases(self, event: str) -> float:
        return self.metrics()[f'baton_leases_total{{event="{event}"}}']

    def stop(self) -> int:
        lifecycle.terminate([self.child], 20)
        return self.child.process.returncode

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics by name and labels, as written in /metrics.

        The label model_name, which all metrics of a server have, is removed.
        """
        text = without_model(http.get(f"{self.url}/metrics", timeout=10).text)
        samples = (
            line.rsplit(" ", 1)
            for line in text.splitlines()
            if not line.startswith("#")
        )
        return {name: float(value) for name, value in samples}


def start(
    module: str,
    *argv: str,
    name: str | None = None,
    wrapper: Sequence[str] = (),
    **env: str,
) -> Server:
    """Start `python -m module argv` and wait until it reports that it is ready.

    Args:
        wrapper: a command such as `unshare`, which gets the program's command line as
            its last arguments and runs it.

    Raises:
        AssertionError: the program ended or was not ready in time.
    """
    events: queue.Queue[lifecycle.Event] = queue.Queue()
    name = name or module
    variables = {"BATON_CLUSTER_SECRET": SECRET, "OMP_NUM_THREADS": "1", **env}
    child = lifecycle.spawn(
        [*wrapper, sys.executable, "-m", module, *argv],
        name=name,
        env=variables,
        on_event=events.put,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            event = events.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            child.kill()
            raise AssertionError(
                f"{name} was not ready within {START_TIMEOUT_S} s"
            ) from None
        if event.kind == "ready":
            return Server(name, child, int(event.value["port"]), event.value)
        if event.kind == "exited":
            raise AssertionError(f"{name} ended at start: {child.reason()}")


@dataclass
class Cluster:
    """A proxy in front of prefill and decode servers."""

    prefill: list[Server]
    decode: list[Server]
    proxy: Server
    model: Path

    @property
    def url(self) -> str:
        return self.proxy.url

    def servers(self) -> list[Server]:
        return [self.proxy, *self.prefill, *self.decode]

    def wait_until_ready(self, name: str) -> None:
        """Wait until the proxy reports that a server such as "decode-0" is ready."""
        wait_until(
            lambda: http.get(f"{self.url}/ready", timeout=10).json()["servers"][name]
        )


ENGINE_ARGV = (
    *("--port", "0", "--device", "cpu", "--threads", "1"),
    *("--served-model-name", "test-model", "--kv-cache-tokens", "8192"),
)


def start_prefill(model: Path, *argv: str, **env: str) -> Server:
    return start("prefill_server", "--model", str(model), *ENGINE_ARGV, *argv, **env)


def prefill_ports(port: int, side_channel_port: int) -> tuple[str, ...]:
    return ("--port", str(port), "--side-channel-port", str(side_channel_port))


def start_decode(model: Path, *argv: str, **env: str) -> Server:
    return start("decode_server", "--model", str(model), *ENGINE_ARGV, *argv, **env)


def start_proxy(
    prefill: Sequence[Server], decode: Sequence[Server], *argv: str
) -> Server:
    urls = []
    for server in prefill:
        urls += ["--prefill", server.url]
    for server in decode:
        urls += ["--decode", server.url]
    proxy = start("proxy", "--port", "0", "--health-interval-s", "0.2", *urls, *argv)
    # The proxy reports that it is ready before it has checked the servers' health.
    wait_until(lambda: all_ready(proxy))
    return proxy


def all_ready(proxy: Server) -> bool:
    """Whether the proxy reports that each of its servers is ready."""
    return all(http.get(f"{proxy.url}/ready", timeout=10).json()["servers"].values())


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """End the servers when the block ends, also after an error."""
    try:
        yield
    finally:
        lifecycle.terminate([server.child for server in servers], 20)


@contextlib.contextmanager
def started(*starts: Callable[[], Server]) -> Iterator[list[Server]]:
    """Start servers in parallel, and end them when the block ends."""
    with ThreadPoolExecutor(len(starts)) as pool:
        futures = [pool.submit(start) for start in starts]
    with running(*(future.result() for future in futures if not future.exception())):
        yield [future.result() for future in futures]


@contextlib.contextmanager
def cluster(
    model: Path,
    *,
    prefill_argv: Sequence[str] = (),
    decode_argv: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Start one prefill server, one decode server and a proxy."""
    prefill_start = partial(start_prefill, model, *prefill_argv, **env or {})
    decode_start = partial(start_decode, model, *decode_argv, **env or {})
    with started(prefill_start, decode_start) as (prefill, decode):
        proxy = start_proxy([prefill], [decode])
        with running(proxy):
            yield Cluster([prefill], [decode], proxy, model)


def assert_idle(*servers: Server, timeout_s: float = 30.0) -> None:
    """Wait until every block of each server is free or cached and no request is
    left.
    """
    for server in servers:
        wait_until(server.all_blocks_free, timeout_s)
        metrics = server.metrics()
        for name in ("running", "waiting", "receiving"):
            assert metrics[f"baton_requests_{name}"] == 0


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    """Poll until `condition()` is true.

    Raises:
        AssertionError: the condition did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        os.sched_yield()
        time.sleep(0.02)
