"""Rank 0's sockets: requests from the HTTP process, tokens back to it, steps to the other ranks."""

import os

import zmq

from protocol.messages import (
    EngineFailed,
    EngineInput,
    EngineReady,
    EngineStats,
    Outputs,
    Shutdown,
    TokenDelta,
    decode_input,
    encode,
)

_LINGER_MS = 1000  # how long unsent answers may outlive the core


class ZmqTransport:
    """PULL for inputs, PUSH for outputs, and an eventfd by which other threads wake the core.

    Args:
        input_address, output_address: endpoints that the HTTP process has bound.
    """

    def __init__(self, input_address: str, output_address: str) -> None:
        self._context = zmq.Context()
        self._inputs = self._context.socket(zmq.PULL)
        self._inputs.connect(input_address)
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.setsockopt(zmq.SNDHWM, 0)  # never block or drop: the HTTP process reads on
        self._outputs.connect(output_address)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._inputs, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        """Waits for input or a wake-up, at most `timeout_s`; True once a Shutdown has come."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        messages: list[EngineInput] = []
        while self._inputs in ready:
            try:
                message = decode_input(self._inputs.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if isinstance(message, Shutdown):
                return messages, True
            messages.append(message)
        return messages, False

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def send(self, deltas: list[TokenDelta]) -> None:
        self._outputs.send(encode(Outputs(deltas)))

    def send_stats(self, values: dict[str, float]) -> None:
        self._outputs.send(encode(EngineStats(values)))

    def send_ready(self, ready: EngineReady) -> None:
        self._outputs.send(encode(ready))

    def send_failed(self, reason: str) -> None:
        self._outputs.send(encode(EngineFailed(reason)))

    def close(self) -> None:
        self._inputs.close(linger=0)
        self._outputs.close(linger=_LINGER_MS)
        self._context.term()
        os.close(self._wake_fd)
