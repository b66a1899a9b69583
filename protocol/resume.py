"""What lets a stream go on at another decode server: the frames that a proxy keeps of it.

A proxy that holds the cluster secret asks for frames by a signed header. Then every write of the
stream is one SSE comment and what it says of the bytes behind it:

    :baton 0000012c [[0,[791]]]\\n      300 bytes of whole events follow; their tokens, by choice

The proxy passes on what is behind a comment and keeps the comments' texts, whose meaning it does
not know. When the server is lost, it sends the request again with the texts, signed, as
`baton_resume`. An answer that is no stream becomes one of frames without events when it moves. A
first text tells what else the answer depends on; one that begins with `!` is in front of an error
event, after which another server may go on; `!moved` is, with where the KV of all these tokens is.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import msgspec

from protocol.errors import BatonError, EngineDied, ResumeRejected
from protocol.messages import KVUsage, TokenDelta, TokenLogprobs

HEADER = "x-baton-frames"  # of a request, a MAC; of an answer, that there are frames
MEMBER = "baton_resume"  # of a request's body
MAX_KEPT_BYTES = 1 << 20  # of a stream's texts; one that has more ends with its server
HANDED_BACK = b"!"
DIED, BUSY = (
    b"!died",
    b"!busy",
)  # the engine has ended; the server does not go on with this one
MOVED = b"!moved "  # and kv_transfer_params: the server has handed its stream over
_ASKED, _SIGNED = b"baton frames\n", b"baton resume\n"
_MARK = b":baton "
_SIZE_AT, _TEXT_AT = len(_MARK), len(_MARK) + 9
_encode = msgspec.json.Encoder().encode


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer's bytes depend on beside its request and its tokens.

    Attributes:
        id, created: of the answer.
        seed: that the tokens are drawn with.
        limits: of each prompt, how many tokens may be generated.
        digest: of the prompts, the sampling parameters, and the model as it is computed.
    """

    id: str
    created: int
    seed: int
    limits: list[int]
    digest: str


class Told(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one choice, as they came from the engine; an entry of a text."""

    index: int  # in the answer
    token_ids: list[int]
    finish_reason: str | None = None
    usage: KVUsage | None = None
    logprobs: list[TokenLogprobs] | None = (
        None  # of an answer of which the client has nothing yet
    )


class Resume(msgspec.Struct, frozen=True):
    """A stream so far."""

    origin: Origin
    frames: list[list[Told]]


class _Signed(msgspec.Struct):
    texts: list[Any]
    mac: str


def asking(secret: bytes, request_id: bytes) -> bytes:
    """The header's value by which a proxy asks for frames."""
    return hmac.digest(secret, _ASKED + request_id, hashlib.sha256).hex().encode()


def is_asking(secret: bytes, request_id: bytes, value: bytes) -> bool:
    return bool(secret) and hmac.compare_digest(value, asking(secret, request_id))


def frame(text: bytes, events: bytes) -> bytes:
    """`text` has no newline; JSON never does."""
    return b"%b%08x %b\n%b" % (_MARK, len(events), text, events)


def refusal_text(error: BatonError) -> bytes | None:
    """What is told of an error in mid-stream, after which another server may go on; None: nowhere
    would it be another answer, or in time."""
    if not error.retryable or error.phase in ("request", "deadline"):
        return None
    return DIED if isinstance(error, EngineDied) else BUSY


def entry_of(index: int, delta: TokenDelta, *, whole: bool = False) -> list[Any]:
    """A Told; short where there is little to tell."""
    end = [delta.finish_reason, delta.usage, *([delta.logprobs] if whole else ())]
    return [index, delta.token_ids, *(end if any(end) else ())]


def text_of(told: Origin | list[Any]) -> bytes:
    """Of the stream's origin, or of the entries of a frame."""
    return _encode(told)


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """What a proxy reads of a Told."""

    index: int
    token_ids: list[int]


_decode_entries = msgspec.json.Decoder(list[_Entry]).decode


def num_tokens_of(text: bytes) -> int:
    """How many tokens a frame's text names; 0 for one that is about something else."""
    try:
        return sum(len(entry.token_ids) for entry in _decode_entries(text))
    except msgspec.MsgspecError:
        return 0


class Frames:
    """A proxy's end: cuts a stream into whole frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The texts and the events of the frames that are whole now. Raises ValueError for what is
        no frame."""
        held = self._held
        if not held and data.startswith(_MARK):  # as nearly always, of one frame
            end = data.find(b"\n") + 1
            if end and end + int(data[_SIZE_AT:_TEXT_AT], 16) == len(data):
                return [(data[_TEXT_AT : end - 1], data[end:])]
        held += data
        found, at = [], 0
        while (end := held.find(b"\n", at)) >= 0:
            if not held.startswith(_MARK, at):
                raise ValueError("no frame")
            stop = end + 1 + int(held[at + _SIZE_AT : at + _TEXT_AT], 16)
            if stop > len(held):
                break
            found.append(
                (bytes(held[at + _TEXT_AT : end]), bytes(held[end + 1 : stop]))
            )
            at = stop
        del held[:at]
        return found


class Kept:
    """The texts of a stream's frames, as far as their events have been passed on."""

    def __init__(self) -> None:
        self._texts = bytearray()
        self.is_whole = True  # False: there were too many

    def add(self, texts: bytes) -> None:
        """Some more, with a comma behind each."""
        if self.is_whole and len(self._texts) + len(texts) < MAX_KEPT_BYTES:
            self._texts += texts
        else:
            self.forget()

    def forget(self) -> None:
        self._texts.clear()
        self.is_whole = False

    def __bool__(self) -> bool:
        return bool(self._texts)

    def sign(self, secret: bytes) -> bytes:
        """The `baton_resume` of a request."""
        texts = b"[" + self._texts[:-1] + b"]"
        return b'{"texts":%b,"mac":"%b"}' % (texts, _mac(texts, secret).encode())


def opened(value: object, secret: bytes) -> Resume:
    """Raises ResumeRejected for what no proxy of this cluster sent."""
    try:
        signed = msgspec.convert(value, _Signed)
        texts = _encode(signed.texts)  # as they were: a server's own encoder wrote them
        if secret and hmac.compare_digest(
            signed.mac.encode(), _mac(texts, secret).encode()
        ):
            origin, *frames = signed.texts
            return msgspec.convert({"origin": origin, "frames": frames}, Resume)
        problem = "it is not signed with this server's cluster secret"
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        problem = f"it is malformed: {error}"
    raise ResumeRejected(
        f"`{MEMBER}` is for Baton's proxies alone: {problem}; leave it out",
        param=MEMBER,
    )


def _mac(texts: bytes, secret: bytes) -> str:
    return hmac.digest(secret, _SIGNED + texts, hashlib.sha256).hex()


def digest(values: Sequence[Any]) -> str:
    """SHA-256 of values that JSON can carry."""
    return hashlib.sha256(b"baton stream\0" + _encode(values)).hexdigest()
