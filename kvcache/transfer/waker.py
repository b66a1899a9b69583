"""Waking a thread that blocks in a ZMQ poll, from any other thread."""

import threading

import zmq


class Waker:
    """`wake` from any thread makes `socket` readable; the polling thread then calls `clear`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._lock = threading.Lock()
        self.socket = context.socket(zmq.PAIR)
        self._sender = context.socket(zmq.PAIR)
        endpoint = f"inproc://waker-{id(self)}"
        self.socket.bind(endpoint)
        self._sender.connect(endpoint)

    def wake(self) -> None:
        with self._lock:
            if self._sender.closed:
                return
            try:
                self._sender.send(b"", zmq.NOBLOCK)
            except zmq.Again:
                pass  # so many are waiting already that this one is not needed

    def clear(self) -> None:
        while True:
            try:
                self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def close(self) -> None:
        """From the polling thread, or when it has ended."""
        with self._lock:
            self._sender.close(linger=0)
        self.socket.close(linger=0)
