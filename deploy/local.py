"""`baton up`: a local cluster of prefill servers, decode servers and the proxy.

`baton serve` starts complete servers instead of the two kinds. `baton warm` starts the
servers of `baton up` and exits when they are ready.

    start: check the port -> start servers on free ports -> start the proxy -> `ready`
    stop:  on Ctrl-C, on SIGTERM, or if a process exits, all processes are terminated;
           a second Ctrl-C or SIGTERM kills them

Exit status: 0 if stopped on request; 1 if a process failed or did not exit in time; 130
if a second signal killed the processes. After a failure, the last line of output is the
reason.
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
from protocol.process.log_lines import use_json_lines
from protocol.process.output import queue_standard_streams
from protocol.settings.machine import available_cores
from protocol.settings.settings import (
    LocalSettings,
    ServeSettings,
    UpSettings,
    describe,
    parse,
)
from protocol.settings.sources import unread_variables

# A wait prints what it waits for after FIRST_NOTE_S, then every NOTE_INTERVAL_S.
FIRST_NOTE_S = 1.0
NOTE_INTERVAL_S = 5.0
PROBE_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 2.0
# Timeout of the request for the model's name. It is long, because a slow response must
# not stop a cluster that is ready.
MODEL_TIMEOUT_S = 60.0
KILLED_BY_USER = 130  # exit status: 128 + SIGINT


class ClusterFailed(Exception):
    """The cluster cannot start or continue. The message is for the user."""


class StopRequested(Exception):
    """The user has requested that the cluster stop."""


def main(argv: Sequence[str]) -> int:
    return up(parse(UpSettings, argv, prog="baton up"), name="up")


def serve(argv: Sequence[str]) -> int:
    return up(parse(ServeSettings, argv, prog="baton serve"), name="serve")


def warm(argv: Sequence[str]) -> int:
    return up(parse(UpSettings, argv, prog="baton warm"), name="warm", only_warm=True)


def up(settings: LocalSettings, *, name: str = "up", only_warm: bool = False) -> int:
    """Runs a local cluster until the user stops it. Returns the exit status.

    Args:
        name: The command that the user has given.
        only_warm: Stop the servers when they are ready, without starting the proxy. The
            next start uses the models that they have downloaded and the kernels that
            they have compiled.
    """
    wrap_line = use_json_lines(name) if settings.log_format == "json" else None

    def describe_dropped(num_lines: int) -> str:
        line = f"baton | {num_lines} lines were dropped: nothing read them in time"
        return wrap_line(line) if wrap_line else line

    queue_standard_streams(describe_dropped, wrap_line)
    cluster = LocalCluster(settings)
    reason: str | None = None
    with lifecycle.stop_signals(lambda _number, count: cluster.on_signal(count)):
        try:
            if not only_warm:
                check_port(settings.host, settings.port)
            servers = cluster.start_servers()
            if only_warm:
                print_line("models and compiled kernels are stored for the next start")
            else:
                cluster.serve(servers)
        except StopRequested:
            print_line("stopping")
        except (ClusterFailed, OSError) as error:
            reason = str(error)
        # A server first drains its requests, then stops its engine. Each of the two may
        # take up to the grace time.
        clean = lifecycle.terminate(cluster.children, 2 * settings.shutdown_grace_s + 1)
    if cluster.killed_by_user:
        return KILLED_BY_USER
    if reason is None and not clean:
        reason = "some processes did not end in time and were killed"
    if reason is not None:
        print(f"baton {name}: error: {reason}", file=sys.stderr, flush=True)
        return 1
    print_line("stopped")
    return 0


def print_line(text: str) -> None:
    """Prints a line of the launcher, with the prefix that marks such lines."""
    print(f"baton | {text}", flush=True)


class LocalCluster:
    """The processes of `baton up`.

    Only the main thread calls the methods. All other threads only put events into
    the queue. While a method waits, it raises ClusterFailed when a process exits, and
    StopRequested on a signal.
    """

    def __init__(self, settings: LocalSettings) -> None:
        self.settings = settings
        self.children: list[lifecycle.Child] = []
        self.killed_by_user = False
        # The processes that are not ready yet, with their last reported progress.
        self._starting: dict[lifecycle.Child, str] = {}
        # The ports of the processes that are ready.
        self._ports: dict[lifecycle.Child, int] = {}
        # None stands for a stop signal. The signal handler may call `put` while the
        # main thread is in `get`, which only SimpleQueue allows.
        self._events: queue.SimpleQueue[lifecycle.Event | None] = queue.SimpleQueue()
        # The API key with which the proxy calls the servers.
        self._key = secrets.token_hex(32) if settings.has_keys else None
        self._secret = secrets.token_hex(32)
        self._deadline = time.monotonic() + settings.start_timeout_s

    def on_signal(self, count: int) -> None:
        """Stops the cluster on the first signal, and kills it on the second.

        Args:
            count: Number of signals received so far.
        """
        self._events.put(None)
        if count > 1:
            self.killed_by_user = True
            for child in self.children:
                child.kill()

    def start_servers(self) -> dict[Kind, list[str]]:
        """Starts all prefill and decode servers, and waits until all are ready.

        Returns:
            The servers' URLs.
        """
        print_line(f"settings {describe(self.settings)}")
        for variable in unread_variables(type(self.settings)):
            print_line(
                f"variable ignored; only other Baton programs read it: {variable}"
            )
        cores = available_cores()
        commands = server_commands(
            self.settings, secret=self._secret, cores=cores, key=self._key
        )
        urls: dict[Kind, list[str]] = {"prefill": [], "decode": []}
        for command, port in zip(commands, self._start(*commands), strict=True):
            urls[command.kind].append(f"http://{LOOPBACK}:{port}")
        return urls

    def serve(self, urls: Mapping[Kind, list[str]]) -> None:
        """Starts the proxy in front of the servers; waits for a signal or a failure.

        When the proxy is ready to disaggregate requests, this method prints `ready`
        with the addresses and an example command.

        Args:
            urls: The servers' URLs, as returned by `start_servers`.

        Raises:
            ClusterFailed: A process failed or exited.
            StopRequested: A signal has arrived.
        """
        (port,) = self._start(
            proxy_command(self.settings, urls, self._secret, self._key)
        )
        scheme = "https" if self.settings.tls_cert else "http"
        endpoint = f"{scheme}://{url_host(self.settings.host)}:{port}"
        self._wait(lambda: _describe_unready(endpoint), PROBE_INTERVAL_S)
        command = example(endpoint, urls["decode"][0], self._key)
        print(
            f"{announcement(endpoint, has_page=self.settings.ui)}\n{command}",
            flush=True,
        )
        while True:
            self._take_event(lifecycle.SIGNAL_CHECK_INTERVAL_S)

    def _start(self, *commands: Command) -> list[int]:
        """Starts processes and waits until all are ready.

        Returns:
            The ports on which they listen.
        """
        children = []
        for command in commands:
            # A second signal before `append` does not kill this child, but the child
            # exits when this process exits.
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
                f"{child.name} ({progress})"
                for child, progress in self._starting.items()
            )
        )
        return [self._ports[child] for child in children]

    def _wait(
        self, missing: Callable[[], str], check_interval_s: float = NOTE_INTERVAL_S
    ) -> None:
        """Waits until `missing` returns an empty string.

        While waiting, this method processes events. It prints what is missing at
        intervals, and whenever this changes.

        Args:
            missing: Returns a description of what is missing.
            check_interval_s: Longest time between two calls of `missing`.

        Raises:
            ClusterFailed: The start timeout has passed, or a process has exited.
            StopRequested: A signal has arrived.
        """
        started = time.monotonic()
        printed = ""
        next_note_at = started + FIRST_NOTE_S
        while description := missing():
            now = time.monotonic()
            if now >= self._deadline:
                raise ClusterFailed(
                    f"not ready in time (--start-timeout-s), waited for {description}"
                )
            if now >= next_note_at or (printed and description != printed):
                print_line(f"{now - started:.0f} s, waiting for {description}")
                printed = description
                next_note_at = now + NOTE_INTERVAL_S
            self._take_event(
                min(check_interval_s, next_note_at - now, self._deadline - now)
            )

    def _take_event(self, timeout_s: float) -> None:
        """Waits for at most `timeout_s` for an event, and processes it.

        Raises:
            ClusterFailed: A process failed or exited.
            StopRequested: A signal has arrived.
        """
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
    """Raises ClusterFailed if this address cannot be bound.

    Call this before models are loaded, so that the user gets the error early.
    """
    try:
        bind(host, port).close()
    except CannotListen as error:
        hint = (
            " (with make: make serve PORT=...)" if str(error).endswith("--port") else ""
        )
        raise ClusterFailed(f"{error}{hint}") from None


def _describe_unready(endpoint: str) -> str:
    """Returns what the launcher still waits for; empty when the proxy is ready."""
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

    Args:
        endpoint: URL of the proxy.
        has_page: Whether the proxy serves a page for browsers.
    """
    if not has_page:
        return f"ready {endpoint}/v1  (endpoint for OpenAI clients)"
    return (
        f"ready {endpoint}/    (page of this cluster: open it in a browser)\n"
        f"      {endpoint}/v1  (endpoint for OpenAI clients)"
    )


def example(endpoint: str, server: str, key: str | None) -> str:
    """Returns a curl command that completes a prompt with the cluster's model.

    Args:
        endpoint: URL of the proxy.
        server: URL of a prefill or decode server, which is queried for the model's
            name.
        key: The API key with which `server` is queried. If given, the printed
            command sends the user's key, $API_KEY.

    Raises:
        OSError: `server` cannot be reached, does not respond in time, or responds with
            an error status.
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
