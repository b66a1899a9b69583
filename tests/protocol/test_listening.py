"""Where one cannot listen, the message names the address, the reason and the option to change."""

import socket

import pytest

from protocol.ipc.wire import CannotListen, bind


def test_a_free_port_is_taken_and_may_be_listened_on():
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        socket.create_connection(sock.getsockname()).close()
        port = sock.getsockname()[1]
        told = rf"127.0.0.1:{port} \(Address already in use\); use another --port$"
        with pytest.raises(CannotListen, match=told):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("256.1.1.1", "Name or service not known"),
        ("203.0.113.1", "Cannot assign"),
        ("fe80::1", "Invalid argument|Address family"),  # of a link: of which
        ("ü..b", "encoding"),
    ],
)
def test_a_host_that_is_not_ours_is_named_with_the_option_of_the_host(host, reason):
    with pytest.raises(
        CannotListen, match=rf"{host}:0 \(({reason}).*\); use another --host$"
    ):
        bind(host, 0)
