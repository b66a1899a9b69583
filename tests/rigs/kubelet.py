"""Runs the pods of manifests on this machine, as a kubelet would.

Each pod has its own network, processes, mounts and shared memory. Its containers have
the command, variables, user, probes, preStop hook and grace period that the manifest
specifies. kubernetes_cluster.py decides which pods exist.
"""

import contextlib
import http.client
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.cluster import wait_until
from tests.rigs.hosts import Hosts
from tests.rigs.kubernetes import Manifest, Objects, containers_of, sidecars_of
from tests.rigs.pod_files import RootFileSystem

START_TIMEOUT_S = 240.0
NODE = "node"  # the host from which probes and clients connect
_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts", "--net", "--root")


@dataclass(frozen=True)
class Node:
    """The machine on which the pods run.

    Attributes:
        folder: folder for the files of the pods.
        names_file: file that all pods have as /etc/hosts.
        on_change: called when a pod becomes ready, is no longer ready, or ends.
    """

    hosts: Hosts
    objects: Objects
    files: RootFileSystem
    folder: Path
    names_file: Path
    on_change: Callable[[], None]


class Pod:
    """One pod, from its creation to the end of its containers.

    Args:
        variables: environment variables that the pod's controller puts before those of
            the manifest.

    Attributes:
        is_ready: whether all readiness probes succeed.
        is_terminating: whether the pod was deleted.
        problems: events for which a kubelet would have restarted a container.
        exit_codes: the exit status of each container that has ended.
        was_killed: whether a container had to be killed after the grace period.
    """

    def __init__(
        self, node: Node, name: str, template: Manifest, variables: Mapping[str, str]
    ) -> None:
        self.name = name
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: Manifest = template["spec"]
        self.address = ""
        self.is_ready = False
        self.is_terminating = False
        self.problems: list[str] = []
        self.exit_codes: dict[str, int] = {}
        self.was_killed = False
        self._node = node
        self._variables = variables
        self._folder = node.folder / name
        self._folder.mkdir()
        self._pause: subprocess.Popen[bytes] | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ready_containers: set[str] = set()
        self._has_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        hosts = self._node.hosts
        hosts.add(self.name)
        self.address = hosts.address(self.name)
        self._start_pause()
        for container in containers_of(self.spec):
            self._start_container(container)

    def log(self, container: str) -> str:
        return (self._folder / f"{container}.log").read_text()

    def terminate(self) -> None:
        """Delete the pod. Returns when its containers have ended."""
        self.is_terminating = True
        self.is_ready = False
        self._node.on_change()
        deadline_s = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        with ThreadPoolExecutor(len(self._processes)) as pool:
            endings = [
                pool.submit(self._end, container, deadline_s)
                for container in self.spec["containers"]
            ]
        for ending in endings:
            ending.result()
        for sidecar in reversed(sidecars_of(self.spec)):
            self._end(sidecar, deadline_s)
        self._node.on_change()
        self.close()

    def close(self) -> None:
        """Kill all processes of the pod."""
        self._has_ended.set()
        if self._pause is not None:
            self._pause.kill()  # `--kill-child` ends the pod's other processes
            self._pause.wait()
        for process in self._processes.values():
            process.wait()
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(KeyError):
            self._node.hosts.remove(self.name)

    # -- processes

    def _start_pause(self) -> None:
        """Start the process that holds the namespaces of the pod."""
        if not self.spec.get("shareProcessNamespace"):
            raise NotImplementedError("containers with separate process namespaces")
        script = self._folder / "setup.sh"
        script.write_text("\n".join(self._setup_commands()))
        # The kernel kills the pod when this thread ends, even if the tests are killed.
        unshare = "setpriv --pdeathsig KILL unshare --mount --pid --ipc --uts --fork"
        argv = [*unshare.split(), "--kill-child", "sh", "-e", str(script)]
        with self._node.hosts.inside(self.name):
            self._pause = subprocess.Popen(argv)
        wait_until(self._is_set_up, START_TIMEOUT_S)

    def _is_set_up(self) -> bool:
        """Return True if the pod has its own root directory.

        The last command of the setup script, `chroot ... sleep`, changes the root.
        Until `sleep` runs, the root is that of the host.
        """
        assert self._pause is not None
        names = [_name_of(pid) for pid in _children(self._pause.pid)]
        return names == ["sleep"]

    def _setup_commands(self) -> list[str]:
        """Return the commands that build the root file system of the pod."""
        files = self._node.files
        root = self._folder / "root"
        root.mkdir()
        lines = []
        if files.root is not None:
            # The writable layer above the image is only needed to create mount points.
            upper = self._folder / "upper"
            work = self._folder / "work"
            lines.append(f"mkdir {upper} {work}")
            layers = f"lowerdir={files.root},upperdir={upper},workdir={work}"
            lines.append(f"mount -t overlay -o {layers} none {root}")
        else:
            lines += [f"mount -t tmpfs -o mode=755 none {root}", f"cd {root}"]
            lines.append("mkdir -p etc home/baton/.cache opt dev proc sys tmp")
        for path, target in files.links.items():
            lines.append(f"ln -s {target} {root}{path}")
        for path, source in files.binds.items():
            lines.append(f"mkdir -p {root}{path}")
            lines.append(f"mount --rbind -o ro {source} {root}{path}")
        lines.append(f"mount --rbind /dev {root}/dev")
        lines.append(f"mount -t proc none {root}/proc")
        lines.append(f"mount -t sysfs -o ro none {root}/sys")
        resolver = self._folder / "resolv.conf"
        resolver.write_text("options timeout:1 attempts:1\n")
        lines.append(f"mount --bind {resolver} {root}/etc/resolv.conf")
        lines.append(f"mount --bind {self._node.names_file} {root}/etc/hosts")
        lines += self._volume_commands(root)
        lines.append(f"mount -o remount,bind,ro {root}")
        lines.append(f"exec chroot {root} sleep infinity")
        return lines

    def _volume_commands(self, root: Path) -> Iterator[str]:
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        # All containers of a pod share one root, so each of them has all mounts.
        mounts = {
            mount["mountPath"]: mount
            for container in containers_of(self.spec)
            for mount in container["volumeMounts"]
        }
        for mount in mounts.values():
            target = f"{root}{mount['mountPath']}"
            yield f"mkdir -p {target}"
            match volumes[mount["name"]]:
                case {"emptyDir": {"medium": "Memory"}}:
                    yield f"mount -t tmpfs -o mode=1777 none {target}"
                case {"emptyDir": _}:
                    source = self._folder / mount["name"]
                    yield f"mkdir -m 777 {source}"
                    yield f"mount --bind {source} {target}"
                case {"hostPath": {"path": source}}:
                    yield f"mount --bind {source} {target}"
                    if mount.get("readOnly"):
                        yield f"mount -o remount,bind,ro {target}"
                case volume:
                    raise NotImplementedError(volume)

    def _start_container(self, container: Manifest) -> None:
        env = {"HOME": "/home/baton", **self._node.files.env}
        fields = {"status.podIP": self.address, "metadata.name": self.name}
        front = [{"name": key, "value": text} for key, text in self._variables.items()]
        complete = {**container, "env": [*front, *container["env"]]}
        env |= self._node.objects.environment(self.spec, complete, fields)
        words = [f"{name}={value}" for name, value in env.items()]
        argv = self._inside(container, "env", "-i", *words, *container["command"])
        with (self._folder / f"{container['name']}.log").open("wb") as log:
            process = subprocess.Popen(
                [*argv, *container.get("args", [])], stdout=log, stderr=log
            )
        self._processes[container["name"]] = process
        thread = threading.Thread(target=self._watch, args=(container,))
        self._threads.append(thread)
        thread.start()

    def _inside(self, container: Manifest, *argv: str) -> list[str]:
        """Return a command that runs `argv` in a container as its user."""
        assert self._pause is not None
        (pid,) = _children(self._pause.pid)
        context = self.spec["securityContext"] | container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"]
        user = f"--reuid={context['runAsUser']} --regid={context['runAsGroup']}"
        setpriv = f"setpriv {user} --groups={context['fsGroup']} --bounding-set=-all"
        if not context["allowPrivilegeEscalation"]:
            setpriv += " --no-new-privs"
        nsenter = ["nsenter", "--target", str(pid), *_NAMESPACES, "--wdns=/home/baton"]
        return [*nsenter, *shlex.split(setpriv), *argv]

    def _end(self, container: Manifest, deadline_s: float) -> None:
        """Run the preStop hook and send SIGTERM. Send SIGKILL if the container has not
        ended by `deadline_s`.
        """
        process = self._processes[container["name"]]
        match container.get("lifecycle", {}).get("preStop"):
            case None:
                pass
            case {"sleep": {"seconds": seconds}}:
                self._has_ended.wait(seconds)
            case {"exec": {"command": command}}:
                subprocess.run(self._inside(container, *command), check=False)
            case hook:
                raise NotImplementedError(hook)
        for pid in _children(process.pid):
            os.kill(pid, signal.SIGTERM)
        try:
            process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.was_killed = True
            for pid in _children(process.pid):
                os.kill(pid, signal.SIGKILL)
        self.exit_codes[container["name"]] = process.wait()

    # -- probes

    def _watch(self, container: Manifest) -> None:
        """Run the probes of a container until the pod ends."""
        with self._node.hosts.inside(NODE):
            if not self._has_started(container):
                return
            kinds = ("readinessProbe", "livenessProbe")
            due_s = {kind: 0.0 for kind in kinds if kind in container}
            failures = dict.fromkeys(due_s, 0)
            if "readinessProbe" not in container:
                self._set_ready(container, is_good=True, is_over=False)
            while not self._has_ended.wait(0.1):
                if self._process_has_ended(container):
                    return
                for kind in due_s:
                    probe = container[kind]
                    if time.monotonic() < due_s[kind]:
                        continue
                    due_s[kind] = time.monotonic() + probe.get("periodSeconds", 10)
                    is_good = self._probe(container, probe)
                    failures[kind] = 0 if is_good else failures[kind] + 1
                    is_over = failures[kind] >= probe.get("failureThreshold", 3)
                    if kind == "readinessProbe":
                        self._set_ready(container, is_good, is_over)
                    elif is_over and not self.is_terminating:
                        self.problems.append(f"{container['name']} is not alive")
                        return

    def _has_started(self, container: Manifest) -> bool:
        probe = container.get("startupProbe")
        if probe is None:
            return True
        for _ in range(probe["failureThreshold"]):
            if self._has_ended.wait(probe["periodSeconds"]):
                return False
            if self._process_has_ended(container):
                return False
            if self._probe(container, probe):
                return True
        self.problems.append(f"{container['name']} did not start")
        return False

    def _process_has_ended(self, container: Manifest) -> bool:
        status = self._processes[container["name"]].poll()
        if status is not None and not self.is_terminating:
            self.problems.append(f"{container['name']} ended with status {status}")
        return status is not None

    def _set_ready(self, container: Manifest, is_good: bool, is_over: bool) -> None:
        if is_good:
            self._ready_containers.add(container["name"])
        elif is_over:
            self._ready_containers.discard(container["name"])
        names = {each["name"] for each in containers_of(self.spec)}
        is_ready = self._ready_containers == names and not self.is_terminating
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._node.on_change()

    def _probe(self, container: Manifest, probe: Manifest) -> bool:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        request = probe["httpGet"]
        connection = http.client.HTTPConnection(
            self.address, ports[request["port"]], timeout=probe.get("timeoutSeconds", 1)
        )
        try:
            connection.request("GET", request["path"])
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _name_of(pid: int) -> str:
    """Return the name of the program that a process runs, or "" if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _children(pid: int) -> list[int]:
    """Return the pids of the children of a process, or [] if it has ended."""
    pids: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    return pids
