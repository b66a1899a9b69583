"""The listener of a store. Engines connect to it to open regions."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, BaseSelector
from socket import socket

from protocol.handshake import MessageError
from protocol.ipc.kv_store import (
    MAX_MESSAGE_BYTES,
    OpenRegion,
    RegionRefused,
    StoreReply,
    read_open_region,
    seal_store_reply,
)
from protocol.ipc.wire import Wire, WireClosed, exchange, tune_socket, update_selector
from protocol.process.logging import get_logger

logger = get_logger(__name__)

# Beyond this number of connections, the oldest unauthenticated connection is closed.
MAX_CONNECTIONS = 256
# Maximum number of bytes that are read from one connection at once.
_READ_BYTES = 64 << 10


class StoreFront:
    """The connections of engines to a store. One thread uses this object.

    Args:
        listener: a non-blocking socket that listens.
        selector: the data of a key is the function to call when the socket is ready.
        open_region: returns the reply to an engine's request.
    """

    def __init__(
        self,
        listener: socket,
        selector: BaseSelector,
        secret: bytes,
        open_region: Callable[[OpenRegion], StoreReply],
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._secret = secret
        self._open_region = open_region
        # Each connection, oldest first, and whether it has sent an authentic message.
        self._wires: dict[Wire, bool] = {}
        selector.register(listener, EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the peer has disconnected, or no file descriptor is free
        tune_socket(sock)
        wire = Wire(sock, MAX_MESSAGE_BYTES, read_bytes=_READ_BYTES)
        self._wires[wire] = False
        self._selector.register(wire, EVENT_READ, partial(self._serve, wire))
        if len(self._wires) > MAX_CONNECTIONS:
            unauthenticated = (
                each for each, is_authentic in self._wires.items() if not is_authentic
            )
            self._drop(next(unauthenticated, wire))

    def _serve(self, wire: Wire) -> None:
        try:
            for message in exchange(self._selector, wire):
                reply = self._answer(wire, message)
                wire.send(seal_store_reply(reply, self._secret))
                if isinstance(reply, RegionRefused) and not self._wires[wire]:
                    raise WireClosed(reply.reason)
            update_selector(self._selector, wire)
        except WireClosed as error:
            logger.debug("a connection has ended: %s", error)
            self._drop(wire)

    def _answer(self, wire: Wire, message: bytes) -> StoreReply:
        try:
            request = read_open_region(message, self._secret)
        except MessageError as error:
            return RegionRefused(reason=str(error))
        self._wires[wire] = True
        return self._open_region(request)

    def _drop(self, wire: Wire) -> None:
        if wire in self._wires:
            del self._wires[wire]
            self._selector.unregister(wire)
            wire.close()

    def close(self) -> None:
        """Closes all connections, so that engines stop using the store."""
        for wire in list(self._wires):
            self._drop(wire)
        with suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()
