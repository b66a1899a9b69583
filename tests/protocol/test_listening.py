"""If a socket cannot listen, the error has the address, the reason and the option to
change.
"""

import socket

import pytest

from protocol.ipc.wire import CannotListen, bind


def test_bind_chooses_a_free_port_and_refuses_a_port_in_use():
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        socket.create_connection(sock.getsockname()).close()
        port = sock.getsockname()[1]
        message = rf"127.0.0.1:{port} \(Address already in use\); use another --port$"
        with pytest.raises(CannotListen, match=message):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("256.1.1.1", "Name or service not known"),
        ("203.0.113.1", "Cannot assign"),
        # This address is link-local and lacks the name of a network interface.
        ("fe80::1", "Invalid argument|Address family"),
        ("ü..b", "encoding"),
    ],
)
def test_address_of_another_machine_is_refused_with_the_host_option(host, reason):
    with pytest.raises(
        CannotListen, match=rf"{host}:0 \(({reason}).*\); use another --host$"
    ):
        bind(host, 0)
