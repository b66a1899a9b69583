"""Processes of this host by identity: a process id alone may be another's a moment later."""

import os
import select
import socket
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from protocol.handshake import ProcessRecord

_STATE, _FLAGS, _STARTED = 0, 6, 19  # fields of /proc/PID/stat after the name
_EXITING = 0x4  # of the flags


class ProcessGone(Exception):
    """This process is not there, or cannot be seen from here; the text says which."""


class ProcessEnded(ProcessGone):
    """It was there: its number is nobody's now, or another's."""


@lru_cache(maxsize=1)
def host_id() -> str:
    """Equal for two processes on one running kernel, in whatever containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def own_record() -> ProcessRecord | None:
    """This process, for others to find; None on a system that does not say enough."""
    try:
        pid, started = os.getpid(), _started(os.getpid())
        return ProcessRecord(
            host=host_id(), pid_namespace=_pid_namespace(), pid=pid, started=started
        )
    except OSError:
        return None


class Watched:
    """Processes that can be told from their successors.

    Raises ProcessEnded if one has ended, ProcessGone if one cannot be watched from here."""

    def __init__(self, records: Iterable[ProcessRecord]) -> None:
        self._fds: list[int] = []
        self._poll = select.poll()
        try:
            for record in set(records):
                self._watch(record)
        except OSError as error:
            has_ended = isinstance(error, ProcessLookupError) or self._poll.poll(0)
            self.close()
            if has_ended:
                raise ProcessEnded("one of its processes has ended") from error
            raise ProcessGone(f"its processes cannot be watched: {error}") from error
        except ProcessGone:
            self.close()
            raise

    def all_alive(self) -> bool:
        """None has ended. As a process id is another's only after that, each was until now what
        it is called."""
        return bool(self._fds) and not self._poll.poll(0)

    def close(self) -> None:
        while self._fds:
            fd = self._fds.pop()
            self._poll.unregister(fd)
            os.close(fd)

    def _watch(self, record: ProcessRecord) -> None:
        if record.host != host_id():
            raise ProcessGone("it is on another host")
        if record.pid_namespace != _pid_namespace():
            raise ProcessGone("its processes have other numbers here")
        fd = os.pidfd_open(record.pid)
        self._fds.append(fd)
        self._poll.register(fd, select.POLLIN)
        # After the descriptor was had, so that it is this process's and no predecessor's.
        if _started(record.pid) != record.started or self._poll.poll(0):
            raise ProcessEnded(f"process {record.pid} has ended")


def is_ending(pid: int) -> bool:
    """Whether a process has ended or is being torn down, which takes seconds where it holds a GPU's
    memory. Its connections break only then."""
    try:
        fields = _fields(pid)
    except OSError:
        return True
    return fields[_STATE] in "ZX" or bool(int(fields[_FLAGS]) & _EXITING)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int:
    return int(_fields(pid)[_STARTED])


def _fields(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()
