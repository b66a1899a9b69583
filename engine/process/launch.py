"""Starts an engine's rank processes from the HTTP process, and reports their end."""

import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable

from engine.config import EngineConfig
from protocol.process import lifecycle

# How many turns idle threads of torch's OpenMP pool spin before they free the core. The
# default of 300,000 turns greatly slows processes that share cores, such as a prefill
# and a decode server on one machine. Without any spinning, each step would be slower.
_OPENMP_ENV = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "4000")}


class EngineProcesses:
    """The rank processes of one engine.

    Args:
        module: the module that each rank runs.
        on_failure: called with the reason, from another thread, when the first rank
            exits without `stop`.
    """

    def __init__(self, module: str, on_failure: Callable[[str], None]) -> None:
        self._module = module
        self._on_failure = on_failure
        self._children: list[lifecycle.Child] = []
        self._lock = threading.Lock()
        self._is_stopping = False
        self._folder = tempfile.mkdtemp(prefix="baton-engine-")

    def start(self, config: EngineConfig) -> socket.socket:
        """Start the ranks; return the socket to rank 0.

        Rank 0 also has two sockets to every other rank; see RankLinks.
        """
        config = config.model_copy(
            update={"rendezvous_file": f"{self._folder}/meeting"}
        )
        config_json = config.model_dump_json().encode()
        link, http = socket.socketpair()
        rank_sockets = [[http]]
        for _ in range(1, config.tp):
            pairs = [socket.socketpair(), socket.socketpair()]
            rank_sockets[0] += [ours for ours, _ in pairs]
            rank_sockets.append([theirs for _, theirs in pairs])
        for rank, sockets in enumerate(rank_sockets):
            name = config.role if config.tp == 1 else f"{config.role}.{rank}"
            files = [each.fileno() for each in sockets]
            argv = [sys.executable, "-m", self._module, "--rank", str(rank)]
            argv += ["--sockets", *map(str, files)]
            child = lifecycle.spawn(
                argv,
                name=name,
                env=_OPENMP_ENV,
                stdin=config_json,
                capture=False,
                on_event=self._on_event,
                files=files,
            )
            self._children.append(child)
            for each in sockets:
                each.close()
        return link

    def _on_event(self, event: lifecycle.Event) -> None:
        if event.kind != "exited":
            return
        with self._lock:
            was_stopping = self._is_stopping
            self._is_stopping = True
        if not was_stopping:
            self._on_failure(
                f"engine process {event.child.name}: {event.child.reason()}"
            )

    def kill(self) -> None:
        """Kill every rank."""
        for child in self._children:
            child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self, grace_s: float) -> None:
        """End every rank: SIGTERM first, SIGKILL after `grace_s`. Idempotent."""
        with self._lock:
            self._is_stopping = True
        lifecycle.terminate(self._children, grace_s, lifecycle.ALARM)
        shutil.rmtree(self._folder, ignore_errors=True)
