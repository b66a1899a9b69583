"""A node that cannot join node 0 exits with an error that names the reason."""

import socket
import threading
from contextlib import suppress

import pytest

from engine.nodes.link import NodeLink
from engine.nodes.member import Member
from engine.prepare import StartFailure
from protocol.settings.settings import DecodeSettings


def _settings(port: int) -> DecodeSettings:
    return DecodeSettings(
        _cli_parse_args=[],
        tp=2,
        nnodes=2,
        node_rank=1,
        rendezvous=f"127.0.0.1:{port}",
        rendezvous_timeout_s=0.2,
        cluster_secret="a secret of these tests",
    )


def _join(port: int) -> str:
    """Return the error of a node that fails to join node 0 at a port."""
    with pytest.raises(StartFailure) as caught:
        Member(_settings(port), "-")._join()
    return str(caught.value)


def test_a_program_that_is_not_node_0_is_named():
    def answer(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # the test has ended
                return
            with sock, suppress(OSError):  # the node has closed the connection
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1000):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        reason = _join(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert "last failure: the peer is not a node of a server of Baton" in reason


def test_an_address_without_a_program_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        reason = _join(port)
    assert reason.startswith(
        f"node 0 did not answer at 127.0.0.1:{port} within 0.2 s "
        "(--rendezvous-timeout-s; last failure: [Errno 111] Connection refused); start"
    )


def test_unexpected_error_of_the_preparation_ends_the_node(monkeypatch, capfd):
    def join(_member: Member) -> NodeLink:
        raise KeyError("a defect")

    monkeypatch.setattr(Member, "_join", join)
    assert Member(_settings(port=1), "-").run() == 1
    assert "error: KeyError: 'a defect'\n" in capfd.readouterr().err
