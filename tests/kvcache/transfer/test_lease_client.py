"""What the client does where its own host has nothing left to give."""

import threading

import pytest

from kvcache.transfer.session.lease_client import LeaseClient
from protocol.handshake import GetMetadata


def test_a_name_that_no_thread_can_look_up_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client = LeaseClient(b"cluster secret")
    address = ("no-such-host.invalid", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        client.post(address, GetMetadata(nonce="n"))
    assert address in client.unconnected()
    assert client.retry_in_s() < 1.0
    client.close()
