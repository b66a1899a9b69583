"""A TCP relay in front of a decode server, which holds requests up at a token of their streams.

The bytes up to the frame with that token are passed on, this one only if the fault loses nothing.
"""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_FRAME = re.compile(rb":baton [0-9a-f]{8} (\[\[[^\n]*\]\])\n")
_ID = re.compile(rb"\r\nx-request-id: ([^\r]*)\r\n", re.IGNORECASE)
_MAX_HELD_BYTES = 1 << 16  # of a frame's beginning
AT_REQUEST = -2
AT_ANSWER = -1
HOLD_S = 120.0


@dataclass
class Hold:
    """Where one request is held up, once, at whichever server is the first to send so many tokens.

    Args:
        after: tokens that are passed on before; or AT_REQUEST, AT_ANSWER: before any byte of it.
        loses: what is on its way back then.

    Attributes:
        asked, reached: a server was asked; it is held up.
        go: set by whoever waited for that.
    """

    after: int
    loses: bool = True
    asked: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def holds(self, num_tokens: int) -> bool:
        """True for one caller, after a wait."""
        with self._lock:
            if self.reached.is_set() or num_tokens <= self.after:
                return False
            self.reached.set()
        return self.go.wait(HOLD_S)


_Asked = list[
    Hold
]  # of what a connection has asked for last; none: it is not to be held up


class Cutter:
    """Relays connections to a port. `close` ends it.

    Args:
        holds: by the id of a request.

    Attributes:
        target: the port, of connections from now on.
    """

    def __init__(self, port: int, holds: Mapping[bytes, Hold]) -> None:
        self._holds = holds
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
            asked: _Asked = []
            told = near, far, asked
            there = threading.Thread(target=self._pass_requests, args=told, daemon=True)
            there.start()
            self._pass_answers(far, near, asked)
            there.join()
            with self._lock:
                self._open -= {near, far}

    def _pass_requests(
        self, near: socket.socket, far: socket.socket, asked: _Asked
    ) -> None:
        with _ending(near, far):
            while data := near.recv(1 << 16):
                if data.startswith((b"GET ", b"POST ")):
                    name = _ID.search(data) if data.startswith(b"POST /v1/") else None
                    asked[:] = (
                        [self._holds[name[1]]]
                        if name and name[1] in self._holds
                        else []
                    )
                    for hold in asked:
                        hold.asked.set()
                        hold.holds(AT_ANSWER)
                self._passes.wait()
                far.sendall(data)

    def _pass_answers(
        self, far: socket.socket, near: socket.socket, asked: _Asked
    ) -> None:
        num_tokens, held, is_lost = 0, b"", False

        def hold_up() -> None:
            nonlocal is_lost
            for hold in asked:
                if hold.holds(num_tokens):
                    is_lost = hold.loses

        def send(data: bytes) -> None:
            self._passes.wait()
            if not is_lost:
                near.sendall(data)

        with _ending(far, near):
            while data := far.recv(1 << 16):
                if data.startswith(b"HTTP/"):  # the next one over this connection
                    num_tokens, held = 0, b""
                hold_up()
                begin, end, sent = len(held), 0, 0
                held += data
                for frame in _FRAME.finditer(held):
                    start, end = max(frame.start() - begin, 0), frame.end()
                    send(data[sent:start])
                    sent = start
                    num_tokens += sum(len(entry[1]) for entry in json.loads(frame[1]))
                    hold_up()
                send(data[sent:])
                held = held[end:][-_MAX_HELD_BYTES:]


@contextlib.contextmanager
def _ending(*ends: socket.socket) -> Iterator[None]:
    """Both, when one of them has ended."""
    with contextlib.suppress(OSError):
        yield
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
