"""`baton up`: prefill servers, decode servers and the proxy as processes of this machine; and
`baton warm`, which ends once the servers are ready.

    start: port free? -> servers on free ports, all at once -> proxy with their URLs -> `ready`
    end:   Ctrl-C, SIGTERM, or any process ended -> all end; a second Ctrl-C kills

Exit status: 0 ended on request; 1 a process failed, or had to be killed at the end; 130 killed by
a second signal. The reason of a failure is the last thing printed.
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

FIRST_NOTE_S = 1.0  # silence after which the user is told what is waited for
NOTE_INTERVAL_S = 5.0
PROBE_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 2.0
MODEL_TIMEOUT_S = 60.0  # all is up by then: a slow machine is no reason to end it
KILLED_BY_USER = 130


class ClusterFailed(Exception):
    """Why the cluster cannot start or go on, in a sentence for the user."""


class StopRequested(Exception):
    """The user asked for the end."""


def main(argv: Sequence[str]) -> int:
    return up(parse(UpSettings, argv, prog="baton up"))


def warm(argv: Sequence[str]) -> int:
    return up(parse(UpSettings, argv, prog="baton warm"), only_warm=True)


def up(settings: UpSettings, *, only_warm: bool = False) -> int:
    """Runs a local cluster until told to end. Returns the exit status.

    Args:
        only_warm: end once the servers are ready: what they make once is kept for the next start.
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
                say("what these servers need is kept: models and compiled kernels")
            else:
                cluster.serve(servers)
        except StopRequested:
            say("ending")
        except (ClusterFailed, OSError) as error:
            reason = str(error)
        # A server drains its requests, then ends its engine: each may take the grace time.
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
    """A line of the launcher's own among those of the processes."""
    print(f"baton | {text}", flush=True)


class LocalCluster:
    """The processes of `baton up`. Owned by the main thread; events come from others.

    Its methods raise ClusterFailed when a process ends, StopRequested on a signal.
    """

    def __init__(self, settings: UpSettings) -> None:
        self.settings = settings
        self.children: list[lifecycle.Child] = []
        self.killed_by_user = False
        self._starting: dict[lifecycle.Child, str] = {}  # and what it does
        self._ports: dict[lifecycle.Child, int] = {}  # of those that are ready
        # None is a stop signal. SimpleQueue: its put may interrupt its own get, as a handler does.
        self._events: queue.SimpleQueue[lifecycle.Event | None] = queue.SimpleQueue()
        # The proxy's, for the servers.
        self._key = secrets.token_hex(32) if settings.has_keys else None
        self._secret = secrets.token_hex(32)
        self._deadline = time.monotonic() + settings.start_timeout_s

    def on_signal(self, count: int) -> None:
        """The first signal asks for an end; any further one kills."""
        self._events.put(None)
        if count > 1:
            self.killed_by_user = True
            for child in self.children:
                child.kill()

    def start_servers(self) -> dict[Kind, list[str]]:
        """Starts all prefill and decode servers; returns their URLs once all are ready."""
        say(f"settings {describe(self.settings)}")
        for variable in unread_variables(type(self.settings)):
            say(f"not read here, but by other programs: {variable}")
        cores = available_cores()
        commands = server_commands(
            self.settings, secret=self._secret, cores=cores, key=self._key
        )
        urls: dict[Kind, list[str]] = {"prefill": [], "decode": []}
        for command, port in zip(commands, self._start(*commands), strict=True):
            urls[command.kind].append(f"http://{LOOPBACK}:{port}")
        return urls

    def serve(self, urls: Mapping[Kind, list[str]]) -> None:
        """Starts the proxy in front of these servers. Once a request would be disaggregated, prints
        `ready` with the addresses and a command to paste. Never returns."""
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
            self._take_event(lifecycle.SIGNAL_LOOK_S)

    def _start(self, *commands: Command) -> list[int]:
        """The ports of these processes, once all are ready."""
        children = []
        for command in commands:
            # A signal between fork and append would miss this child: it ends with us all the same.
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
        """Until nothing is missing. The user is told what is after a second, on news, and now and
        then.

        Args:
            look_s: longest time between two looks.
        """
        started = time.monotonic()
        told, due = "", started + FIRST_NOTE_S
        while what := missing():
            now = time.monotonic()
            if now >= self._deadline:
                raise ClusterFailed(
                    f"not ready in time (--start-timeout-s), waited for {what}"
                )
            if now >= due or (told and what != told):
                say(f"{now - started:.0f} s, waiting for {what}")
                told, due = what, now + NOTE_INTERVAL_S
            self._take_event(min(look_s, due - now, self._deadline - now))

    def _take_event(self, timeout_s: float) -> None:
        """Waits for an event, which is not to be the end of the cluster."""
        try:
            event = self._events.get(timeout=min(timeout_s, lifecycle.SIGNAL_LOOK_S))
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
    """Raises ClusterFailed when nobody could listen there: better known before models load."""
    try:
        bind(host, port).close()
    except CannotListen as error:
        hint = " (make serve PORT=...)" if str(error).endswith("--port") else ""
        raise ClusterFailed(f"{error}{hint}") from None


def _unready(endpoint: str) -> str:
    """What is missing until the proxy at `endpoint` is ready; empty once it is."""
    try:
        status, body = fetch(f"{endpoint}/ready", PROBE_TIMEOUT_S)
    except OSError:
        return "the proxy to answer"
    if status == 200:
        return ""
    try:
        missing = json.loads(body).get(
            "missing", []
        )  # none to a client without an admin key
    except (ValueError, AttributeError):
        missing = []
    details = f" ({'; '.join(map(str, missing))})" if missing else ""
    return f"the proxy to find its servers{details}"


def announcement(endpoint: str, *, has_page: bool) -> str:
    """The lines that say that the cluster is ready: what a person opens first, then what a program
    is configured with."""
    if not has_page:
        return f"ready {endpoint}/v1  (endpoint for OpenAI clients)"
    return (
        f"ready {endpoint}/    (page of this cluster: open it in a browser)\n"
        f"      {endpoint}/v1  (endpoint for OpenAI clients)"
    )


def example(endpoint: str, server: str, key: str | None) -> str:
    """A curl line for the model served at `endpoint`, as `server` with this API key names it."""
    models = json.loads(get(f"{server}/v1/models", MODEL_TIMEOUT_S, key))
    name = str(models["data"][0]["id"])
    prompt = "The capital of France is"
    body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    tls = "-k " if endpoint.startswith("https:") else ""
    bearer = '-H "Authorization: Bearer $API_KEY" ' if key else ""
    return (
        f"curl {tls}{endpoint}/v1/completions {bearer}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
