"""Several hosts on one: namespaces that share no network, processes, IPC or shared
memory.

The kernel and the files are the same; what servers of one host can do with each other's
memory, servers in these cannot. Needs root and iproute2.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.rigs.cluster import Server, start, wait_until

_NETWORK = "10.213.0"
_CLONE_NEWNET = 0x40000000
# A process tree that ends with its first process; `sh` gives it shared memory of its
# own.
_APART = (
    *(
        "unshare",
        "--ipc",
        "--pid",
        "--mount",
        "--uts",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ),
    *("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"),
)


def why_not() -> str | None:
    """What this system lacks, if anything."""
    try:
        done = subprocess.run([*_APART, "ip", "link"], capture_output=True, timeout=30)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.decode().strip()


class Hosts:
    """Networks of their own, and one between them; `close` ends them all.

    Args:
        names: of the hosts.
        folder: for their temporary files.
    """

    def __init__(self, *names: str, folder: Path) -> None:
        self._folder = folder
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._addresses: dict[str, str] = {}
        self._servers: list[Server] = []
        try:
            self._hold("between")
            self._ip("between", "link", "add", "bridge", "type", "bridge")
            self._ip("between", "link", "set", "bridge", "up")
            for number, name in enumerate(names, 1):
                self._connect(name, number)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        return self._addresses[name]

    def start(self, name: str, module: str, *argv: str, **env: str) -> Server:
        """A server on a host."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        with self.inside(name):
            env |= {"TMPDIR": str(folder)}
            server = start(
                module, "--host", "0.0.0.0", *argv, name=name, by=_APART, **env
            )
        self._servers.append(server)
        return replace(server, host=self.address(name))

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """The calling thread, and those that it starts, are in a host's network
        meanwhile.
        """
        network = f"/proc/{self._holders[name].pid}/ns/net"
        with open("/proc/self/ns/net") as outside, open(network) as inside:
            _set_network(inside.fileno())
            try:
                yield
            finally:
                _set_network(outside.fileno())

    def slow_down(self, name: str, rate: str) -> None:
        """What a host sends is so much a second, as `tc` writes it. Not every kernel
        has a qdisc that delays.
        """
        limits = ("rate", rate, "burst", "64kb", "latency", "1s")
        with self.inside(name):
            argv = [
                "/usr/sbin/tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                *limits,
            ]
            subprocess.run(argv, check=True, capture_output=True)

    def sent_bytes(self, name: str) -> int:
        """What a host has sent to the others."""
        devices = Path(f"/proc/{self._holders[name].pid}/net/dev").read_text().split()
        return int(devices[devices.index("eth0:") + 9])

    def part(self, name: str, other: str) -> None:
        """Nothing that a host sends to another one arrives, until `rejoin`."""
        self._ip(name, "route", "add", "blackhole", f"{self.address(other)}/32")

    def rejoin(self, name: str, other: str) -> None:
        self._ip(name, "route", "del", "blackhole", f"{self.address(other)}/32")

    def close(self) -> None:
        for server in self._servers:
            if not server.child.exited.is_set():
                for pid in (
                    server.engine_pids()
                ):  # unshare's child: it hears no SIGTERM itself
                    os.kill(pid, signal.SIGTERM)
        for server in self._servers:
            if not server.child.exited.wait(20):
                server.child.kill()
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def _connect(self, name: str, number: int) -> None:
        holder = self._hold(name)
        end = ("peer", "name", "eth0", "netns", str(holder.pid))
        self._ip("between", "link", "add", f"to-{number}", "type", "veth", *end)
        self._ip("between", "link", "set", f"to-{number}", "master", "bridge", "up")
        address = self._addresses[name] = f"{_NETWORK}.{number}"
        self._ip(name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip(name, "link", "set", device, "up")

    def _hold(self, name: str) -> subprocess.Popen[bytes]:
        """A process that a network belongs to."""
        holder = self._holders[name] = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"]
        )
        ours, theirs = (Path(f"/proc/{pid}/ns/net") for pid in ("self", holder.pid))
        wait_until(lambda: os.readlink(theirs) != os.readlink(ours))
        return holder

    def _ip(self, name: str, *argv: str) -> None:
        with self.inside(name):
            subprocess.run(["ip", *argv], check=True, capture_output=True)


def _set_network(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
