"""Starting an engine's rank processes from the HTTP process, and noticing when one ends."""

import fcntl
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from protocol.process import lifecycle

logger = logging.getLogger("baton.launch")


_PREFIX = "baton-engine-"
_LOCK = "lock"
_SETTLED_S = 60.0
_PATH_BYTES = 107  # the most that the path of a Unix socket may have
_IN_PARENT_BYTES = len(f"/{_PREFIX}mkdtemp_/sockets")  # an upper bound of what is added to it
_SHORT_PARENTS = (Path("/tmp"), Path("/var/tmp"))

# How long threads of torch's OpenMP pool spin for work before they give the core up. The default
# (300,000 turns) is ruinous where processes share cores, as a prefill and a decode server on one
# machine do; none at all slows each step.
_THREADING = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "4000")}


class SocketFolder:
    """A private folder for an engine's sockets, locked while its owner lives.

    A killed owner's lock goes with it, so the next server to start removes the folder; a process id
    would not tell, as containers that share a /tmp have their own.

    Args:
        parent: where to make it; else in the folder for temporary files, or in /tmp where that has
            so long a path that no socket could have one in it.

    Raises:
        OSError: none of these can be written to, or all have too long a path.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = _short_enough(parent or Path(tempfile.gettempdir()))
        for folder in parent.glob(f"{_PREFIX}*"):
            _remove_if_orphaned(folder)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _short_enough(wanted: Path) -> Path:
    for parent in (wanted, *_SHORT_PARENTS):
        if len(os.fsencode(parent)) + _IN_PARENT_BYTES > _PATH_BYTES:
            continue
        if parent == wanted or os.access(parent, os.W_OK | os.X_OK):
            return parent
    room = _PATH_BYTES - _IN_PARENT_BYTES
    raise OSError(
        f"no folder for an engine's sockets: the path {wanted} has {len(os.fsencode(wanted))} "
        f"bytes, {room} at most leave room for a Unix socket's, and nothing can be written to "
        f"{' and '.join(map(str, _SHORT_PARENTS))}; set TMPDIR to a folder with a shorter path"
    )


def _remove_if_orphaned(folder: Path) -> None:
    try:
        if time.time() - folder.stat().st_mtime < _SETTLED_S:
            return  # perhaps made and not yet locked
        with (folder / _LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # alive, another user's, or being made
        return


class EngineProcesses:
    """The rank processes of one engine.

    Args:
        module: what each rank runs, `prefill_server.connector` or `decode_server.connector`.
        on_failure: told once, from a thread, why the engine cannot go on.
    """

    def __init__(self, module: str, on_failure: Callable[[str], None]) -> None:
        self._module = module
        self._on_failure = on_failure
        self._children: list[lifecycle.Child] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._folder = SocketFolder()

    def address(self, name: str) -> str:
        """`ipc://` and a path in this engine's private folder."""
        return f"ipc://{self._folder.path}/{name}"

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
        if not isinstance(event, lifecycle.Exited):
            return
        with self._lock:
            was_stopping, self._stopping = self._stopping, True
        if not was_stopping:
            self._on_failure(f"engine process {event.child.name}: {event.child.reason()}")

    def kill(self) -> None:
        """Ends every rank at once."""
        for child in self._children:
            child.kill()
        self._folder.remove()

    def stop(self, grace_s: float) -> None:
        """Ends every rank, kindly first. Idempotent."""
        with self._lock:
            self._stopping = True
        lifecycle.terminate(self._children, grace_s)
        self._folder.remove()
