"""Containers of an image on a host of tests/rigs/hosts.py, without a daemon.

A container uses the network of its host, and has its own mounts and host name. It also
has its own processes, IPC and shared memory, unless it joins another container's. Each
container begins with an empty writable layer above the image's files. The first process
of a container is the given command, run as the image's user, so signals reach the
command directly.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs.cluster import wait_until
from tests.rigs.hosts import Hosts
from tests.rigs.images import Image

EXEC_TIMEOUT_S = 60.0
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Shell script that runs in the namespaces of a new container, and then executes its
# command. The arguments are the folder of the writable layer, the image's files, the
# user, the working directory, and the arguments of `env` (variables and the command).
# $MOUNTS has a line for each further mount.
_START = f"""
set -e
layer=$1 image=$2 user=$3 directory=$4
shift 4
root=$layer/root
mount -t overlay none -o "lowerdir=$image,upperdir=$layer/upper,workdir=$layer/work" \\
  "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm"
for name in {" ".join(_DEVICES)}; do
  touch "$root/dev/$name"
  mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"
if [ -n "$SHARED_SHM" ]; then
  mount --bind "$SHARED_SHM" "$root/dev/shm"
else
  mount -t tmpfs -o "mode=1777,size=$SHM_SIZE" tmpfs "$root/dev/shm"
fi
echo "$MOUNTS" | while IFS=: read -r source target options; do
  [ -n "$source" ] || continue
  mkdir -p "$root$target"
  mount --bind "$source" "$root$target"
  [ "$options" != ro ] || mount -o remount,bind,ro "$root$target"
done
hostname "$CONTAINER_NAME"
exec chroot --userspec="$user:$user" "$root" env -C "$directory" -i "$@"
"""


@dataclass(frozen=True)
class ContainerSpec:
    """The command, environment and resources of a container.

    Attributes:
        command: program and arguments (empty: the image's command).
        env: variables in addition to the image's.
        volumes: (folder of this machine, path in the container, "ro" or "rw") for each
            volume, such as ("models", "/models", "ro").
        shm_size: size of /dev/shm. The default, "64m", is Docker's.
        joins: container whose processes, IPC and shared memory this container shares.
    """

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[tuple[str, str, str]] = ()
    shm_size: str = "64m"
    joins: "Container | None" = None


class Container:
    """A running container.

    Args:
        folder: folder for the writable layers and the logs of all containers.
    """

    def __init__(
        self, spec: ContainerSpec, image: Image, hosts: Hosts, host: str, folder: Path
    ) -> None:
        self.spec = spec
        self.host = host
        self._image = image
        self._folder = folder / f"{host}-{spec.name}-{time.monotonic_ns()}"
        for name in ("upper", "work", "root"):
            (self._folder / name).mkdir(parents=True)
        with hosts.inside(host), open(self._folder / "log", "wb") as log:
            self._wrapper = subprocess.Popen(
                self._argv(),
                env=os.environ | self._start_variables(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(lambda: self._has_image_files() or self.has_exited)

    @property
    def pid(self) -> int:
        """The pid that the container's first process has on this machine."""
        pids = self._children()
        assert pids, f"{self.spec.name} has ended:\n{self.log}"
        return pids[0]

    @property
    def has_exited(self) -> bool:
        return self._wrapper.poll() is not None

    @property
    def exit_status(self) -> int | None:
        """The exit status of the container's first process, or None while it runs."""
        return self._wrapper.poll()

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def execute(
        self, *argv: str, timeout_s: float = EXEC_TIMEOUT_S, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `docker exec` does."""
        user = str(self._image.uid)
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc"]
        enter += ["--net", "--pid", "--root", "--setgid", user, "--setuid", user]
        directory = self._image.working_directory
        command = [*enter, "env", "-C", directory, "-i", *self._variables(**env), *argv]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def is_healthy(self) -> bool:
        """Whether the health check of the image succeeds."""
        if self.has_exited:
            return False
        return self.execute(*self._image.health_command).returncode == 0

    def signal(self, number: int) -> None:
        """Send a signal to the first process, if it still runs."""
        for pid in self._children():
            os.kill(pid, number)

    def stop(self, grace_s: float) -> int:
        """End the container as `docker stop` does, and return its exit status.

        Raises:
            AssertionError: the container had to be killed after `grace_s`.
        """
        self.signal(signal.SIGTERM)
        try:
            return self._wrapper.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{self.spec.name} did not end within {grace_s} s:\n{self.log}"
            ) from None

    def kill(self) -> None:
        """End the container with SIGKILL."""
        self.signal(signal.SIGKILL)
        self._wrapper.wait(30)

    def _children(self) -> list[int]:
        """Return the children of `unshare` or `nsenter`, which run in the container."""
        try:
            path = Path(f"/proc/{self._wrapper.pid}/task/{self._wrapper.pid}/children")
            return [int(pid) for pid in path.read_text().split()]
        except OSError:  # the wrapper has ended
            return []

    def _has_image_files(self) -> bool:
        """Return True if the first process has the image's files as its root."""
        try:
            return any(
                os.readlink(f"/proc/{pid}/root") != "/" for pid in self._children()
            )
        except OSError:  # the process has ended
            return False

    def _argv(self) -> list[str]:
        user = str(self._image.uid)
        script = ["sh", "-c", _START, "sh", str(self._folder), str(self._image.root)]
        script += [user, self._image.working_directory, *self._variables()]
        script += self.spec.command or self._image.command
        # The kernel kills the container when the thread that started it ends, even if
        # that thread is killed.
        tied = ["setpriv", "--pdeathsig", "KILL"]
        if self.spec.joins is None:
            new = ["--ipc", "--pid", "--mount", "--uts"]
            return [*tied, "unshare", *new, "--fork", "--kill-child", *script]
        target = ["--target", str(self.spec.joins.pid)]
        # The script needs the other container's mounts to mount its /dev/shm. nsenter
        # enters them, and unshare makes a copy that belongs to this container.
        enter = ["nsenter", *target, "--mount", "--ipc", "--pid"]
        return [*enter, "unshare", "--mount", "--uts", *script]

    def _variables(self, **more: str) -> list[str]:
        """Return the container's environment as arguments of `env`."""
        variables = {"HOSTNAME": self.spec.name, "HOME": self._image.working_directory}
        variables |= self._image.env | dict(self.spec.env) | more
        return [f"{name}={value}" for name, value in variables.items()]

    def _start_variables(self) -> dict[str, str]:
        joins = self.spec.joins
        shared = str(joins._folder / "root/dev/shm") if joins else ""
        return {
            "CONTAINER_NAME": self.spec.name,
            "MOUNTS": "\n".join(map(":".join, self.spec.volumes)),
            "SHM_SIZE": self.spec.shm_size,
            "SHARED_SHM": shared,
        }
