"""Starting an engine's rank processes from the HTTP process, and noticing when one ends."""

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from protocol.process import lifecycle

_PREFIX = "baton-engine-"
_PATH_BYTES = 107  # the most that the path of a Unix socket may have
_PARENT_BYTES = _PATH_BYTES - len(f"/{_PREFIX}mkdtemp_/sockets")  # at least, that leave room
_SHORT = "/tmp"

# How long threads of torch's OpenMP pool spin for work before they give the core up. The default
# (300,000 turns) is ruinous where processes share cores, as a prefill and a decode server on one
# machine do; none at all slows each step.
_THREADING = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "4000")}


def make_socket_folder() -> Path:
    """A new private folder for an engine's sockets: in the folder for temporary files, or in /tmp
    where that has so long a path that no socket could have one in it.

    Raises:
        OSError: it cannot be made; says what to do.
    """
    wanted = tempfile.gettempdir()
    num_bytes = len(os.fsencode(wanted))
    try:
        folder = wanted if num_bytes <= _PARENT_BYTES else _SHORT
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    except OSError as error:
        raise OSError(
            f"no folder for an engine's sockets: the path {wanted} has {num_bytes} bytes, "
            f"{_PARENT_BYTES} at most leave room for a Unix socket's, and {error}; set TMPDIR to "
            "a folder with a shorter path that can be written to"
        ) from None


class EngineProcesses:
    """The rank processes of one engine.

    Args:
        module: what each rank runs.
        on_failure: told once, from a thread, why the engine cannot go on.
    """

    def __init__(self, module: str, on_failure: Callable[[str], None]) -> None:
        self._module = module
        self._on_failure = on_failure
        self._children: list[lifecycle.Child] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._folder = make_socket_folder()

    def address(self, name: str) -> str:
        """`ipc://` and a path in this engine's private folder."""
        return f"ipc://{self._folder}/{name}"

    def start(self, config: EngineConfig) -> None:
        data = config.model_dump_json().encode()
        for rank in range(config.tp):
            name = config.role if config.tp == 1 else f"{config.role}.{rank}"
            argv = [sys.executable, "-m", self._module, "--rank", str(rank)]
            child = lifecycle.spawn(
                argv, name=name, env=_THREADING, stdin=data, capture=False, on_event=self._on_event
            )
            self._children.append(child)

    def _on_event(self, event: lifecycle.Event) -> None:
        if event.kind != "exited":
            return
        with self._lock:
            was_stopping, self._stopping = self._stopping, True
        if not was_stopping:
            self._on_failure(f"engine process {event.child.name}: {event.child.reason()}")

    def kill(self) -> None:
        """Ends every rank at once."""
        for child in self._children:
            child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self, grace_s: float) -> None:
        """Ends every rank, kindly first. Idempotent."""
        with self._lock:
            self._stopping = True
        lifecycle.terminate(self._children, grace_s)
        shutil.rmtree(self._folder, ignore_errors=True)
