"""Starting an engine's rank processes from the HTTP process, and noticing when one ends."""

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from protocol import lifecycle

logger = logging.getLogger("baton.launch")


_PREFIX = "baton-"

# How long threads of torch's OpenMP pool spin for work before they give the core up. The default
# (300,000 turns) is ruinous where processes share cores, as a prefill and a decode server on one
# machine do: a decode step of 37 ms took 370. None at all costs the step 8 ms; this many cost none.
_THREADING = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "4000")}


def _remove_orphans() -> None:
    """Removes the socket folders of servers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


class EngineProcesses:
    """The rank processes of one engine.

    Args:
        module: what each rank runs, `prefill_server.role` or `decode_server.role`.
        on_failure: told once, from a thread, why the engine cannot go on.
    """

    def __init__(self, module: str, on_failure: Callable[[str], None]) -> None:
        self._module = module
        self._on_failure = on_failure
        self._children: list[lifecycle.Child] = []
        self._lock = threading.Lock()
        self._stopping = False
        _remove_orphans()
        # A short path: a UNIX socket's may have 107 characters at most.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))

    def address(self, name: str) -> str:
        """A ZMQ endpoint in this engine's private folder."""
        return f"ipc://{self.folder}/{name}"

    def start(self, config: EngineConfig) -> None:
        data = msgspec.json.encode(config)
        for rank in range(config.tp):
            name = config.role if config.tp == 1 else f"{config.role}.{rank}"
            argv = [sys.executable, "-m", self._module, "--rank", str(rank)]
            child = lifecycle.spawn(
                argv,
                name=name,
                env=_THREADING,
                stdin=data,
                capture=False,
                on_event=self._on_event,
            )
            self._children.append(child)

    def _on_event(self, event: lifecycle.Event) -> None:
        if isinstance(event, lifecycle.Exited):
            with self._lock:
                if self._stopping:
                    return
                self._stopping = True
            self._on_failure(f"engine process {event.child.name}: {event.child.reason()}")

    def stop(self, grace_s: float) -> None:
        """Ends every rank, kindly first. Idempotent."""
        with self._lock:
            self._stopping = True
        lifecycle.terminate(self._children, grace_s)
        shutil.rmtree(self.folder, ignore_errors=True)


def new_incarnation() -> str:
    """An id that no other start of any engine has."""
    return secrets.token_hex(8)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago (for torch's rendezvous, which cannot report one)."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
