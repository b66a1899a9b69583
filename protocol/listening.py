"""The address that a process listens on, and what to say when it cannot be had."""

import errno
import socket


class CannotListen(OSError):
    """Says where, why, and which option to change; `port_option` if it is the port."""

    def __init__(self, host: str, port: int, error: OSError, port_option: str = "--port") -> None:
        is_of_the_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        option = "--host" if is_of_the_host else port_option
        super().__init__(f"cannot listen on {host}:{port} ({error.strerror}); use another {option}")


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to a TCP port; 0 takes a free one.

    Raises:
        CannotListen: the name is unknown, or the address is not ours or another's.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise CannotListen(host, port, error) from error
    return sock
