"""Writes the response to /v1/responses: an object, or the events of a stream.

The events of a stream are: created, in_progress, the events of each item, and completed
or incomplete. A failed stream ends with the events error and failed.

An item is the model's reasoning, a message or a tool call. The events of a message are
output_item.added, content_part.added, output_text.delta (any number), output_text.done,
content_part.done and output_item.done. The events of reasoning are the same, with
reasoning_text instead of output_text. A tool call has function_call_arguments instead
of output_text, and no content_part events.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final

import msgspec

from protocol.errors import BatonError
from protocol.http import sse
from protocol.openai.responses import (
    ChoicePiece,
    ResponseWriter,
    TokenReport,
    Usage,
    chat_logprobs,
)
from protocol.openai.responses_request import ResponsesChat
from protocol.openai.tools import ToolCallPiece

_encode = msgspec.json.Encoder().encode

# For each kind of item, the prefix of its id and the name of its text in events.
_MESSAGE = "message"
_REASONING = "reasoning"
_CALL = "function_call"
_KINDS: Final = {
    _MESSAGE: ("msg_", "output_text"),
    _REASONING: ("rs_", "reasoning_text"),
    _CALL: ("fc_", "function_call_arguments"),
}


class _Item:
    """An item that is being written.

    Args:
        kind: A key of _KINDS.
        index: Index of the item in the `output` of the response.
        call: The first piece of a tool call; None for other kinds.
    """

    def __init__(
        self, kind: str, response_id: str, index: int, call: ToolCallPiece | None
    ) -> None:
        prefix, self.text_kind = _KINDS[kind]
        self.kind = kind
        self.call = call
        self.text = ""
        self.id = f"{prefix}{response_id}" + (f"_{index}" if index else "")
        # The members by which an event refers to the item.
        self.position: dict[str, Any] = {"item_id": self.id, "output_index": index}
        if kind != _CALL:
            self.position["content_index"] = 0
        # Encoded logprobs, one entry per token. The entries for events lack `bytes`.
        self._logprobs: list[bytes] = []
        self._event_logprobs: list[bytes] = []

    def add_logprobs(self, reports: Sequence[TokenReport]) -> None:
        for report in reports:
            (entry,) = chat_logprobs([report])["content"]
            self._logprobs.append(_encode(entry))
            self._event_logprobs.append(_encode(_without_bytes(entry)))

    def event_logprobs(self, begin: int = 0) -> dict[str, Any]:
        """Returns the member `logprobs` of a message's event, from token `begin` on.

        The result is empty for an item that is not a message.
        """
        if self.kind != _MESSAGE:
            return {}
        return {"logprobs": _array(self._event_logprobs[begin:])}

    @property
    def num_logprobs(self) -> int:
        return len(self._logprobs)

    def output_entry(self, status: str) -> dict[str, Any]:
        """Returns the item as an entry of the response's `output`."""
        about: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            call = {
                "call_id": self.call.id,
                "name": self.call.name,
                "arguments": self.text,
            }
            return {**about, **call}
        content = [self.content_entry()] if self.text or status != "in_progress" else []
        extra: dict[str, Any] = {"summary": []}
        if self.kind == _MESSAGE:
            extra = {"role": "assistant"}
        return {**about, **extra, "content": content}

    def content_entry(self) -> dict[str, Any]:
        """Returns the text of the item as an entry of its `content`."""
        extra: dict[str, Any] = {}
        if self.kind == _MESSAGE:
            extra = {"annotations": [], "logprobs": _array(self._logprobs)}
        return {"type": self.text_kind, "text": self.text, **extra}


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    tops = [
        {"token": top["token"], "logprob": top["logprob"]}
        for top in entry["top_logprobs"]
    ]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": tops}


def _array(values: Sequence[bytes]) -> msgspec.Raw:
    """Returns the JSON array of encoded values."""
    return msgspec.Raw(b"[" + b",".join(values) + b"]")


class ResponsesWriter(ResponseWriter):
    """Writes the response to one request to /v1/responses."""

    id_prefix = "resp_"
    end: ClassVar[bytes] = b""  # nothing follows the last event

    def __init__(
        self,
        response_id: str,
        created: int,
        request: ResponsesChat,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(response_id, created, request)
        self._id = response_id
        self._original_request = request.original
        self._item: _Item | None = None  # the item that is being written
        self._output: list[dict[str, Any]] = []  # the completed items
        self._num_events = 0
        # Logprobs of tokens that belong to no item yet, because their text is held
        # back: it may turn out to be message text or a tool call.
        self._pending_logprobs: list[TokenReport] = []

    def chunk(self, piece: ChoicePiece, usage: Usage | None = None) -> bytes:
        """Returns the events of a piece. The piece's last item stays open."""
        events = []
        if piece.is_first:
            response = self._response("in_progress")
            events = [
                self._event(kind, response=response)
                for kind in ("created", "in_progress")
            ]
        return b"".join([*events, *self._write(piece)])

    def last_chunk(
        self, piece: ChoicePiece, usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        """Returns the events of the last piece. The last event has the complete
        response.
        """
        events = self.chunk(piece)
        status = _status(piece)
        events += b"".join(self._end_last_item(piece))
        response = self._response(status, usage)
        response = {**response, "baton_kv": usage.baton_kv(), **extra}
        return events + self._event(status, response=response)

    def error(self, error: BatonError) -> bytes:
        """Returns an `error` event and a `failed` event.

        Some clients handle only one of the two events.
        """
        event = sse.error_event(error, self._num_events)
        self._num_events += 1
        details = {"code": "server_error", "message": error.message}
        failed = {**self._response("failed"), "error": details}
        return event + self._event("failed", response=failed)

    def add_piece(self, piece: ChoicePiece) -> None:
        # The joined pieces that `complete_body` receives have lost the order of their
        # parts. Therefore this method writes each piece, and drops the events.
        _ = [*self._write(piece)]

    def complete_body(
        self, pieces: Sequence[ChoicePiece], usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        status = _status(pieces[0])
        _ = [*self._end_last_item(pieces[0])]
        return _encode({**self._response(status, usage), **extra})

    def _write(self, piece: ChoicePiece) -> Iterator[bytes]:
        """Adds a piece to the items, and yields its events."""
        for call in piece.tool_calls[: piece.num_continuing]:
            yield from self._add_text(_CALL, call.arguments, call)
        if piece.reasoning:
            # The pending logprobs belong to whitespace before the reasoning.
            self._pending_logprobs.clear()
            yield from self._add_text(_REASONING, piece.reasoning)
        self._pending_logprobs += (
            report for report in piece.logprobs or () if report.is_of_text
        )
        if piece.text:
            yield from self._add_text(_MESSAGE, piece.text)
        for call in piece.tool_calls[piece.num_continuing :]:
            self._pending_logprobs.clear()
            yield from self._add_text(_CALL, call.arguments, call)

    def _add_text(
        self, kind: str, text: str, call: ToolCallPiece | None = None
    ) -> Iterator[bytes]:
        """Adds text to the current item, or to a new item if the kind differs.

        Yields the events that report the change.
        """
        begins_call = call is not None and call.name is not None
        if self._item is None or self._item.kind != kind or begins_call:
            yield from self._close_item("completed")
            self._drop_pending_before(text)
            self._item = item = _Item(kind, self._id, len(self._output), call)
            yield self._event(
                "output_item.added",
                output_index=len(self._output),
                item=item.output_entry("in_progress"),
            )
            if kind != _CALL:
                part = item.content_entry()
                yield self._event("content_part.added", **item.position, part=part)
        item = self._item
        item.text += text
        begin = item.num_logprobs
        if kind == _MESSAGE:
            self._take_pending(item)
        if text:
            yield self._event(
                f"{item.text_kind}.delta",
                **item.position,
                delta=text,
                **item.event_logprobs(begin),
            )

    def _drop_pending_before(self, text: str) -> None:
        """Drops the pending logprobs of the tokens that precede `text` in the output.

        `text` is the beginning of a new item. The dropped tokens are whitespace, or the
        end of a tool call.
        """
        pending_bytes = b"".join(report.token.raw for report in self._pending_logprobs)
        begin = pending_bytes.rfind(text.encode())
        ends = accumulate(len(report.token.raw) for report in self._pending_logprobs)
        pairs = zip(self._pending_logprobs, ends, strict=True)
        self._pending_logprobs = [report for report, end in pairs if end > begin]

    def _take_pending(self, item: _Item) -> None:
        """Moves the pending logprobs to the item."""
        item.add_logprobs(self._pending_logprobs)
        self._pending_logprobs.clear()

    def _end_last_item(self, piece: ChoicePiece) -> Iterator[bytes]:
        """Closes the response's last item, and yields the events that end the item.

        If there is no item, an empty message is added first, because a response has at
        least one item. A tool call without its complete arguments gets the status
        "incomplete", even if the response is complete.

        Args:
            piece: The last piece, or all pieces of the choice joined.
        """
        if self._item is None:
            yield from self._add_text(_MESSAGE, "")
        elif self._item.kind == _MESSAGE:
            # The pending logprobs belong to tokens without text, such as the
            # end-of-sequence token.
            self._take_pending(self._item)
        is_incomplete_call = (
            self._item is not None
            and self._item.kind == _CALL
            and piece.finish_reason != "tool_calls"
        )
        yield from self._close_item(
            "incomplete" if is_incomplete_call else _status(piece)
        )

    def _close_item(self, status: str) -> Iterator[bytes]:
        """Moves the current item, if any, to the output, and yields its last events."""
        item = self._item
        self._item = None
        if item is None:
            return
        text_name = "arguments" if item.kind == _CALL else "text"
        members: dict[str, Any] = {text_name: item.text, **item.event_logprobs()}
        yield self._event(f"{item.text_kind}.done", **item.position, **members)
        if item.kind != _CALL:
            part = item.content_entry()
            yield self._event("content_part.done", **item.position, part=part)
        item_json = item.output_entry(status)
        index = len(self._output)
        yield self._event("output_item.done", output_index=index, item=item_json)
        self._output.append(item_json)

    def _event(self, kind: str, **members: Any) -> bytes:
        """Returns an event, and counts it for the sequence numbers."""
        name = f"response.{kind}"
        event = {"type": name, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return b"event: " + name.encode() + b"\n" + sse.event(_encode(event))

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        """Returns the response object with the items completed so far."""
        original = self._original_request
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice = original.tool_choice
        return {
            "id": self._common_members["id"],
            "object": "response",
            "created_at": self._common_members["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": original.instructions,
            "max_output_tokens": original.max_output_tokens,
            "max_tool_calls": original.max_tool_calls,
            "metadata": original.metadata,
            "model": original.model,
            "output": list(self._output),
            "parallel_tool_calls": original.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": original.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self._request.temperature,
            "text": {"format": original.text.format or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": original.tools,
            "top_logprobs": original.top_logprobs,
            "top_p": self._request.top_p,
            "truncation": original.truncation,
            "usage": None if usage is None else _usage(usage),
            "user": original.user,
        }


def _status(piece: ChoicePiece) -> str:
    return "incomplete" if piece.finish_reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    members = usage.to_openai("input", "output")
    members["input_tokens_details"]["cache_write_tokens"] = 0
    return members
