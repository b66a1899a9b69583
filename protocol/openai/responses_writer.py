"""What /v1/responses answers: a response object, or the events of one that is being written.

created, in_progress, output_item.added, content_part.added, output_text.delta ...,
output_text.done, content_part.done, output_item.done, completed or incomplete
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from protocol.http import sse
from protocol.openai.responses import ChoicePiece, ResponseWriter, Usage
from protocol.openai.responses_request import ResponsesChat

_encode = msgspec.json.Encoder().encode


class ResponsesWriter(ResponseWriter):
    """Writes the answer to one request to /v1/responses."""

    id_prefix = "resp_"
    full_object = "response"
    chunk_object = "response"
    end: ClassVar[bytes] = b""  # the last event says that it is the last

    def __init__(
        self, response_id: str, created: int, asked: ResponsesChat, fingerprint: str | None = None
    ) -> None:
        super().__init__(response_id, created, asked)
        self._place = {"item_id": "msg_" + response_id, "output_index": 0, "content_index": 0}
        self._told = asked.asked
        self._text = ""
        self._num_events = 0

    def chunk(self, piece: ChoicePiece, usage: Usage | None = None) -> bytes:
        """The events of a piece that is not the last."""
        events = []
        if piece.first:
            response, item = self._response("in_progress"), self._item("in_progress")
            events += [
                self._event("created", response=response),
                self._event("in_progress", response=response),
                self._event("output_item.added", output_index=0, item=item),
                self._event("content_part.added", **self._place, part=_part("")),
            ]
        if piece.text:
            self._text += piece.text
            delta = {**self._place, "delta": piece.text, "logprobs": []}
            events.append(self._event("output_text.delta", **delta))
        return b"".join(events)

    def last_chunk(self, piece: ChoicePiece, usage: Usage, extra: dict[str, Any]) -> bytes:
        """The events of the last piece, the whole response in the last of them."""
        before, status, text = self.chunk(piece), _status(piece), self._text
        whole = {**self._response(status, text, usage), "baton_kv": usage.baton_kv(), **extra}
        events = (
            self._event("output_text.done", **self._place, text=text, logprobs=[]),
            self._event("content_part.done", **self._place, part=_part(text)),
            self._event("output_item.done", output_index=0, item=self._item(status, text)),
            self._event(status, response=whole),
        )
        return before + b"".join(events)

    def full(self, pieces: Sequence[ChoicePiece], usage: Usage, extra: dict[str, Any]) -> bytes:
        (piece,) = pieces
        return _encode({**self._response(_status(piece), piece.text, usage), **extra})

    def _event(self, kind: str, **members: Any) -> bytes:
        name = f"response.{kind}"
        event = {"type": name, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return b"event: " + name.encode() + b"\n" + sse.event(_encode(event))

    def _item(self, status: str, text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        about = {"id": self._place["item_id"], "type": "message", "role": "assistant"}
        return {**about, "status": status, "content": content}

    def _response(
        self, status: str, text: str | None = None, usage: Usage | None = None
    ) -> dict[str, Any]:
        asked = self._told
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        given = asked.text.format if asked.text else None
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": asked.model,
            "output": [] if text is None else [self._item(status, text)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": given or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": asked.user,
        }


def _status(piece: ChoicePiece) -> str:
    return "incomplete" if piece.finish_reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.kv.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
