"""`baton up`: a cluster of prefill servers, decode servers and the proxy.

`baton serve` starts complete servers instead of prefill and decode servers. `baton
warm` starts the servers of `baton up` and exits when they are ready.

    start: check the port -> start the KV store, if there is one, and the servers on
           free ports -> start the proxy -> print `ready`
    then:  restart a part that ends, until it ends too often; start and end servers for
           `baton scale`; see `deploy/cluster/`
    stop:  on Ctrl-C, SIGTERM or SIGHUP, or if the cluster cannot continue, all
           processes are terminated; a second signal kills them

Exit status: 0 if stopped on request, or if `baton warm` is done; 1 if the cluster
could not start or continue, or a process did not exit in time; 130 if a second signal
killed the processes. If the status is 1, the last line of output is the reason.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from deploy.cluster.cluster import Cluster
from deploy.cluster.places import LocalPlace, Place, PlaceError
from deploy.cluster.supervisor import ClusterFailed, StopRequested, print_line
from deploy.healthcheck import fetch, get
from protocol.ipc.wire import CannotListen, bind
from protocol.process import lifecycle
from protocol.process.log_lines import use_json_lines
from protocol.process.output import queue_standard_streams
from protocol.settings.settings import (
    LocalSettings,
    ServeSettings,
    UpSettings,
    describe,
    parse,
)
from protocol.settings.sources import unread_variables

PROBE_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 2.0
# Timeout of the request for the model's name. It is long, because a slow response must
# not stop a cluster that is ready.
MODEL_TIMEOUT_S = 60.0
KILLED_BY_USER = 130  # exit status: 128 + SIGINT


def main(argv: Sequence[str]) -> int:
    """Runs `baton up`. Returns the exit status."""
    return up(parse(UpSettings, argv, prog="baton up"), name="up")


def serve(argv: Sequence[str]) -> int:
    """Runs `baton serve`. Returns the exit status."""
    return up(parse(ServeSettings, argv, prog="baton serve"), name="serve")


def warm(argv: Sequence[str]) -> int:
    """Runs `baton warm`. Returns the exit status."""
    return up(parse(UpSettings, argv, prog="baton warm"), name="warm", only_warm=True)


def up(settings: LocalSettings, *, name: str = "up", only_warm: bool = False) -> int:
    """Runs a cluster until the user stops it or it fails. Returns the exit status.

    Args:
        name: The subcommand: up, serve or warm.
        only_warm: Stop the servers when they are ready, and start no proxy and no KV
            store. A later start uses the models that the servers have downloaded and
            the kernels that they have compiled.
    """
    wrap_line = use_json_lines(name) if settings.log_format == "json" else None

    def describe_dropped(num_lines: int) -> str:
        line = f"baton | {num_lines} lines were dropped: nothing read them in time"
        return wrap_line(line) if wrap_line else line

    queue_standard_streams(describe_dropped, wrap_line)
    try:
        if not only_warm:
            check_port(settings.host, settings.port)
        place = create_place(settings, only_warm=only_warm)
        cluster = Cluster(settings, place)
    except (ClusterFailed, PlaceError, OSError, ValueError) as error:
        return fail(name, str(error))
    supervisor = cluster.supervisor
    reason: str | None = None
    with lifecycle.stop_signals(lambda _number, count: supervisor.on_signal(count)):
        try:
            print_settings(settings)
            if not only_warm:
                cluster.start_store()
            cluster.start_servers()
            if only_warm:
                print_line("models and compiled kernels are stored for the next start")
            else:
                run_cluster(cluster)
        except StopRequested:
            print_line("stopping")
        except (ClusterFailed, OSError) as error:
            reason = str(error)
        clean = supervisor.end_all()
        place.close()
    if supervisor.killed_by_user:
        return KILLED_BY_USER
    if reason is None and not clean:
        reason = "some processes did not end in time and were killed"
    if reason is not None:
        return fail(name, reason)
    print_line("stopped")
    return 0


def fail(name: str, reason: str) -> int:
    """Prints why `baton NAME` has failed. Returns the exit status."""
    print(f"baton {name}: error: {reason}", file=sys.stderr, flush=True)
    return 1


def create_place(settings: LocalSettings, *, only_warm: bool) -> Place:
    """Returns the place where the servers run. Raises PlaceError if it is unusable."""
    if settings.on == "local":
        return LocalPlace()
    if only_warm:
        raise PlaceError(
            "--on ray: warming uses this machine alone; run `baton warm` without "
            "--on ray on each node"
        )
    if find_spec("ray") is None:
        raise PlaceError(
            "--on ray: Ray is not installed; run pip install 'baton-pd[ray]' here and "
            "on every node"
        )
    # The import is not at the top of the file, because only RayPlace needs Ray.
    from deploy.cluster.ray_place import RayPlace

    return RayPlace(settings)


def print_settings(settings: LocalSettings) -> None:
    """Prints the settings, and the BATON_* variables that this program ignores."""
    print_line(f"settings {describe(settings)}")
    for variable in unread_variables(type(settings)):
        print_line(f"variable ignored; only other Baton programs read it: {variable}")


def run_cluster(cluster: Cluster) -> None:
    """Starts the proxy in front of the servers; runs the cluster until it must end.

    When GET /ready reports that the proxy is ready, this function prints `ready` with
    the addresses and an example command.

    Raises:
        ClusterFailed: The cluster cannot start or continue.
        StopRequested: A signal has arrived.
        OSError: A server does not return the model's name; see `example`.
    """
    settings = cluster.settings
    endpoint = cluster.start_proxy()
    cluster.supervisor.wait(lambda: _describe_unready(endpoint), PROBE_INTERVAL_S)
    command = example(
        endpoint,
        cluster.server_url("decode"),
        cluster.key,
        needs_key=settings.has_keys,
    )
    print(f"{announcement(endpoint, has_page=settings.ui)}\n{command}", flush=True)
    cluster.run()


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
        # If the proxy has API keys, the list is absent: this request has no key.
        missing = json.loads(body).get("missing", [])
    except (ValueError, AttributeError):
        missing = []
    details = f" ({'; '.join(map(str, missing))})" if missing else ""
    return f"the proxy to find its servers{details}"


def announcement(endpoint: str, *, has_page: bool) -> str:
    """Returns the lines with the cluster's addresses to print when it is ready.

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


def example(
    endpoint: str, server: str, server_key: str | None, *, needs_key: bool
) -> str:
    """Returns a curl command that completes a prompt with the cluster's model.

    Args:
        endpoint: URL of the proxy.
        server: URL of a prefill or decode server, which is queried for the model's
            name.
        server_key: The API key with which `server` is queried; None: no key.
        needs_key: Whether the printed command sends the user's key, $API_KEY.

    Raises:
        OSError: `server` cannot be reached, does not respond in time, or responds with
            an error status.
    """
    models = json.loads(get(f"{server}/v1/models", MODEL_TIMEOUT_S, server_key))
    name = str(models["data"][0]["id"])
    prompt = "The capital of France is"
    body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    tls = "-k " if endpoint.startswith("https:") else ""
    bearer = '-H "Authorization: Bearer $API_KEY" ' if needs_key else ""
    return (
        f"curl {tls}{endpoint}/v1/completions {bearer}-H 'Content-Type: "
        f"application/json' -d {shlex.quote(json.dumps(body))}"
    )
