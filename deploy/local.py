"""`baton up`: a local cluster of prefill servers, decode servers and the proxy.

`baton warm` starts the same servers and ends when they are ready.

    start: check the port -> start servers on free ports -> start the proxy -> `ready`
    end:   Ctrl-C, SIGTERM, or any process ended -> all end; a second Ctrl-C kills

Exit status: 0: ended on request; 1: a process failed, or had to be killed at the end;
130: killed by a second signal. The reason of a failure is the last line of the output.
"""

import json
import queue
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from deploy.commands import Command, Kind, proxy_command, server_commands
from deploy.healthcheck import LOOPBACK, fetch, get, url_host
from protocol.ipc.wire import CannotListen, bind
from protocol.process import lifecycle
from protocol.process.output import queue_standard_streams
from protocol.settings.machine import available_cores
from protocol.settings.settings import UpSettings, describe, parse
from protocol.settings.sources import unread_variables

FIRST_NOTE_S = 1.0  # time without output after which progress is printed
NOTE_INTERVAL_S = 5.0
PROBE_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 2.0
MODEL_TIMEOUT_S = 60.0  # generous: all servers are ready, so the cluster must not fail
KILLED_BY_USER = 130


class ClusterFailed(Exception):
    """The cluster cannot start or continue. The message is for the user."""


class StopRequested(Exception):
    """The user has requested the end."""


def main(argv: Sequence[str]) -> int:
    return up(parse(UpSettings, argv, prog="baton up"))


def warm(argv: Sequence[str]) -> int:
    return up(parse(UpSettings, argv, prog="baton warm"), only_warm=True)


def up(settings: UpSettings, *, only_warm: bool = False) -> int:
    """Runs a local cluster until the user ends it. Returns the exit status.

    Args:
        only_warm: End when the servers are ready. What they have downloaded and
            compiled stays for the next start.
    """
    queue_standard_streams(
        lambda num_lines: (
            f"baton | {num_lines} lines were dropped: nothing read them in time"
        )
    )
    cluster = LocalCluster(settings)
    reason: str | None = None
    with lifecycle.stop_signals(lambda _number, count: cluster.on_signal(count)):
        try:
            if not only_warm:
                check_port(settings.host, settings.port)
            servers = cluster.start_servers()
            if only_warm:
                say("models and compiled kernels are stored for the next start")
            else:
                cluster.serve(servers)
        except StopRequested:
            say("ending")
        except (ClusterFailed, OSError) as error:
            reason = str(error)
        # A server drains its requests, then ends its engine: each may take the grace
        # time.
        clean = lifecycle.terminate(cluster.children, 2 * settings.shutdown_grace_s + 1)
    if cluster.killed_by_user:
        return KILLED_BY_USER
    if reason is None and not clean:
        reason = "some processes did not end in time and were killed"
    if reason is not None:
        name = "warm" if only_warm else "up"
        print(f"baton {name}: error: {reason}", file=sys.stderr, flush=True)
        return 1
    say("ended")
    return 0


def say(text: str) -> None:
    """Prints a line of the launcher."""
    print(f"baton | {text}", flush=True)


class LocalCluster:
    """The processes of `baton up`. The main thread owns it; other threads send events.

    Its methods raise ClusterFailed when a process ends, and StopRequested on a signal.
    """

    def __init__(self, settings: UpSettings) -> None:
        self.settings = settings
        self.children: list[lifecycle.Child] = []
        self.killed_by_user = False
        self._starting: dict[lifecycle.Child, str] = {}  # with the step of its start
        self._ports: dict[lifecycle.Child, int] = {}  # of processes that are ready
        # None is a stop signal. A signal handler may call `put` while `get` runs, which
        # SimpleQueue allows.
        self._events: queue.SimpleQueue[lifecycle.Event | None] = queue.SimpleQueue()
        # The API key of the proxy for requests to the servers.
        self._key = secrets.token_hex(32) if settings.has_keys else None
        self._secret = secrets.token_hex(32)
        self._deadline = time.monotonic() + settings.start_timeout_s

    def on_signal(self, count: int) -> None:
        """Ends the cluster on the first signal, and kills it on a further one."""
        self._events.put(None)
        if count > 1:
            self.killed_by_user = True
            for child in self.children:
                child.kill()

    def start_servers(self) -> dict[Kind, list[str]]:
        """Starts all prefill and decode servers. Returns their URLs when all are
        ready.
        """
        say(f"settings {describe(self.settings)}")
        for variable in unread_variables(type(self.settings)):
            say(f"this variable is only read by other programs: {variable}")
        cores = available_cores()
        commands = server_commands(
            self.settings, secret=self._secret, cores=cores, key=self._key
        )
        urls: dict[Kind, list[str]] = {"prefill": [], "decode": []}
        for command, port in zip(commands, self._start(*commands), strict=True):
            urls[command.kind].append(f"http://{LOOPBACK}:{port}")
        return urls

    def serve(self, urls: Mapping[Kind, list[str]]) -> None:
        """Starts the proxy in front of these servers. It returns only by an exception.

        When requests can be disaggregated, it prints `ready` with the addresses and an
        example command.
        """
        (port,) = self._start(
            proxy_command(self.settings, urls, self._secret, self._key)
        )
        scheme = "https" if self.settings.tls_cert else "http"
        endpoint = f"{scheme}://{url_host(self.settings.host)}:{port}"
        self._wait(lambda: _unready(endpoint), PROBE_INTERVAL_S)
        command = example(endpoint, urls["decode"][0], self._key)
        print(
            f"{announcement(endpoint, has_page=self.settings.ui)}\n{command}",
            flush=True,
        )
        while True:
            self._take_event(lifecycle.SIGNAL_CHECK_INTERVAL_S)

    def _start(self, *commands: Command) -> list[int]:
        """Starts processes. Returns their ports when all are ready."""
        children = []
        for command in commands:
            # A signal before `append` misses this child, but the child ends when this
            # process does.
            child = lifecycle.spawn(
                command.argv,
                name=command.name,
                env=command.env,
                on_event=self._events.put,
            )
            self.children.append(child)
            children.append(child)
        self._starting = dict.fromkeys(children, "starting")
        self._wait(
            lambda: ", ".join(
                f"{c.name} ({does})" for c, does in self._starting.items()
            )
        )
        return [self._ports[child] for child in children]

    def _wait(
        self, missing: Callable[[], str], look_s: float = NOTE_INTERVAL_S
    ) -> None:
        """Waits until nothing is missing, and prints what is, at intervals and on
        changes.

        Args:
            missing: Describes what is missing.
            look_s: Longest time between two calls of `missing`.
        """
        started = time.monotonic()
        printed = ""
        due = started + FIRST_NOTE_S
        while what := missing():
            now = time.monotonic()
            if now >= self._deadline:
                raise ClusterFailed(
                    f"not ready in time (--start-timeout-s), waited for {what}"
                )
            if now >= due or (printed and what != printed):
                say(f"{now - started:.0f} s, waiting for {what}")
                printed = what
                due = now + NOTE_INTERVAL_S
            self._take_event(min(look_s, due - now, self._deadline - now))

    def _take_event(self, timeout_s: float) -> None:
        """Processes the next event. Raises if it ends the cluster."""
        try:
            event = self._events.get(
                timeout=min(timeout_s, lifecycle.SIGNAL_CHECK_INTERVAL_S)
            )
        except queue.Empty:
            return
        match event:
            case None:
                raise StopRequested
            case lifecycle.Event(child, "failed", reason):
                raise ClusterFailed(f"{child.name}: {reason}")
            case lifecycle.Event(child, "exited"):
                raise ClusterFailed(f"{child.name} ended: {child.reason()}")
            case lifecycle.Event(child, "ready", info):
                self._ports[child] = info["port"]
                self._starting.pop(child, None)
            case lifecycle.Event(child, "progress", text) if child in self._starting:
                self._starting[child] = text


def check_port(host: str, port: int) -> None:
    """Raises ClusterFailed if no process could listen there, before models are
    loaded.
    """
    try:
        bind(host, port).close()
    except CannotListen as error:
        hint = " (make serve PORT=...)" if str(error).endswith("--port") else ""
        raise ClusterFailed(f"{error}{hint}") from None


def _unready(endpoint: str) -> str:
    """Returns what is missing until the proxy is ready; empty when it is ready."""
    try:
        status, body = fetch(f"{endpoint}/ready", PROBE_TIMEOUT_S)
    except OSError:
        return "the proxy to answer"
    if status == 200:
        return ""
    try:
        # The list is absent if the client has no admin key.
        missing = json.loads(body).get("missing", [])
    except (ValueError, AttributeError):
        missing = []
    details = f" ({'; '.join(map(str, missing))})" if missing else ""
    return f"the proxy to find its servers{details}"


def announcement(endpoint: str, *, has_page: bool) -> str:
    """Returns the lines that report that the cluster is ready.

    They have the address for a browser, and the endpoint for programs.
    """
    if not has_page:
        return f"ready {endpoint}/v1  (endpoint for OpenAI clients)"
    return (
        f"ready {endpoint}/    (page of this cluster: open it in a browser)\n"
        f"      {endpoint}/v1  (endpoint for OpenAI clients)"
    )


def example(endpoint: str, server: str, key: str | None) -> str:
    """Returns a curl command for the cluster's model.

    Args:
        server: URL of a server, which reports the name of the model.
        key: The API key for that server, if the cluster has API keys.
    """
    models = json.loads(get(f"{server}/v1/models", MODEL_TIMEOUT_S, key))
    name = str(models["data"][0]["id"])
    prompt = "The capital of France is"
    body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    tls = "-k " if endpoint.startswith("https:") else ""
    bearer = '-H "Authorization: Bearer $API_KEY" ' if key else ""
    return (
        f"curl {tls}{endpoint}/v1/completions {bearer}-H 'Content-Type: "
        f"application/json' -d {shlex.quote(json.dumps(body))}"
    )
