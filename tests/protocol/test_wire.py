"""The framing of messages between processes."""

import socket

import pytest

from protocol.ipc.wire import Wire, WireClosed, framed

FIRST = b"first"
LONG = b"x" * 1000


@pytest.mark.parametrize("is_raised", [True, False])
def test_first_message_may_raise_the_limit_of_a_message_right_behind_it(is_raised):
    """A peer may send long messages only after an authentic short one. One read can
    return both."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(ours, max_bytes=100)
        theirs.sendall(framed(FIRST) + framed(LONG))
        assert wire.receive() == [FIRST]
        if is_raised:
            wire.max_bytes = len(LONG)
            assert wire.receive() == [LONG]
        else:
            with pytest.raises(WireClosed, match="1000 bytes, the limit is 100"):
                wire.receive()
