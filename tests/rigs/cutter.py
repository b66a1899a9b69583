"""A TCP relay in front of a decode server. It can stop a request at a given token of
the request's stream.

The relay passes on all bytes before the frame with that token. It passes on the frame
itself only if `Hold.loses_bytes` is false.
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
_MAX_PARTIAL_FRAME_BYTES = 1 << 16
AT_REQUEST = -2
AT_ANSWER = -1
HOLD_S = 120.0


@dataclass
class Hold:
    """The point at which the relays stop a request until the test releases it.

    A request may run on several servers. Only the relay of the server that first sends
    more than `after` tokens stops the request.

    Args:
        after: number of tokens that are passed on before the stop. AT_REQUEST stops the
            request before it is sent, AT_ANSWER stops the answer before its first byte.
        loses_bytes: whether the relay discards the bytes that the server has sent
            beyond this point.

    Attributes:
        requested: set when a relay has received the request.
        reached: set when the request is stopped.
        go: set by the test to release the request.
    """

    after: int
    loses_bytes: bool = True
    requested: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stop_here(self, num_tokens: int) -> bool:
        """Block the caller until `go` is set, if `num_tokens` exceeds `after` and no
        caller was blocked before.

        Return True if the caller was blocked and `go` was set within HOLD_S.
        """
        with self._lock:
            if self.reached.is_set() or num_tokens <= self.after:
                return False
            self.reached.set()
        return self.go.wait(HOLD_S)


# A list with the hold of a connection's latest request. It is empty if that request has
# no hold.
_Holds = list[Hold]


class Cutter:
    """Relays connections to a port until `close`. A test can cut all connections, or
    stop a request at its `Hold`.

    Args:
        port: the first value of `target`.
        holds: maps the id of a request to the point at which it is stopped.

    Attributes:
        target: the port to which new connections go.
    """

    def __init__(self, port: int, holds: Mapping[bytes, Hold]) -> None:
        self._holds = holds
        self.target = port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()  # guards _open
        self._passes = threading.Event()
        self._passes.set()
        self._is_cut = False
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections. Until `mend`, also close each new one at once."""
        self._is_cut = True
        self._hang_up()

    def swallow(self) -> None:
        """Pass on nothing in either direction until `mend`."""
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
                client_socket, _ = self._listener.accept()
            except OSError:
                continue
            try:
                if self._is_cut:
                    raise OSError
                server_socket = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client_socket.close()
                continue
            threading.Thread(
                target=self._relay, args=(client_socket, server_socket), daemon=True
            ).start()

    def _relay(
        self, client_socket: socket.socket, server_socket: socket.socket
    ) -> None:
        with client_socket, server_socket:
            with self._lock:
                self._open |= {client_socket, server_socket}
            holds: _Holds = []
            requests = threading.Thread(
                target=self._pass_requests,
                args=(client_socket, server_socket, holds),
                daemon=True,
            )
            requests.start()
            self._pass_answers(server_socket, client_socket, holds)
            requests.join()
            with self._lock:
                self._open -= {client_socket, server_socket}

    def _pass_requests(
        self, client_socket: socket.socket, server_socket: socket.socket, holds: _Holds
    ) -> None:
        """Pass on requests. Update `holds` at the start of each request."""
        with _ending(client_socket, server_socket):
            while data := client_socket.recv(1 << 16):
                if data.startswith((b"GET ", b"POST ")):
                    holds[:] = self._holds_of(data)
                    for hold in holds:
                        hold.requested.set()
                        hold.stop_here(AT_ANSWER)
                self._passes.wait()
                server_socket.sendall(data)

    def _holds_of(self, head: bytes) -> _Holds:
        """Return the hold of a request that begins with `head`, if it has one."""
        match = _ID.search(head) if head.startswith(b"POST /v1/") else None
        if match is None or match[1] not in self._holds:
            return []
        return [self._holds[match[1]]]

    def _pass_answers(
        self, server_socket: socket.socket, client_socket: socket.socket, holds: _Holds
    ) -> None:
        """Pass on answers, and stop each at the frame that its hold specifies."""
        num_tokens = 0
        unparsed = b""  # the data after the last complete frame
        is_lost = False

        def stop_at_hold() -> None:
            nonlocal is_lost
            for hold in holds:
                if hold.stop_here(num_tokens):
                    is_lost = hold.loses_bytes

        def send(data: bytes) -> None:
            self._passes.wait()
            if not is_lost:
                client_socket.sendall(data)

        with _ending(server_socket, client_socket):
            while data := server_socket.recv(1 << 16):
                if data.startswith(b"HTTP/"):  # the next answer of this connection
                    num_tokens = 0
                    unparsed = b""
                stop_at_hold()
                num_before = len(unparsed)
                parsed = 0
                sent = 0
                unparsed += data
                for frame in _FRAME.finditer(unparsed):
                    start = max(frame.start() - num_before, 0)
                    parsed = frame.end()
                    send(data[sent:start])
                    sent = start
                    num_tokens += sum(len(entry[1]) for entry in json.loads(frame[1]))
                    stop_at_hold()
                send(data[sent:])
                unparsed = unparsed[parsed:][-_MAX_PARTIAL_FRAME_BYTES:]


@contextlib.contextmanager
def _ending(*ends: socket.socket) -> Iterator[None]:
    """Shut down all `ends` when the block ends.

    An OSError ends the block and is suppressed.
    """
    with contextlib.suppress(OSError):
        yield
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
