"""The engine's end of its link to the HTTP process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.process.transport import EngineTransport
from protocol.ipc.wire import framed
from protocol.messages import AbortRequest, Outputs, Shutdown, TokenDelta, decode_output, encode

WAIT_S = 20.0


@contextmanager
def linked(socket_folder: Path) -> Iterator[tuple[EngineTransport, socket.socket]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{socket_folder}/http")
        listener.listen(1)
        transport = EngineTransport(f"ipc://{socket_folder}/http")
        http, _ = listener.accept()
        http.settimeout(WAIT_S)
        with http:
            yield transport, http
    transport.close()


def read(http: socket.socket) -> list[TokenDelta]:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += http.recv(count - len(data))
        return data

    message = decode_output(exactly(int.from_bytes(exactly(4), "little")))
    assert isinstance(message, Outputs)
    return message.deltas


def test_messages_come_in_order_through_the_shutdown(socket_folder: Path) -> None:
    with linked(socket_folder) as (transport, http):
        assert transport.receive(0.0) == ([], False)
        both = framed(encode(AbortRequest("a"))) + framed(encode(AbortRequest("b")))
        http.sendall(both[:-1])
        assert transport.receive(WAIT_S) == ([AbortRequest("a")], False)
        http.sendall(both[-1:] + framed(encode(Shutdown())) + framed(encode(AbortRequest("c"))))
        assert transport.receive(WAIT_S) == ([AbortRequest("b")], True)


def test_another_thread_wakes_it(socket_folder: Path) -> None:
    with linked(socket_folder) as (transport, _):
        thread = threading.Thread(target=transport.wake)
        thread.start()
        assert transport.receive(WAIT_S) == ([], False)
        thread.join()


def test_an_http_process_that_is_gone_ends_the_engine(socket_folder: Path) -> None:
    with linked(socket_folder) as (transport, http):
        http.close()
        assert transport.receive(WAIT_S) == ([], True)
        transport.send([TokenDelta(request_id="a")])  # nobody is there to be told


def test_sending_never_waits_and_nothing_is_lost(socket_folder: Path) -> None:
    long = [TokenDelta(request_id=str(i), token_ids=[70_000] * 50_000) for i in range(12)]
    with linked(socket_folder) as (transport, http):
        for delta in long:
            transport.send([delta])
        found: list[TokenDelta] = []
        reader = threading.Thread(target=lambda: found.extend(d for _ in long for d in read(http)))
        reader.start()
        while reader.is_alive():
            assert transport.receive(0.05) == ([], False)
        assert found == long


def test_what_is_unsent_outlives_the_core(socket_folder: Path) -> None:
    long = [TokenDelta(request_id=str(i), token_ids=[70_000] * 50_000) for i in range(4)]
    with linked(socket_folder) as (transport, http):
        for delta in long:
            transport.send([delta])
        closing = threading.Thread(target=transport.close)
        closing.start()
        assert [read(http)[0] for _ in long] == long
        closing.join()


def test_nobody_listens(socket_folder: Path) -> None:
    with pytest.raises(OSError):
        EngineTransport(f"ipc://{socket_folder}/http")
