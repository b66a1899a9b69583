"""A TCP relay in front of a decode server, which does something to it at a given frame of a stream.

The bytes up to that frame are passed on, the frame itself only if the fault leaves the server be.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_FRAME = b":baton "


@dataclass
class Fault:
    """What happens, once, at whichever server is the first to send so many frames of one stream.

    Args:
        act: gets the relay in front of it.
        after: frames that are passed on before, the stream's head among them.
    """

    act: Callable[["Cutter"], None]
    after: int
    happened: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_due(self, num_frames: int) -> bool:
        """True for one caller."""
        with self._lock:
            if self.happened.is_set() or num_frames <= self.after:
                return False
            self.happened.set()
            return True


class Cutter:
    """Relays connections to a port. `close` ends it.

    Attributes:
        fault: None: it only relays.
        target: the port, of connections from now on.
    """

    def __init__(self, port: int) -> None:
        self.fault: Fault | None = None
        self.target = port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()  # of these
        self._passes = threading.Event()
        self._passes.set()
        self._is_cut = self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections, and each new one, until `mend`."""
        self._is_cut = True
        self._hang_up()

    def swallow(self) -> None:
        """Passes nothing on any more, either way, until `mend`."""
        self._passes.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._passes.set()

    def close(self) -> None:
        self._is_closed = True
        self._listener.close()
        self.mend()
        self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                continue
            try:
                if self._is_cut:
                    raise OSError
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._relay, args=(near, far), daemon=True).start()

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            with self._lock:
                self._open |= {near, far}
            there = threading.Thread(target=self._pass_on, args=(near, far, False), daemon=True)
            there.start()
            self._pass_on(far, near, True)
            there.join()
            with self._lock:
                self._open -= {near, far}

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        num_frames, tail = 0, b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer:
                    if data.startswith(b"HTTP/"):  # the next answer over this connection
                        num_frames, tail = 0, b""
                    num_frames += (tail + data).count(_FRAME)
                    tail = data[1 - len(_FRAME) :]
                    if (fault := self.fault) and fault.is_due(num_frames):
                        fault.act(self)
                self._passes.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
