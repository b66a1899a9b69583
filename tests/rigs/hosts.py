"""Several hosts on one machine, as Linux namespaces.

Hosts share the kernel and the files, but no network, processes, IPC or shared memory.
So a server cannot map the memory of a server on another host. Root and iproute2 are
required.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.rigs.cluster import Server, start, wait_until

_NETWORK = "10.213.0"
_CLONE_NEWNET = 0x40000000
# Runs a command in new namespaces. When the first process of the namespaces ends, all
# others are killed. `sh` mounts a private /dev/shm.
_UNSHARE = (
    "unshare",
    "--ipc",
    "--pid",
    "--mount",
    "--uts",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "sh",
    "-c",
    'mount -t tmpfs none /dev/shm && exec "$@"',
    "sh",
)


def missing_requirement() -> str | None:
    """Return what this system lacks to create hosts, or None if it lacks nothing."""
    try:
        done = subprocess.run(
            [*_UNSHARE, "ip", "link"], capture_output=True, timeout=30
        )
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.decode().strip()


class Hosts:
    """Several hosts and a network that connects them, until `close`.

    Args:
        names: names of the first hosts; `add` adds others.
        folder: folder for the temporary files of the servers on these hosts.
    """

    def __init__(self, *names: str, folder: Path) -> None:
        self._folder = folder
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._addresses: dict[str, str] = {}
        self._servers: list[Server] = []
        self._numbers = itertools.count(1)
        try:
            self._hold("between")
            self._ip("between", "link", "add", "bridge", "type", "bridge")
            self._ip("between", "link", "set", "bridge", "up")
            for name in names:
                self.add(name)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        return self._addresses[name]

    def add(self, name: str) -> None:
        """Add a host to the network."""
        self._connect(name, next(self._numbers))

    def remove(self, name: str) -> None:
        """Remove a host. The host's network exists until its last process ends."""
        holder = self._holders.pop(name)
        holder.kill()
        holder.wait()

    def start(
        self, host: str, module: str, *argv: str, name: str | None = None, **env: str
    ) -> Server:
        """Start a server on a host.

        Args:
            name: name of the server; None: the name of the host.
        """
        folder = self._folder / host
        folder.mkdir(exist_ok=True)
        with self.inside(host):
            env |= {"TMPDIR": str(folder)}
            server = start(
                module,
                "--host",
                "0.0.0.0",
                *argv,
                name=name or host,
                wrapper=_UNSHARE,
                **env,
            )
        self._servers.append(server)
        return replace(server, host=self.address(host))

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Move the calling thread into a host's network until the block ends.

        Threads and processes that the thread starts in the block inherit this network.
        """
        network = f"/proc/{self._holders[name].pid}/ns/net"
        with open("/proc/self/ns/net") as outside, open(network) as inside:
            _set_network(inside.fileno())
            try:
                yield
            finally:
                _set_network(outside.fileno())

    def slow_down(self, name: str, rate: str) -> None:
        """Limit the rate at which a host sends. `rate` is in the notation of `tc`, e.g.
        "1mbit".

        Limiting the rate is more portable than delaying packets, because some kernels
        lack the queueing discipline for delays.
        """
        argv = "/usr/sbin/tc qdisc add dev eth0 root tbf".split()
        argv += ["rate", rate, "burst", "64kb", "latency", "1s"]
        with self.inside(name):
            subprocess.run(argv, check=True, capture_output=True)

    def sent_bytes(self, name: str) -> int:
        """Return the number of bytes that this host has sent to all other hosts."""
        devices = Path(f"/proc/{self._holders[name].pid}/net/dev").read_text().split()
        return int(devices[devices.index("eth0:") + 9])

    def cut(self, name: str, other: str) -> None:
        """Drop all packets between two hosts, in both directions, until `heal`.

        Both hosts see silence, as if a cable were cut. Their other connections remain.
        """
        self._filter("--insert", name, other)

    def heal(self, name: str, other: str) -> None:
        """Undo `cut`."""
        self._filter("--delete", name, other)

    def close_all_ports_but(self, name: str, *ports: str) -> None:
        """Let a host accept TCP connections only at `ports`, such as "80" or "90:99".

        Connections inside the host, and connections that the host opens, still work.
        """
        accepted = [
            ["--in-interface", "lo"],
            ["--protocol", "tcp", "!", "--syn"],
            *(["--protocol", "tcp", "--dport", port] for port in ports),
        ]
        for condition in accepted:
            self._iptables(name, "--append", "INPUT", *condition, "--jump", "ACCEPT")
        self._iptables(name, "--policy", "INPUT", "DROP")

    def drop_packets(self, name: str, other: str) -> None:
        """Drop all packets from host `name` to host `other`, until
        `stop_dropping_packets`.
        """
        self._ip(name, "route", "add", "blackhole", f"{self.address(other)}/32")

    def stop_dropping_packets(self, name: str, other: str) -> None:
        self._ip(name, "route", "del", "blackhole", f"{self.address(other)}/32")

    def close(self) -> None:
        for server in self._servers:
            if not server.child.exited.is_set():
                # SIGTERM goes to the children, because unshare does not forward it.
                for pid in server.engine_pids():
                    os.kill(pid, signal.SIGTERM)
        for server in self._servers:
            if not server.child.exited.wait(20):
                server.child.kill()
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def _filter(self, action: str, name: str, other: str) -> None:
        address = self.address(other)
        for chain, direction in (("INPUT", "--source"), ("OUTPUT", "--destination")):
            self._iptables(name, action, chain, direction, address, "--jump", "DROP")

    def _iptables(self, name: str, *argv: str) -> None:
        with self.inside(name):
            command = ["iptables", "--wait", *argv]
            subprocess.run(command, check=True, capture_output=True)

    def _connect(self, name: str, number: int) -> None:
        holder = self._hold(name)
        link = f"to-{number}"
        peer = ["peer", "name", "eth0", "netns", str(holder.pid)]
        self._ip("between", "link", "add", link, "type", "veth", *peer)
        self._ip("between", "link", "set", link, "master", "bridge", "up")
        address = f"{_NETWORK}.{number}"
        self._addresses[name] = address
        self._ip(name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip(name, "link", "set", device, "up")

    def _hold(self, name: str) -> subprocess.Popen[bytes]:
        """Start a process that keeps a network namespace alive."""
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._holders[name] = holder
        current = os.readlink("/proc/self/ns/net")
        wait_until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != current)
        return holder

    def _ip(self, name: str, *argv: str) -> None:
        with self.inside(name):
            subprocess.run(["ip", *argv], check=True, capture_output=True)


def _set_network(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
