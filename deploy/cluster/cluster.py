"""Runs the servers and the proxy of `baton up`, and keeps the proxy's members current.

The proxy starts with the URLs of all servers that have been ready. When a server has
moved to another URL, or when servers are added or removed, the launcher changes the
proxy's members through the proxy's admin API. `_update_proxy` compares the members with
the servers that run, so it can be repeated after any failure.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from deploy.cluster.places import Place, PlaceError
from deploy.cluster.proxy_admin import ProxyAdmin, ProxyRefused
from deploy.cluster.supervisor import (
    ClusterFailed,
    Part,
    State,
    Supervisor,
    print_line,
)
from deploy.commands import (
    SERVERS,
    Command,
    Kind,
    proxy_command,
    server_command,
    server_indices,
    store_command,
    uses_store,
)
from deploy.healthcheck import LOOPBACK, url_host
from protocol.settings.machine import cluster_secret, free_host_bytes, has_gpu
from protocol.settings.settings import LocalSettings

# Shortest interval between two updates of the proxy. At this interval, a failed update
# is repeated, and a draining server is checked for requests.
UPDATE_INTERVAL_S = 0.5
DRAINED = "drained"  # state of a drained member that has no more requests
MAX_SERVERS = 2 * 64  # limit for servers of one kind, including draining servers
MAX_LAST_WORDS_CHARS = 500  # limit on the reason why a part ended, in a report
_STORE_SHARE = 0.1  # default share of free memory for the KV store of GPU servers


def store_bytes(settings: LocalSettings) -> int:
    """Returns the host memory of the KV store in bytes; 0: there is no store."""
    if settings.host_kv_bytes is not None:
        return settings.host_kv_bytes
    devices = {
        group.device or settings.device for group in settings.server_groups().values()
    }
    uses_gpu = "cuda" in devices or ("auto" in devices and has_gpu())
    if settings.on != "local" or not uses_gpu:
        return 0
    return int(free_host_bytes() * _STORE_SHARE)


def _secret(settings: LocalSettings) -> str:
    """Returns the cluster secret.

    A KV store that the user has started accepts only servers with its secret.

    Raises:
        OSError: the file with this machine's secret cannot be read or created.
        ValueError: the secret in the file is too short.
    """
    groups = settings.server_groups().values()
    if settings.cluster_secret is None and not any(group.host_kv for group in groups):
        return secrets.token_hex(32)
    return cluster_secret(settings.cluster_secret).decode()


class Cluster:
    """A proxy in front of prefill and decode servers.

    Args:
        place: Where the servers run. The proxy and the KV store run on this machine.
    """

    def __init__(self, settings: LocalSettings, place: Place) -> None:
        self.settings = settings
        self._place = place
        needs_key = settings.has_keys or place.is_shared
        # The API key with which the proxy calls the servers; None: they have no keys.
        self.key = secrets.token_hex(32) if needs_key else None
        self._secret = _secret(settings)
        self.supervisor = Supervisor(
            max_restarts=settings.max_restarts,
            restart_window_s=settings.restart_window_s,
            start_timeout_s=settings.start_timeout_s,
            # A server first drains its requests, then stops its engine. Each of the two
            # may take up to the grace time.
            grace_s=2 * settings.shutdown_grace_s + 1,
            on_ready=self._on_ready,
            on_removed=self._on_removed,
            on_request=self._on_request,
        )
        # Address at which this machine's servers reach the KV store; None: no store.
        self._store_address: str | None = None
        self._proxy: Part | None = None
        self._admin: ProxyAdmin | None = None
        # When a draining server is stopped even if it has requests (monotonic seconds).
        self._drain_deadlines: dict[Part, float] = {}
        self._urls: dict[Part, str] = {}  # URLs of the parts that have been ready
        # URLs of servers that have moved or ended, to be removed from the members.
        self._former_urls: set[str] = set()
        self._is_proxy_outdated = True
        self._next_update_at = 0.0
        self._sent_report: dict[str, Any] = {}
        # Why the last update of the proxy has failed; empty if it has not.
        self._update_error = ""
        self._request_id = ""  # id of the last request of `baton scale`
        # Why that request cannot be fulfilled; empty: no problem is known.
        self._problem = ""

    # start

    def start_store(self) -> None:
        """Starts the KV store of this machine, and waits until it is ready.

        There is no store if `store_bytes` is 0 or no server can use one. If the store
        cannot start, the servers run without it.
        """
        num_bytes = store_bytes(self.settings)
        if not num_bytes or not uses_store(self.settings):
            return
        command = store_command(self.settings, num_bytes, self._secret)
        part = self.supervisor.add("kv", "kv", lambda: command, is_optional=True)
        self.supervisor.wait_until_ready(part)
        if part.state is State.READY:
            self._store_address = f"{LOOPBACK}:{part.ports['port']}"
            print_line(
                f"KV store: {num_bytes / 2**30:.1f} GiB of host memory "
                f"(--host-kv-bytes {num_bytes}) at {self._store_address}"
            )

    def start_servers(self) -> None:
        """Starts all servers, and waits until they are ready.

        Raises:
            ClusterFailed: A server cannot start, or the place cannot run the servers.
            StopRequested: A signal has arrived.
        """
        try:
            commands = [
                self._server_command(kind, index)
                for kind, index in server_indices(self.settings)
            ]
            self._place.check(commands)
        except (ValueError, PlaceError) as error:
            raise ClusterFailed(str(error)) from None
        self.supervisor.wait_until_ready(*(self._add(each) for each in commands))

    def start_proxy(self) -> str:
        """Starts the proxy, and waits until it accepts requests. Returns its URL."""
        self._proxy = self.supervisor.add("proxy", "proxy", self._proxy_command)
        self.supervisor.wait_until_ready(self._proxy)
        scheme = "https" if self.settings.tls_cert else "http"
        port = self._proxy.ports["port"]
        endpoint = f"{scheme}://{url_host(self.settings.host)}:{port}"
        key = self.key if self.settings.has_keys else None
        self._admin = ProxyAdmin(endpoint, key)
        return endpoint

    def run(self) -> None:
        """Restarts and scales the parts until a signal arrives or the cluster fails.

        Raises:
            ClusterFailed: A part that the cluster needs cannot be restarted.
            StopRequested: A signal has arrived.
        """
        while True:
            self.supervisor.take_event(UPDATE_INTERVAL_S)
            is_outdated = (
                self._is_proxy_outdated
                or bool(self._drain_deadlines)
                or self._report() != self._sent_report
            )
            if is_outdated and time.monotonic() >= self._next_update_at:
                self._update_proxy()
                self._next_update_at = time.monotonic() + UPDATE_INTERVAL_S

    def server_url(self, kind: Kind) -> str:
        """Returns the URL of the first ready server of a kind.

        If no server of the kind is ready, it is the URL of the first server.
        """
        parts = self._servers(kind)
        ready = [part for part in parts if part.state is State.READY]
        return (ready or parts)[0].url

    def _servers(self, *kinds: Kind) -> list[Part]:
        return [part for part in self.supervisor.parts if part.kind in kinds]

    def _server_command(self, kind: Kind, index: int) -> Command:
        return server_command(
            self.settings,
            kind,
            index,
            secret=self._secret,
            cores=self._place.cores,
            key=self.key,
            host=self._place.host,
            store=self._store_address,
        )

    def _add(self, command: Command, *, is_added: bool = False) -> Part:
        return self.supervisor.add(
            name=command.name,
            kind=command.kind,
            create_command=lambda: command,
            place=self._place,
            is_added=is_added,
        )

    def _proxy_command(self) -> Command:
        urls: Mapping[Kind, list[str]] = {
            kind: [part.url for part in self._servers(kind) if part.url]
            for kind in SERVERS
        }
        return proxy_command(self.settings, urls, self._secret, self.key)

    # events of the supervisor

    def _on_ready(self, part: Part) -> None:
        old_url = self._urls.get(part)
        if old_url not in (None, part.url):
            self._former_urls.add(old_url)
        self._urls[part] = part.url
        self._is_proxy_outdated = True

    def _on_removed(self, part: Part, reason: str) -> None:
        if part.kind == "kv":
            self._store_address = None
            self._urls.pop(part, None)
            print_line(f"kv ended: {reason}; the servers run without a KV store")
            return
        if reason:
            self._problem = f"{part.name} ended before it was ready: {reason}"
            print_line(self._problem)
        else:
            print_line(f"{part.name} has ended")
        self._drain_deadlines.pop(part, None)
        if part in self._urls:
            self._former_urls.add(self._urls.pop(part))
        self._is_proxy_outdated = True

    def _on_request(self, request: Mapping[str, Any]) -> None:
        self._request_id = request["id"]
        self._problem = ""
        self._is_proxy_outdated = True
        try:
            self._scale(request["role"], request["count"])
        except (ValueError, PlaceError) as error:
            self._problem = str(error)
            print_line(f"cannot scale {request['role']}: {error}")

    # scaling

    def _scale(self, kind: Kind, count: int) -> None:
        """Starts or drains servers of a kind, so that `count` servers remain.

        Servers that are not ready are drained first, then those with the highest
        numbers.

        Raises:
            ValueError: The cluster has no servers of this kind, or a server cannot get
                the devices that it needs.
            PlaceError: The servers cannot run at the cluster's place.
        """
        kinds = self.settings.server_groups()
        if kind not in kinds:
            raise ValueError(f"this cluster has {' and '.join(kinds)} servers only")
        parts = [
            part
            for part in self._servers(kind)
            if part not in self._drain_deadlines and part.state is not State.ENDING
        ]
        used_indices = {part.index for part in self._servers(kind)}
        free_indices = [
            index for index in range(MAX_SERVERS) if index not in used_indices
        ]
        num_missing = max(0, count - len(parts))
        commands = [
            self._server_command(kind, index) for index in free_indices[:num_missing]
        ]
        others = [
            self._server_command(part.kind, part.index)
            for part in self._servers(*SERVERS)
            if part not in self._drain_deadlines
        ]
        if commands:
            self._place.check([*others, *commands])
        print_line(f"scaling {kind} from {len(parts)} to {count} servers")
        for command in commands:
            self._add(command, is_added=True)
        parts.sort(key=lambda part: (part.state is not State.READY, part.index))
        drain_until = time.monotonic() + self.settings.drain_timeout_s
        for part in parts[count:]:
            print_line(f"{part.name} finishes its requests and then ends")
            part.is_leaving = True
            self._drain_deadlines[part] = drain_until

    # the proxy's members

    def _update_proxy(self) -> None:
        """Updates the proxy's members, and sends the launcher's report to the proxy.

        After a failure, `run` repeats the update.
        """
        if self._admin is None or self._proxy is None:
            return
        if self._proxy.state is not State.READY:
            return  # when the proxy starts again, its command has the current URLs
        try:
            self._update_members(self._admin)
            report = self._report()
            self._admin.report(report)
            self._sent_report = report
        except (OSError, ProxyRefused) as error:
            self._is_proxy_outdated = True
            if str(error) != self._update_error:
                print_line(f"the proxy's members are not up to date yet: {error}")
            self._update_error = str(error)
            return
        self._is_proxy_outdated = False
        self._update_error = ""

    def _update_members(self, admin: ProxyAdmin) -> None:
        members: dict[str, list[dict[str, Any]]] = {}
        for member in admin.members():
            members.setdefault(member["url"], []).append(member)
        self._former_urls -= set(self._urls.values())
        for url in self._former_urls & members.keys():
            admin.remove(url)
        self._former_urls.clear()
        for part, url in self._urls.items():
            if part.kind in SERVERS and url not in members:
                admin.add(part.kind, url)
        for part, drain_until in list(self._drain_deadlines.items()):
            states = {member["state"] for member in members.get(part.url, [])}
            is_over = states <= {DRAINED} or time.monotonic() >= drain_until
            if is_over or part.state is not State.READY:
                del self._drain_deadlines[part]
                self.supervisor.retire(part)
            elif states - {DRAINED, "draining"}:
                admin.drain(part.url)

    def _report(self) -> dict[str, Any]:
        """Returns the launcher's report, which the proxy serves at /admin/cluster."""
        parts = [
            {
                "name": part.name,
                "role": part.kind,
                "state": (
                    "draining" if part in self._drain_deadlines else part.state.value
                ),
                "progress": part.progress,
                "url": part.url,
                "restarts": part.budget.num_restarts,
                "last_words": part.last_words[:MAX_LAST_WORDS_CHARS],
            }
            for part in self.supervisor.parts
        ]
        return {"id": self._request_id, "problem": self._problem, "parts": parts}
