"""Stream failover: the frames by which a proxy can move a stream to another server.

A proxy that holds the cluster secret requests frames by a signed header. The stream
then consists of frames. A frame is an SSE comment, followed by the complete events that
the comment describes:

    :baton 0000012c [[0,[791]]]\\n      300 bytes (hex 12c) of events follow this line;
                                       the JSON text lists their tokens by choice

The proxy forwards the events to the client, and stores the texts of the comments. If
the server does not complete the stream, the proxy sends the request to another server,
with the signed texts as `baton_resume`. A response that is not a stream has frames only
if it migrates. In that case, the server sends all texts at the end. Only the last of
these frames has an event: the error for the case that no server continues.

The first text (`Origin`) has the values that the response depends on in addition to its
request and its tokens. A text that begins with `!` precedes an error event after which
another server may continue the stream. One of these texts is `!moved`; it contains the
`kv_transfer_params` with which another server pulls the KV. A text that begins with `#`
precedes the last events. It contains the server's RequestReport, for the proxy's log
line.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import msgspec

from protocol.errors import BatonError, EngineDied, ResumeRejected
from protocol.messages import KVUsage, TokenDelta, TokenLogprobs

# In a request, the value of this header is a MAC. In a response, the header announces
# frames.
HEADER = "x-baton-frames"
MEMBER = "baton_resume"  # member of a request's body
# Limit on the total size of the texts of a stream's frames. A larger stream cannot fail
# over.
MAX_HISTORY_BYTES = 1 << 20
FAILOVER_PREFIX = b"!"  # prefix of texts after which another server may continue
REPORT_PREFIX = b"#"  # prefix of the text with the server's report
DIED = b"!died"  # the engine has ended
BUSY = b"!busy"  # this server cannot continue the stream, but another server may
# The server has migrated the stream; the JSON of `kv_transfer_params` follows.
MOVED = b"!moved "
_FRAMES_LABEL = b"baton frames\n"
_RESUME_LABEL = b"baton resume\n"
_MARK = b":baton "
_SIZE_OFFSET = len(_MARK)
_TEXT_OFFSET = len(_MARK) + 9
_encode = msgspec.json.Encoder().encode


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The values with which another server continues a response.

    With them, the other server generates the same tokens, or detects that it cannot.

    Attributes:
        id: The id of the response.
        created: Time at which the response began, in seconds since 1970.
        seed: The seed of the sampler.
        limits: For each prompt, the maximum number of generated tokens of a choice.
        digest: Digest of all other values that determine the tokens, such as the
            prompts, the sampling parameters, the model and the dtype.
    """

    id: str
    created: int
    seed: int
    limits: list[int]
    digest: str


class FrameEntry(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one TokenDelta adds to a choice; one entry of a frame's text."""

    index: int  # of the choice in the response
    token_ids: list[int]
    finish_reason: str | None = None
    usage: KVUsage | None = None
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    # Present only if a later part of the response needs these logprobs: the response is
    # not a stream, or an event at the end of the stream repeats the logprobs.
    logprobs: list[TokenLogprobs] | None = None

    def to_delta(self, request_id: str, choice: int) -> TokenDelta:
        """Returns a TokenDelta with the members of this entry.

        Args:
            choice: Index of the choice among the choices of the same prompt.
        """
        return TokenDelta(
            request_id=request_id,
            choice=choice,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            usage=self.usage,
            accepted_tokens=self.accepted_tokens,
            rejected_tokens=self.rejected_tokens,
            logprobs=self.logprobs,
        )


class Resume(msgspec.Struct, frozen=True):
    """The state of a stream that one server began and another server continues."""

    origin: Origin
    frames: list[list[FrameEntry]]


class _Signed(msgspec.Struct):
    texts: list[Any]
    mac: str


def frames_request(secret: bytes, request_id: bytes) -> bytes:
    """Returns the value of HEADER by which a proxy requests frames."""
    return hmac.digest(secret, _FRAMES_LABEL + request_id, "sha256").hex().encode()


def is_frames_request(secret: bytes, request_id: bytes, value: bytes) -> bool:
    """Returns whether `value` of HEADER is an authentic request for frames."""
    return bool(secret) and hmac.compare_digest(
        value, frames_request(secret, request_id)
    )


def frame(text: bytes, events: bytes) -> bytes:
    """Encodes one frame. `text` must not have a newline; encoded JSON has none."""
    return b"%b%08x %b\n%b" % (_MARK, len(events), text, events)


def failover_text(error: BatonError) -> bytes | None:
    """Returns the text for the frame of an error: DIED or BUSY.

    The result is None if no other server should continue the stream: every server would
    fail in the same way, or the request has timed out.
    """
    if not error.retryable or error.phase in ("request", "deadline"):
        return None
    return DIED if isinstance(error, EngineDied) else BUSY


def frame_entry(
    index: int, delta: TokenDelta, *, with_logprobs: bool = False
) -> list[Any]:
    """Returns a FrameEntry as a list. Members after `token_ids` are left out if all of
    them are empty.

    Args:
        index: Index of the choice in the response.
        with_logprobs: Include the logprobs.
    """
    optional_members: list[Any] = [
        delta.finish_reason,
        delta.usage,
        delta.accepted_tokens,
        delta.rejected_tokens,
    ]
    if with_logprobs:
        optional_members.append(delta.logprobs)
    if any(optional_members):
        return [index, delta.token_ids, *optional_members]
    return [index, delta.token_ids]


def encode_text(value: Origin | list[Any]) -> bytes:
    """Encodes the text of a frame: the stream's origin, or the entries of the frame."""
    return _encode(value)


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """The members of a FrameEntry that a proxy reads."""

    index: int
    token_ids: list[int]


_decode_entries = msgspec.json.Decoder(list[_Entry]).decode


def num_tokens_of(text: bytes) -> int:
    """Returns the number of tokens in a frame's text; 0 if the text has no entries."""
    try:
        return sum(len(entry.token_ids) for entry in _decode_entries(text))
    except msgspec.MsgspecError:
        return 0


class Frames:
    """Splits the bytes of a received stream into complete frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the (text, events) pair of each frame that `data` completes.

        Raises:
            ValueError: The bytes are not frames.
        """
        buffer = self._buffer
        # Fast path: nearly every piece of data is exactly one frame.
        if not buffer and data.startswith(_MARK):
            end = data.find(b"\n") + 1
            if end and end + int(data[_SIZE_OFFSET:_TEXT_OFFSET], 16) == len(data):
                return [(data[_TEXT_OFFSET : end - 1], data[end:])]
        buffer += data
        frames: list[tuple[bytes, bytes]] = []
        begin = 0
        while (end := buffer.find(b"\n", begin)) >= 0:
            if not buffer.startswith(_MARK, begin):
                raise ValueError("the stream has bytes outside of frames")
            size = int(buffer[begin + _SIZE_OFFSET : begin + _TEXT_OFFSET], 16)
            stop = end + 1 + size
            if stop > len(buffer):
                break
            text = bytes(buffer[begin + _TEXT_OFFSET : end])
            frames.append((text, bytes(buffer[end + 1 : stop])))
            begin = stop
        del buffer[:begin]
        return frames


class FrameHistory:
    """The texts of a response's frames, except those that begin with `!` or `#`.

    A text is added once the events of its frame, if any, have been sent to the client.

    Attributes:
        is_complete: False after texts were dropped. The stream then cannot move to
            another server.
    """

    def __init__(self) -> None:
        self._texts = bytearray()
        self.is_complete = True

    def add(self, texts: bytes) -> None:
        """Appends texts; each text ends in a comma.

        If the total size reaches MAX_HISTORY_BYTES, all texts are dropped.
        """
        if self.is_complete and len(self._texts) + len(texts) < MAX_HISTORY_BYTES:
            self._texts += texts
        else:
            self.forget()

    def forget(self) -> None:
        """Drops all texts. The stream can then no longer move to another server."""
        self._texts.clear()
        self.is_complete = False

    def __bool__(self) -> bool:
        return bool(self._texts)

    def sign(self, secret: bytes) -> bytes:
        """Returns the signed value of `baton_resume`."""
        texts = b"[" + self._texts[:-1] + b"]"
        return b'{"texts":%b,"mac":"%b"}' % (texts, _mac(texts, secret).encode())


def open_resume(value: object, secret: bytes) -> Resume:
    """Returns the stream state in the value of `baton_resume`.

    Raises:
        ResumeRejected: The value is malformed, or no proxy of this cluster signed it.
    """
    try:
        signed = msgspec.convert(value, _Signed)
        # The same encoder wrote the texts, so encoding them again restores the bytes
        # that the proxy signed.
        texts = _encode(signed.texts)
        expected_mac = _mac(texts, secret)
        if secret and hmac.compare_digest(signed.mac.encode(), expected_mac.encode()):
            origin, *frames = signed.texts
            return msgspec.convert({"origin": origin, "frames": frames}, Resume)
        problem = "it is not signed with this server's cluster secret"
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        problem = f"it is malformed: {error}"
    raise ResumeRejected(
        f"`{MEMBER}` is reserved for Baton's proxies, and {problem}; leave it out",
        param=MEMBER,
    )


def _mac(texts: bytes, secret: bytes) -> str:
    return hmac.digest(secret, _RESUME_LABEL + texts, hashlib.sha256).hex()


def digest(values: Sequence[Any]) -> str:
    """Returns the SHA-256 digest of JSON-compatible values."""
    return hashlib.sha256(b"baton stream\0" + _encode(values)).hexdigest()
