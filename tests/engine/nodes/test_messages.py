"""Greetings that begin connections between nodes, over real sockets."""

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.nodes.messages import (
    BadGreeting,
    Disagreement,
    Failed,
    Hello,
    greet,
    label_of,
    new_nonce,
    receive_greeting,
    seal,
    unseal,
)
from protocol.version import VERSION

_SECRET = b"a secret of these tests"
_TIMEOUT_S = 20.0


def _hello(**fields: Any) -> Hello:
    values: dict[str, Any] = {
        "version": VERSION,
        "node_rank": 1,
        "nnodes": 2,
        "nonce": new_nonce(),
        **fields,
    }
    return Hello(**values)


def _result(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (Disagreement, BadGreeting) as error:
        return error


def _meet(hello: Hello, secret: bytes = _SECRET) -> tuple[Any, Any]:
    """Return the results of both ends: of node 0, then of the other node."""
    with ThreadPoolExecutor(1) as pool:
        first, other = socket.socketpair()
        with first, other:
            for end in (first, other):
                end.settimeout(_TIMEOUT_S)
            receiving = pool.submit(_result, receive_greeting, first, _SECRET, 2)
            sent = _result(greet, other, hello, secret)
            return receiving.result(_TIMEOUT_S), sent


def test_both_ends_get_the_same_key():
    hello = _hello(rank=3, channel="pulls", session="x")
    (received_hello, key), other_key = _meet(hello)
    assert received_hello == hello
    assert key == other_key


@pytest.mark.parametrize(
    ("hello", "secret", "message"),
    [
        (_hello(), b"another secret", "nodes 0 and 1 have different cluster secrets"),
        (_hello(version="9"), _SECRET, f"versions of Baton: {VERSION} and 9;"),
        (_hello(nnodes=4), _SECRET, "differ in --nnodes: 2 on node 0, 4 on node 1"),
    ],
    ids=["secret", "version", "nnodes"],
)
def test_both_ends_report_the_same_difference(hello, secret, message):
    first, other = _meet(hello, secret)
    assert isinstance(first, Disagreement) and isinstance(other, Disagreement)
    assert message in str(first)
    assert str(first) == str(other)


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x02\0\0\0\x80\x04", b"\x01\0\0\0\xc1", b""]
)
def test_a_stranger_is_refused_without_an_answer(sent):
    first, stranger = socket.socketpair()
    with first, stranger:
        first.settimeout(_TIMEOUT_S)
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(BadGreeting):
            receive_greeting(first, _SECRET, 2)
        first.close()
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


@pytest.mark.parametrize(
    ("key", "node_rank", "number"),
    [(b"other", 1, 0), (b"key", 0, 0), (b"key", 1, 1)],
    ids=["key", "direction", "repetition"],
)
def test_a_message_is_valid_once_and_in_one_direction(key, node_rank, number):
    frame = seal(Failed("x"), b"key", label_of(1), 0)
    assert unseal(frame, b"key", label_of(1), 0) == Failed("x")
    with pytest.raises(BadGreeting, match="wrong signature"):
        unseal(frame, key, label_of(node_rank), number)


def test_slow_greeting_ends_at_the_timeout_of_the_whole_frame():
    """A stranger sends a byte every 20 ms, so that no single read times out."""
    first, stranger = socket.socketpair()
    has_ended = threading.Event()

    def send_slowly() -> None:
        stranger.sendall((1000).to_bytes(4, "little"))
        while not has_ended.wait(0.02):
            stranger.sendall(b"x")

    with first, stranger:
        first.settimeout(0.2)
        sender = threading.Thread(target=send_slowly)
        sender.start()
        with pytest.raises(TimeoutError):
            receive_greeting(first, _SECRET, 2)
        assert first.gettimeout() == 0.2
        has_ended.set()
        sender.join()
