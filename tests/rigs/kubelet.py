"""Runs the pods of manifests on this machine, as a kubelet would.

Each pod has a network, processes, mounts and shared memory of its own. Its containers
run the command, variables, user, probes, preStop and grace period that the manifest
names. The names of services resolve to the pods that Kubernetes would return.
"""

import contextlib
import http.client
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs import images
from tests.rigs.cluster import wait_until
from tests.rigs.hosts import Hosts
from tests.rigs.kubernetes import ROOT, Manifest, Objects, matches

START_TIMEOUT_S = 240.0
NODE = "node"  # the host from which probes and clients connect
_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts", "--net", "--root")


@dataclass(frozen=True)
class RootFileSystem:
    """The files of a container, and the variables that its image sets.

    Attributes:
        root: the folder with all files, or None if `binds` has them.
        binds: folders of this machine by their path in the container, read-only.
        links: symbolic links by their path in the container.
    """

    root: Path | None = None
    binds: Mapping[str, Path] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def root_file_system(folder: Path) -> Iterator[RootFileSystem]:
    """Return the files of the real image if it can be built here, else of this machine
    and this checkout.

    Args:
        folder: see checkout_files.
    """
    if images.missing_requirement() is not None:
        yield checkout_files(folder)
        return
    with images.mounted_image() as image:
        yield RootFileSystem(image.root, env=image.env)


def checkout_files(folder: Path) -> RootFileSystem:
    """Return the programs of this machine and the code of this checkout.

    Args:
        folder: where the command `baton` is written.
    """
    program = folder / "bin" / "baton"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH=/opt/baton exec {sys.executable} -m deploy.cli "$@"\n'
    )
    program.chmod(0o755)
    binds = {"/opt/baton": ROOT, "/opt/bin": program.parent, "/usr": Path("/usr")}
    links = {}
    for name in ("bin", "etc", "lib", "lib64", "sbin"):
        path = Path("/") / name
        if path.is_symlink():
            links[str(path)] = os.readlink(path)
        elif path.exists():
            binds[str(path)] = path
    for prefix in {sys.prefix, sys.base_prefix}:
        if not prefix.startswith("/usr"):
            binds[prefix] = Path(prefix)
    return RootFileSystem(None, binds, links, {"PATH": "/opt/bin:/usr/bin:/bin"})


class Pod:
    """One pod, from its creation to the end of its containers.

    Attributes:
        is_ready: whether all readiness probes succeed.
        is_terminating: whether the pod was deleted.
        problems: what a kubelet would have restarted a container for.
        exit_codes: the exit status of each container that has ended.
        was_killed: whether a container had to be killed after the grace period.
    """

    def __init__(self, cluster: "Cluster", name: str, template: Manifest) -> None:
        self.name = name
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: Manifest = template["spec"]
        self.address = ""
        self.is_ready = False
        self.is_terminating = False
        self.problems: list[str] = []
        self.exit_codes: dict[str, int] = {}
        self.was_killed = False
        self._cluster = cluster
        self._folder = cluster.folder / name
        self._folder.mkdir()
        self._pause: subprocess.Popen[bytes] | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ready_containers: set[str] = set()
        self._has_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        hosts = self._cluster.hosts
        hosts.add(self.name)
        self.address = hosts.address(self.name)
        self._start_pause()
        for container in self.spec["containers"]:
            self._start_container(container)

    def log(self, container: str) -> str:
        return (self._folder / f"{container}.log").read_text()

    def terminate(self) -> None:
        """Delete the pod. Returns when its containers have ended."""
        self.is_terminating = True
        self.is_ready = False
        self._cluster.publish()
        deadline_s = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        with ThreadPoolExecutor(len(self._processes)) as pool:
            for container in self.spec["containers"]:
                pool.submit(self._end, container, deadline_s)
        self._cluster.publish()
        self.close()

    def close(self) -> None:
        """End all processes of the pod at once."""
        self._has_ended.set()
        if self._pause is not None:
            self._pause.kill()  # `--kill-child` ends the pod's other processes
            self._pause.wait()
        for process in self._processes.values():
            process.wait()
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(KeyError):
            self._cluster.hosts.remove(self.name)

    # -- processes

    def _start_pause(self) -> None:
        """Start the process that holds the namespaces of the pod."""
        if not self.spec.get("shareProcessNamespace"):
            raise NotImplementedError("containers with separate process namespaces")
        script = self._folder / "setup.sh"
        script.write_text("\n".join(self._setup_commands()))
        # The pod ends with this thread, even if the tests are killed.
        unshare = "setpriv --pdeathsig KILL unshare --mount --pid --ipc --uts --fork"
        argv = [*unshare.split(), "--kill-child", "sh", "-e", str(script)]
        with self._cluster.hosts.inside(self.name):
            self._pause = subprocess.Popen(argv)
        wait_until((self._folder / "is-set-up").exists, START_TIMEOUT_S)

    def _setup_commands(self) -> list[str]:
        """Return the commands that build the root file system of the pod."""
        files = self._cluster.files
        root = self._folder / "root"
        root.mkdir()
        lines = []
        if files.root is not None:
            # The layer above the image is only for the folders of mounts.
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
        lines.append(f"mount --bind {self._cluster.names_file} {root}/etc/hosts")
        lines += self._volume_commands(root)
        lines.append(f"mount -o remount,bind,ro {root}")
        lines.append(f"touch {self._folder}/is-set-up")
        lines.append(f"exec chroot {root} sleep infinity")
        return lines

    def _volume_commands(self, root: Path) -> Iterator[str]:
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        (container,) = self.spec["containers"]
        for mount in container["volumeMounts"]:
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
        env = {"HOME": "/home/baton", **self._cluster.files.env}
        fields = {"status.podIP": self.address, "metadata.name": self.name}
        env |= self._cluster.objects.environment(self.spec, container, fields)
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
        """Run preStop, send SIGTERM, and SIGKILL when the grace period is over."""
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
        with self._cluster.hosts.inside(NODE):
            if not self._has_started(container):
                return
            due_s = {"readinessProbe": 0.0, "livenessProbe": 0.0}
            failures = dict.fromkeys(due_s, 0)
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
        probe = container["startupProbe"]
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
        names = {each["name"] for each in self.spec["containers"]}
        is_ready = self._ready_containers == names and not self.is_terminating
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._cluster.publish()

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


class Cluster:
    """The pods of one namespace, on one node.

    Args:
        folder: folder for the files of the pods.
    """

    def __init__(self, objects: Objects, files: RootFileSystem, folder: Path) -> None:
        self.objects = objects
        self.files = files
        self.folder = folder
        self.folder.chmod(0o755)
        self.hosts = Hosts(NODE, folder=folder)
        self.names_file = folder / "hosts"
        self.names_file.write_text("127.0.0.1 localhost\n")
        self.pods: dict[str, list[Pod]] = {}  # by deployment
        self.ended_pods: list[Pod] = []
        self._lock = threading.Lock()
        self._num_created = 0

    def close(self) -> None:
        for pods in self.pods.values():
            for pod in pods:
                pod.close()
        self.hosts.close()

    def publish(self) -> None:
        """Write the addresses of the services, which all pods read."""
        with self._lock:
            lines = ["127.0.0.1 localhost"]
            for service in self.objects.of_kind("Service"):
                name = service["metadata"]["name"]
                lines += [f"{address} {name}" for address in self.endpoints(name)]
            # The file is mounted in the pods, so it must not be replaced.
            self.names_file.write_text("\n".join(lines) + "\n")

    def endpoints(self, service: str) -> list[str]:
        """Return the addresses of the pods that are behind a service now."""
        spec = self.objects.get("Service", service)["spec"]
        is_for_all = spec.get("publishNotReadyAddresses", False)
        return [
            pod.address
            for pods in self.pods.values()
            for pod in pods
            if matches(spec["selector"], pod.labels) and pod.address
            if is_for_all or pod.is_ready
        ]

    def apply(self) -> None:
        """Start the pods of all deployments and wait until they are ready."""
        for deployment in self.objects.of_kind("Deployment"):
            name = deployment["metadata"]["name"]
            self.pods[name] = []
            for _ in range(deployment["spec"]["replicas"]):
                self._create(name)
        for pods in self.pods.values():
            for pod in pods:
                self._wait_until_ready(pod)

    def roll(self, name: str) -> None:
        """Replace the pods of a deployment: surge 1, unavailable 0.

        Returns when the old pods have ended.
        """
        strategy = self.objects.get("Deployment", name)["spec"]["strategy"]
        assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        old_pods = list(self.pods[name])
        endings: list[Future[None]] = []
        with ThreadPoolExecutor(len(old_pods)) as pool:
            for pod in old_pods:
                self._wait_until_ready(self._create(name))
                endings.append(pool.submit(self._delete, name, pod))
        for ending in endings:
            ending.result()

    def evict(self, name: str) -> None:
        """End a pod of a deployment, as a drain of its node does, and replace it."""
        self._delete(name, self.pods[name][0])
        self._wait_until_ready(self._create(name))

    def _create(self, name: str) -> Pod:
        template = self.objects.get("Deployment", name)["spec"]["template"]
        self._num_created += 1
        pod = Pod(self, f"{name}-{self._num_created}", template)
        self.pods[name].append(pod)
        pod.start()
        self.publish()
        return pod

    def _delete(self, name: str, pod: Pod) -> None:
        pod.terminate()
        self.pods[name].remove(pod)
        self.ended_pods.append(pod)
        self.publish()

    def _wait_until_ready(self, pod: Pod) -> None:
        try:
            wait_until(lambda: pod.is_ready or pod.problems, START_TIMEOUT_S)
        finally:
            if not pod.is_ready:
                print(f"{pod.name}: {pod.problems}\n{pod.log('baton')}")
        assert pod.is_ready, pod.problems


def _children(pid: int) -> list[int]:
    """Return the pids of the children of a process, or [] if it has ended."""
    pids: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    return pids
