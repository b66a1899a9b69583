"""The address that a process listens on, and the error if it is not available."""

import errno
import socket


class CannotListen(OSError):
    """Says where, why, and which option to change; `port_option` if it is the port."""

    def __init__(self, host: str, port: int, error: OSError, port_option: str = "--port") -> None:
        is_of_the_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        option = port_option if is_of_the_port else "--host"
        super().__init__(f"cannot listen on {host}:{port} ({error.strerror}); use another {option}")


def bind(host: str, port: int, port_option: str = "--port") -> socket.socket:
    """A socket bound to a TCP port; 0 takes a free one.

    Args:
        port_option: what to change if another has the port.

    Raises:
        CannotListen: the name is unknown, or the address is not ours or another's.
    """
    try:
        return _bound(host, port)
    except OSError as error:
        raise CannotListen(host, port, error, port_option) from error


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except TypeError as error:  # no encoding of it is a name
        sock.close()
        raise OSError(errno.EINVAL, str(error)) from error
    except OSError:
        sock.close()
        raise
    return sock
