"""Messages between the nodes of one server, and the handshake of their connections.

Nodes other than node 0 open all connections, to node 0 at --rendezvous. The handshake:

    node N -> node 0: Hello      which connection this is, and a nonce
    node 0 -> node N: Challenge  a nonce, and the proof that node 0 has the secret
    node N -> node 0: Proof      the proof that node N has the secret

A proof is an HMAC of the Hello and the nonce of the Challenge, with the cluster secret
as its key. After the handshake, a connection for a rank (`Hello.rank`) belongs to that
rank and carries the messages of engine/worker/ranks.py. On other connections, each
message has a MAC with the connection's key. The MAC also covers the message's number.
"""

import hashlib
import hmac
import secrets
import socket
import time
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from protocol.ipc.wire import framed
from protocol.version import VERSION

# Maximum size of a frame from a peer that has not yet proved that it has the secret.
_MAX_GREETING_BYTES = 4096
_MAC_BYTES = 32
_NONCE_BYTES = 16
_FROM_NODE_0 = b"baton node 0\0"
_TO_NODE_0 = b"baton node N\0"
_SESSION_KEY = b"baton node session\0"

_Nonce = Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
_T = TypeVar("_T")
_ShortText = Annotated[str, Meta(max_length=128)]
# Each rank has one connection for steps and one for pulls (engine/worker/ranks.py).
Channel = Literal["steps", "pulls"]
CHANNELS: tuple[Channel, ...] = ("steps", "pulls")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="baton-node"):
    """The first message of a connection.

    Attributes:
        rank: The rank that the connection is for. None: for the node itself.
        session: The incarnation of the engine. Set only on a connection for a rank.
    """

    version: _ShortText
    node_rank: Annotated[int, Meta(ge=0, le=63)]
    nnodes: Annotated[int, Meta(ge=1, le=64)]
    nonce: _Nonce
    rank: int | None = None
    channel: Channel = "steps"
    session: _ShortText = ""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """Node 0's answer to a Hello, in the handshake that this module describes."""

    version: _ShortText
    nnodes: Annotated[int, Meta(ge=1, le=64)]
    nonce: _Nonce
    proof: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag="proof"):
    """The other node's answer to a Challenge, in the handshake of this module."""

    proof: bytes


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The model and the options of a node, for the comparison in agreement.py.

    Attributes:
        fingerprint: The fingerprint of the model's config and weights.
        model: The model and revision, for messages.
        options: The values of options as JSON, by name.
    """

    fingerprint: str
    model: str
    options: dict[str, str]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Node 0 requests that a node start its ranks.

    Attributes:
        store_port: The port of torch's store on node 0, through which the ranks'
            collectives connect.
    """

    engine_id: str
    incarnation: str
    store_port: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Node 0 reports that the server is ready."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """A node has received a stop signal. Node 0 then drains the server."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Node 0 has drained and ended the server, so every node exits with status 0."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The server ends because of a failure. Every node reports `reason`."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The sender is alive. Both ends of a connection send heartbeats."""


Message = NodeReport | Start | Ready | Leaving | Stop | Failed | Heartbeat
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class BadGreeting(Exception):
    """The peer violates the protocol that this module implements."""


class Disagreement(Exception):
    """Two nodes have different secrets, versions or --nnodes, and cannot form a server.

    Both nodes report the same message.
    """


def greet(sock: socket.socket, hello: Hello, secret: bytes) -> bytes:
    """Performs the handshake on a connection to node 0. Returns the connection's key.

    Args:
        sock: the connected socket. Its timeout applies to each frame of the handshake.

    Raises:
        Disagreement: the nodes have different versions, secrets or --nnodes.
        BadGreeting, OSError: the peer is not node 0, or the connection is lost.
    """
    hello_frame = msgspec.msgpack.encode(hello)
    sock.sendall(framed(hello_frame))
    challenge = _decode(_receive_frame(sock), Challenge)
    check_versions(challenge.version, challenge.nnodes, hello)
    transcript = hello_frame + challenge.nonce
    proof = _mac(secret, _TO_NODE_0, transcript)
    # The proof is sent even if node 0 has a different secret, so that node 0 also
    # detects the difference.
    sock.sendall(framed(msgspec.msgpack.encode(Proof(proof=proof))))
    if not hmac.compare_digest(challenge.proof, _mac(secret, _FROM_NODE_0, transcript)):
        raise Disagreement(different_secrets(hello.node_rank))
    return _mac(secret, _SESSION_KEY, transcript)


def receive_greeting(
    sock: socket.socket, secret: bytes, nnodes: int
) -> tuple[Hello, bytes]:
    """Performs node 0's side of the handshake on a connection from another node.

    Returns the peer's Hello and the key of the connection.

    Args:
        sock: the connected socket. Its timeout applies to each frame of the handshake.

    Raises:
        Disagreement, BadGreeting, OSError: see `greet`.
    """
    hello_frame = _receive_frame(sock)
    hello = _decode(hello_frame, Hello)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    transcript = hello_frame + nonce
    challenge = Challenge(
        version=VERSION,
        nnodes=nnodes,
        nonce=nonce,
        proof=_mac(secret, _FROM_NODE_0, transcript),
    )
    sock.sendall(framed(msgspec.msgpack.encode(challenge)))
    check_versions(VERSION, nnodes, hello)
    proof = _decode(_receive_frame(sock), Proof)
    if not hmac.compare_digest(proof.proof, _mac(secret, _TO_NODE_0, transcript)):
        raise Disagreement(different_secrets(hello.node_rank))
    return hello, _mac(secret, _SESSION_KEY, transcript)


def new_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


def check_versions(version: str, nnodes: int, hello: Hello) -> None:
    """Raises Disagreement if the sender of `hello` has another version or --nnodes.

    Args:
        version: Baton's version on node 0.
        nnodes: the value of --nnodes on node 0.
    """
    if version != hello.version:
        raise Disagreement(
            f"nodes 0 and {hello.node_rank} have different versions of Baton: "
            f"{version} and {hello.version}; install the same version on all nodes"
        )
    if nnodes != hello.nnodes:
        raise Disagreement(
            f"nodes 0 and {hello.node_rank} differ in --nnodes: {nnodes} on node 0, "
            f"{hello.nnodes} on node {hello.node_rank}; give every node the same "
            "options except --node-rank"
        )


def different_secrets(node_rank: int) -> str:
    """Returns the error message for a node with a different secret than node 0."""
    return (
        f"nodes 0 and {node_rank} have different cluster secrets; set "
        "BATON_CLUSTER_SECRET to the same text on all nodes (openssl rand -hex 32)"
    )


def seal(message: Message, key: bytes, label: bytes, number: int) -> bytes:
    """Returns a message with its MAC in front.

    Args:
        key: the key of the connection.
        label: names the direction, so that a message that is sent back is not valid.
        number: number of earlier messages in this direction.
    """
    payload = msgspec.msgpack.encode(message)
    return _mac(key, label, number.to_bytes(8) + payload) + payload


def unseal(frame: bytes, key: bytes, label: bytes, number: int) -> Message:
    """Returns the message of a frame. Raises BadGreeting if the frame is forged."""
    payload = frame[_MAC_BYTES:]
    expected_mac = _mac(key, label, number.to_bytes(8) + payload)
    if not hmac.compare_digest(frame[:_MAC_BYTES], expected_mac):
        raise BadGreeting("a message has a wrong signature")
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise BadGreeting(f"a message is malformed: {error}") from error


def label_of(node_rank: int) -> bytes:
    """Returns the label of messages from a node; see `seal`."""
    return _TO_NODE_0 if node_rank else _FROM_NODE_0


def _mac(key: bytes, label: bytes, content: bytes) -> bytes:
    return hmac.digest(key, label + content, hashlib.sha256)


def _decode(frame: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except msgspec.MsgspecError as error:
        raise BadGreeting(f"a message is malformed: {error}") from error


def _receive_frame(sock: socket.socket) -> bytes:
    """Returns the next frame of a handshake.

    Raises:
        TimeoutError: The frame is not complete within the timeout of the socket,
            although some of its bytes may have arrived.
        BadGreeting: The frame is too long, or the connection has ended.
    """
    timeout_s = sock.gettimeout()
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        length = int.from_bytes(_receive_exactly(sock, 4, deadline_s), "little")
        if length > _MAX_GREETING_BYTES:
            raise BadGreeting("the peer is not a node of a server of Baton")
        return _receive_exactly(sock, length, deadline_s)
    finally:
        sock.settimeout(timeout_s)


def _receive_exactly(
    sock: socket.socket, num_bytes: int, deadline_s: float | None
) -> bytes:
    content = b""
    while len(content) < num_bytes:
        if deadline_s is not None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(remaining_s)
        part = sock.recv(num_bytes - len(content))
        if not part:
            raise BadGreeting("the peer closed the connection")
        content += part
    return content
