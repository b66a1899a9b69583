"""Opens the socket at which node 0 listens for the other nodes."""

import socket
import time
from collections.abc import Callable

from engine.prepare import StartFailure
from protocol.ipc.wire import CannotListen, bind
from protocol.settings.machine import is_local
from protocol.settings.settings import EngineSettings

_BACKLOG = 256
_RETRY_S = 0.5


def listen_at_rendezvous(
    settings: EngineSettings, failure: Callable[[], str | None]
) -> socket.socket:
    """Returns a socket that listens at --rendezvous, on node 0.

    If the host name cannot be resolved, the look-up is repeated until the timeout: in
    Kubernetes, a pod's name can be resolved only some time after the pod's start.

    Args:
        failure: returns the reason if the server has failed to start for another cause;
            otherwise None.

    Raises:
        StartFailure: `failure` returned a reason, the address does not belong to this
            machine or is a loopback address, or the port is in use.
    """
    host, port = settings.rendezvous_address
    deadline_s = time.monotonic() + settings.rendezvous_timeout_s
    while True:
        try:
            listener = bind(host, port, "--rendezvous")
            break
        except CannotListen as error:
            cause = error.__cause__
            is_unresolved = isinstance(cause, socket.gaierror)
            if not is_unresolved or time.monotonic() >= deadline_s:
                reason = getattr(cause, "strerror", None) or str(cause)
                raise StartFailure(
                    f"cannot listen at --rendezvous {settings.rendezvous} "
                    f"({reason}); give an address of node 0 and a free port there"
                ) from error
        time.sleep(_RETRY_S)
        if reason := failure():
            raise StartFailure(reason)
    _check_is_reachable(listener, settings)
    listener.listen(_BACKLOG)
    return listener


def _check_is_reachable(listener: socket.socket, settings: EngineSettings) -> None:
    """Raises StartFailure if node 0 resolves its own name to a loopback address.

    On some systems, /etc/hosts maps the machine's name to a loopback address."""
    host, port = settings.rendezvous_address
    address = str(listener.getsockname()[0])
    if is_local(address) and not is_local(host):
        listener.close()
        raise StartFailure(
            f"--rendezvous {settings.rendezvous} is {address} on node 0, which other "
            "nodes cannot reach; give every node the IP address of node 0 instead: "
            f"--rendezvous ADDRESS:{port}"
        )
