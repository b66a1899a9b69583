"""Requests of the launcher and of `baton health` to a process on this machine."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from deploy.healthcheck import fetch, main


@contextlib.contextmanager
def program_that_sends(answer: bytes) -> Iterator[int]:
    """Run a program that sends `answer` to its first client, and then closes the
    connection. Yield the program's port.
    """

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(1000)
            client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nincomplete",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nincomplete",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
    ids=["cut off", "error cut off", "another protocol", "nothing"],
)
def test_answer_that_is_not_complete_http_is_an_oserror(answer):
    """If the proxy dies during a request of `baton up`, the answer is incomplete.
    `baton up` repeats a request that ends with an OSError.
    """
    with program_that_sends(answer) as port, pytest.raises(OSError):
        fetch(f"http://127.0.0.1:{port}/", timeout_s=10)


def test_health_of_another_program_is_one_line(monkeypatch, capsys):
    with program_that_sends(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        monkeypatch.setenv("BATON_HOST", "127.0.0.1")
        monkeypatch.setenv("BATON_PORT", str(port))
        assert main([]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"http://127.0.0.1:{port}/health: ")
    assert errors.count("\n") == 1
