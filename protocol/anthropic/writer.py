"""Writes the response to /v1/messages: a message, or the events of a stream.

The events of a stream are: message_start, the events of each block, message_delta and
message_stop. The events of a block are content_block_start, content_block_delta (any
number) and content_block_stop. A failed stream ends with an error event. There is a
ping event after message_start, and further ping events while a stream is silent.

A block is the model's reasoning, a text, or a tool call.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec

from protocol import exact_json
from protocol.anthropic import errors
from protocol.anthropic.request import MessagesChat
from protocol.errors import BatonError
from protocol.http import sse
from protocol.openai.responses import ChoicePiece, ResponseWriter, Usage
from protocol.openai.tools import ToolCallPiece

_encode = msgspec.json.Encoder().encode

_TEXT = "text"
_THINKING = "thinking"
_TOOL_USE = "tool_use"
# For each kind of block, the type of its deltas, and the member of a delta that has the
# next part of the text.
_DELTAS: Final = {
    _TEXT: ("text_delta", "text"),
    _THINKING: ("thinking_delta", "thinking"),
    _TOOL_USE: ("input_json_delta", "partial_json"),
}
# The signature of every thinking block. Clients must send a signature back, but Baton
# accepts any: a client writes the whole conversation of a request itself, so a signed
# part of it would prove nothing.
SIGNATURE = "baton"
# The values of the stop members of a message that has not ended.
_NOT_STOPPED: Final = {"stop_reason": None, "stop_sequence": None}
# Name of the member of `input` that has the model's arguments if they are not a JSON
# object, for example because the output was cut off. Anthropic recommends this name.
INVALID_JSON = "INVALID_JSON"


class _Block:
    """A block that is being written.

    Args:
        kind: A key of _DELTAS.
        call: The first piece of a tool call; None for other kinds.
    """

    def __init__(self, kind: str, call: ToolCallPiece | None) -> None:
        self.kind = kind
        self.call = call
        self.text = ""

    def start_entry(self) -> dict[str, Any]:
        """Returns the block without its text, for the event content_block_start."""
        if self.call is not None:
            return self._call_entry({})
        if self.kind == _THINKING:
            return {"type": _THINKING, "thinking": "", "signature": ""}
        return {"type": _TEXT, "text": ""}

    def entry(self) -> dict[str, Any]:
        """Returns the complete block."""
        if self.call is not None:
            return self._call_entry(_input_of(self.text))
        if self.kind == _THINKING:
            return {"type": _THINKING, "thinking": self.text, "signature": SIGNATURE}
        return {"type": _TEXT, "text": self.text}

    def _call_entry(self, arguments: Any) -> dict[str, Any]:
        assert self.call is not None
        return {
            "type": _TOOL_USE,
            "id": self.call.id,
            "name": self.call.name,
            "input": arguments,
        }


def _input_of(arguments: str) -> Any:
    """Returns the `input` of a tool call. Its numbers keep the text that the model
    wrote.
    """
    text = arguments.strip() or "{}"
    try:
        is_object = isinstance(exact_json.decode(text.encode()), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        is_object = False
    return msgspec.Raw(text.encode()) if is_object else {INVALID_JSON: arguments}


def _event(name: str, **members: Any) -> bytes:
    data = _encode({"type": name, **members})
    return b"event: " + name.encode() + b"\n" + sse.event(data)


class MessagesWriter(ResponseWriter):
    """Writes the response to one request to /v1/messages."""

    id_prefix = "msg_"
    end: ClassVar[bytes] = b""  # nothing follows the last event
    ping: ClassVar[bytes] = _event("ping")

    def __init__(
        self,
        response_id: str,
        created: int,
        request: MessagesChat,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(response_id, created, request)
        self._chat = request
        self._block: _Block | None = None  # the block that is being written
        self._content: list[dict[str, Any]] = []  # the completed blocks

    def chunk(self, piece: ChoicePiece, usage: Usage | None = None) -> bytes:
        """Returns the events of a piece. The piece's last block stays open."""
        events: list[bytes] = []
        if piece.is_first:
            message = self._message(usage or Usage(), _NOT_STOPPED)
            events += [_event("message_start", message=message), self.ping]
        return b"".join([*events, *self._write(piece)])

    def last_chunk(
        self, piece: ChoicePiece, usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        events = [self.chunk(piece, usage), *self._close_block()]
        delta = self._stop_members(piece, usage)
        members = {"usage": self._usage(usage), "baton_kv": usage.baton_kv(), **extra}
        if self._chat.original.context_management is not None:
            members["context_management"] = {"applied_edits": []}
        events.append(_event("message_delta", delta=delta, **members))
        events.append(_event("message_stop"))
        return b"".join(events)

    def error(self, error: BatonError) -> bytes:
        return errors.error_event(error)

    def add_piece(self, piece: ChoicePiece) -> None:
        # The joined pieces that `complete_body` receives have lost the order of their
        # parts. Therefore this method writes each piece, and drops the events.
        _ = [*self._write(piece)]

    def complete_body(
        self, pieces: Sequence[ChoicePiece], usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        _ = [*self._close_block()]
        message = self._message(usage, self._stop_members(pieces[0], usage))
        if self._chat.original.context_management is not None:
            message["context_management"] = {"applied_edits": []}
        return _encode({**message, **extra})

    def _write(self, piece: ChoicePiece) -> Iterator[bytes]:
        """Adds a piece to the blocks, and yields its events."""
        for call in piece.tool_calls[: piece.num_continuing]:
            yield from self._add_text(_TOOL_USE, call.arguments, call)
        if piece.reasoning:
            text = piece.reasoning if self._chat.shows_thinking else ""
            yield from self._add_text(_THINKING, text)
        if piece.text:
            yield from self._add_text(_TEXT, piece.text)
        for call in piece.tool_calls[piece.num_continuing :]:
            yield from self._add_text(_TOOL_USE, call.arguments, call)

    def _add_text(
        self, kind: str, text: str, call: ToolCallPiece | None = None
    ) -> Iterator[bytes]:
        """Adds text to the current block, or to a new block if the kind differs.

        Yields the events that report the change.
        """
        begins_call = call is not None and call.name is not None
        if self._block is None or self._block.kind != kind or begins_call:
            yield from self._close_block()
            self._block = _Block(kind, call)
            yield self._block_event(
                "content_block_start", content_block=self._block.start_entry()
            )
        self._block.text += text
        if text:
            delta_type, member = _DELTAS[kind]
            delta = {"type": delta_type, member: text}
            yield self._block_event("content_block_delta", delta=delta)

    def _close_block(self) -> Iterator[bytes]:
        """Moves the current block, if any, to the content. Yields its last events."""
        block = self._block
        if block is None:
            return
        self._block = None
        if block.kind == _THINKING:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield self._block_event("content_block_delta", delta=delta)
        yield self._block_event("content_block_stop")
        self._content.append(block.entry())

    def _block_event(self, name: str, **members: Any) -> bytes:
        return _event(name, index=len(self._content), **members)

    def _message(self, usage: Usage, stop: dict[str, Any]) -> dict[str, Any]:
        """Returns the message with the blocks completed so far."""
        return {
            "id": self._common_members["id"],
            "type": "message",
            "role": "assistant",
            "model": self._common_members["model"],
            "content": self._content,
            **stop,
            "usage": self._usage(usage),
        }

    def _stop_members(self, piece: ChoicePiece, usage: Usage) -> dict[str, Any]:
        """Returns the members that report why the message ended.

        Args:
            piece: The last piece, or all pieces joined.
        """
        reason = "end_turn"
        sequence: str | None = None
        if piece.finish_reason == "tool_calls":
            reason = "tool_use"
        elif piece.finish_reason == "length":
            limit = self._chat.token_limit
            fills_context = limit is not None and usage.completion_tokens < limit
            reason = "model_context_window_exceeded" if fills_context else "max_tokens"
        elif isinstance(piece.stop_reason, str):
            reason = "stop_sequence"
            sequence = piece.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Returns the usage. Its three counts of input tokens add up to the prompt.

        Prompts without `cache_control` are cached, too. However, the usage reports the
        creation of cache entries only for requests with `cache_control`, as their
        clients expect.
        """
        num_read = usage.kv.cached_tokens
        num_computed = usage.prompt_tokens - num_read
        ttls = self._chat.cache_ttls
        num_created = num_computed if ttls else 0
        is_hour = bool(ttls) and ttls[-1] == "1h"
        return {
            "input_tokens": num_computed - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": num_read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if is_hour else num_created,
                "ephemeral_1h_input_tokens": num_created if is_hour else 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }
