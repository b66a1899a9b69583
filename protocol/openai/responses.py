"""Writes the JSON of responses, streamed and complete.

The writer for /v1/responses is in responses_writer.py, and the writer for /v1/messages
in protocol/anthropic/writer.py.

For speed, responses are encoded by msgspec and not validated by pydantic.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from protocol.errors import BatonError
from protocol.http import sse
from protocol.messages import KVUsage
from protocol.openai.sampling import GenerationRequest
from protocol.openai.tools import ToolCallPiece, whole_calls

_encode = msgspec.json.Encoder().encode


class TokenText(msgspec.Struct, frozen=True):
    """The text of a token in a response.

    Attributes:
        text: The text that represents the token. Within one TokenReport, different
            tokens have different texts, so a text can be the key of a JSON object.
        raw: The bytes of the token, which may be only a part of a character.
    """

    text: str
    raw: bytes


class TokenReport(msgspec.Struct, frozen=True):
    """One token of an answer, or of an echoed prompt, with its log-probabilities.

    Attributes:
        logprob: None for the first token of a prompt, because no token precedes it.
        top: The most likely tokens with their log-probabilities, in descending order.
        offset: Number of characters before the token in the answer, which begins with
            the prompt if the prompt is echoed.
        is_of_text: False for a token of the reasoning, of the tags around it, or of the
            head of a message in gpt-oss's format.
    """

    token: TokenText
    logprob: float | None
    top: Sequence[tuple[TokenText, float]] = ()
    offset: int = 0
    is_of_text: bool = True


class ChoicePiece(msgspec.Struct):
    """The part of one choice that one or more new tokens add.

    Attributes:
        index: Index of the choice in the response.
        logprobs: One per token, if the request needs logprobs. In the first piece,
            those of an echoed prompt precede them.
        finish_reason: Why the choice ended: "stop", "length", "tool_calls", "abort" or
            CACHE_MISS (protocol/messages.py). Only set on the last piece.
        stop_reason: The client's stop string or stop token that ended the choice.
        is_first: Whether this is the first piece of the choice.
        prompt_token_ids: Only set on the first piece, if the request needs the ids.
        prompt_logprobs: Only set on the first piece, if the request needs prompt
            logprobs.
        reasoning: Reasoning that precedes `text`; `text` does not include the
            reasoning.
        tool_calls: Parts of tool calls; `text` does not include these parts.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenReport] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_first: bool = False
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = []

    @property
    def has_content(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)

    @property
    def num_continuing(self) -> int:
        """Number of entries at the beginning of `tool_calls` that continue a call of an
        earlier piece. These entries precede `text`."""
        for number, call in enumerate(self.tool_calls):
            if call.name is not None:
                return number
        return len(self.tool_calls)

    def extend(self, other: "ChoicePiece") -> None:
        """Appends the next piece of the choice to this piece."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.token_ids += other.token_ids
        self.tool_calls += other.tool_calls
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason
        if self.logprobs is not None and other.logprobs is not None:
            self.logprobs += other.logprobs


class Usage(msgspec.Struct):
    """Token counts of a request, summed over its prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    kv: KVUsage = KVUsage()
    reasoning_tokens: int = 0  # included in completion_tokens
    # Tokens that drafters had proposed; included in completion_tokens.
    accepted_tokens: int = 0
    rejected_tokens: int = 0  # proposed tokens that are not in the answer

    def to_openai(
        self, input_name: str = "prompt", output_name: str = "completion"
    ) -> dict[str, Any]:
        """Returns the usage object of a response.

        Args:
            input_name: The word for the prompt in the endpoint's member names.
            output_name: The word for the answer in the endpoint's member names.
        """
        return {
            f"{input_name}_tokens": self.prompt_tokens,
            f"{output_name}_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            f"{input_name}_tokens_details": {"cached_tokens": self.kv.cached_tokens},
            f"{output_name}_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.rejected_tokens,
            },
        }

    def baton_kv(self, leg: str = "") -> dict[str, int]:
        """Returns the number of prompt tokens by the source of their KV.

        Args:
            leg: Empty for the numbers of this server, "prefill_" for those of the
                prefill leg.
        """
        names = ("transferred", "recomputed", "skipped")
        return {name: getattr(self.kv, leg + name) for name in names}


def add_kv(usages: Sequence[KVUsage]) -> KVUsage:
    """Returns the sum of the usages of several prompts."""
    names = KVUsage.__struct_fields__
    return KVUsage(
        **{name: sum(getattr(usage, name) for usage in usages) for name in names}
    )


def kv_header(usage: Usage, leg: str = "") -> str:
    """Returns the value of the response header `x-baton-kv`, or of
    `x-baton-kv-prefill` if `leg` is "prefill_".
    """
    return ", ".join(f"{name}={tokens}" for name, tokens in usage.baton_kv(leg).items())


class ResponseWriter:
    """Writes the response to one request. Subclasses implement the endpoints' formats.

    Args:
        response_id: A unique id. The `id` of the response is `id_prefix`, followed by
            the `request_id` of the request or, if there is none, by this id.
        created: Time at which the response began, in seconds since 1970.
        fingerprint: See system_fingerprint in protocol/version.py.

    Class attributes:
        id_prefix: Prefix of the `id` of responses.
        has_prompt_ids_in_choices: Whether `prompt_token_ids` is a member of each choice
            instead of the response.
        full_object: The member `object` of a complete response.
        chunk_object: The member `object` of an event.
        end: The bytes that end a stream that has not failed.
        ping: The event that shows clients of a silent stream that it continues; empty
            if the endpoint's format has none.
    """

    id_prefix: ClassVar[str]
    has_prompt_ids_in_choices: ClassVar[bool] = True
    full_object: ClassVar[str]
    chunk_object: ClassVar[str]
    end: ClassVar[bytes] = sse.DONE
    ping: ClassVar[bytes] = b""

    def __init__(
        self,
        response_id: str,
        created: int,
        request: GenerationRequest,
        fingerprint: str | None = None,
    ) -> None:
        self._request = request
        self._common_members = {
            "id": self.id_prefix + (request.request_id or response_id),
            "created": created,
            "model": request.model,
            "system_fingerprint": fingerprint,
        }

    def choice(self, piece: ChoicePiece) -> dict[str, Any]:
        """Returns an entry of `choices` in a complete response."""
        entry = self.delta(piece)
        if piece.prompt_logprobs is not None:
            entry["prompt_logprobs"] = piece.prompt_logprobs
        return entry

    def delta(self, piece: ChoicePiece) -> dict[str, Any]:
        """Returns an entry of `choices` in a chunk."""
        raise NotImplementedError

    def parts(self, piece: ChoicePiece) -> list[ChoicePiece]:
        """Splits a piece into the pieces that are sent as separate events."""
        return [piece]

    def prompt_members(self, piece: ChoicePiece) -> dict[str, Any]:
        """Returns the members about the prompt that an event has next to `choices`."""
        return {}

    def chunk(self, piece: ChoicePiece, usage: Usage | None = None) -> bytes:
        """Returns the events for one piece of one choice.

        Args:
            usage: The usage so far; None unless `continuous_usage` of the request is
                true.
        """
        tail = (
            {"usage": usage and usage.to_openai()}
            if self._request.include_usage
            else {}
        )
        return self._events(piece, tail, tail)

    def last_chunk(
        self, piece: ChoicePiece, usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        """Returns the events for the last piece of the last choice.

        Args:
            extra: Additional members of the event that has `baton_kv`.
        """
        tail = {"baton_kv": usage.baton_kv(), **extra}
        if not self._request.include_usage:
            return self._events(piece, {}, tail)
        chunk_usage = usage if self._request.continuous_usage else None
        return self.chunk(piece, chunk_usage) + self._choices_event(
            [], {"usage": usage.to_openai(), **tail}
        )

    def error(self, error: BatonError) -> bytes:
        """Returns the events that end a failed stream."""
        return sse.error_event(error)

    def add_piece(self, piece: ChoicePiece) -> None:
        """Receives the next piece of a response that is not streamed.

        A subclass overrides this method if its `complete_body` needs each piece.
        """

    def complete_body(
        self, pieces: Sequence[ChoicePiece], usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        """Returns the complete response body. `add_piece` was called with every piece.

        Args:
            pieces: One piece per choice, which joins all pieces of the choice.
            extra: Additional members of the body.
        """
        choices = [self._with_extras(self.choice(piece), piece) for piece in pieces]
        body = {**self._common_members, "object": self.full_object, "choices": choices}
        return _encode({**body, "usage": usage.to_openai(), **extra})

    def _events(
        self, piece: ChoicePiece, tail: dict[str, Any], last_tail: dict[str, Any]
    ) -> bytes:
        """Returns the events of a piece.

        Args:
            tail: Additional members of every event except the last.
            last_tail: Additional members of the last event.
        """
        parts = self.parts(piece)
        events: list[bytes] = []
        for number, part in enumerate(parts, 1):
            choice = self._with_extras(self.delta(part), part)
            part_tail = last_tail if number == len(parts) else tail
            events.append(
                self._choices_event(
                    [choice], {**self.prompt_members(part), **part_tail}
                )
            )
        return b"".join(events)

    def _choices_event(
        self, choices: list[dict[str, Any]], tail: dict[str, Any]
    ) -> bytes:
        body = {
            **self._common_members,
            "object": self.chunk_object,
            "choices": choices,
            **tail,
        }
        return sse.event(_encode(body))

    def _with_extras(
        self, choice: dict[str, Any], piece: ChoicePiece
    ) -> dict[str, Any]:
        """Adds `stop_reason` and token ids, which OpenAI's API lacks, to a choice.

        Token ids are added only if the client requested them.
        """
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.prompt_token_ids is not None and self.has_prompt_ids_in_choices:
                choice["prompt_token_ids"] = piece.prompt_token_ids
        return choice


def _choice_entry(
    piece: ChoicePiece,
    to_logprobs: Callable[[Sequence[TokenReport]], Any],
    **content: Any,
) -> dict[str, Any]:
    logprobs = None if piece.logprobs is None else to_logprobs(piece.logprobs)
    end = {"logprobs": logprobs, "finish_reason": piece.finish_reason}
    return {"index": piece.index, **content, **end}


class CompletionWriter(ResponseWriter):
    id_prefix = "cmpl-"
    full_object = "text_completion"
    chunk_object = "text_completion"

    def delta(self, piece: ChoicePiece) -> dict[str, Any]:
        return _choice_entry(piece, completion_logprobs, text=piece.text)


class ChatWriter(ResponseWriter):
    id_prefix = "chatcmpl-"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    # All choices share one prompt, so `prompt_token_ids` stands next to `choices`.
    has_prompt_ids_in_choices = False
    _is_prompt_written = False

    def prompt_members(self, piece: ChoicePiece) -> dict[str, Any]:
        if piece.prompt_token_ids is None or self._is_prompt_written:
            return {}
        self._is_prompt_written = True
        return {"prompt_token_ids": piece.prompt_token_ids}

    def choice(self, piece: ChoicePiece) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": piece.text,
            "refusal": None,
        }
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            message["content"] = piece.text or None
            message["tool_calls"] = whole_calls(piece.tool_calls)
        return _choice_entry(piece, chat_logprobs, message=message)

    def parts(self, piece: ChoicePiece) -> list[ChoicePiece]:
        """Splits a piece into reasoning, text, each tool call, and the end.

        OpenAI sends these parts in separate events, and some clients expect only one of
        the parts in an event.
        """
        has_reasoning_and_text = bool(piece.reasoning and piece.text)
        if not (piece.tool_calls or piece.finish_reason or has_reasoning_and_text):
            return [piece]
        members: list[dict[str, Any]] = [
            {"reasoning": piece.reasoning},
            {"text": piece.text},
        ]
        members += ({"tool_calls": [call]} for call in piece.tool_calls)
        members.append(
            {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        )
        parts = [
            ChoicePiece(piece.index, **member)
            for member in members
            if any(member.values())
        ]
        parts[0].is_first = piece.is_first
        parts[0].prompt_token_ids = piece.prompt_token_ids
        parts[0].logprobs = piece.logprobs
        parts[0].token_ids = piece.token_ids
        return parts

    def delta(self, piece: ChoicePiece) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if piece.is_first else {}
        if piece.text or piece.is_first:
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = [call.delta() for call in piece.tool_calls]
        return _choice_entry(piece, chat_logprobs, delta=delta)

    def complete_body(
        self, pieces: Sequence[ChoicePiece], usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        members = self.prompt_members(pieces[0])
        for piece in pieces:
            if piece.prompt_logprobs is not None:
                members["prompt_logprobs"] = piece.prompt_logprobs
                break
        return super().complete_body(pieces, usage, {**extra, **members})


def completion_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    """Returns the `logprobs` of a completion: four lists with one entry per token."""
    return {
        "tokens": [report.token.text for report in reports],
        "token_logprobs": [report.logprob for report in reports],
        "top_logprobs": [_top_logprobs_by_text(report) for report in reports],
        "text_offset": [report.offset for report in reports],
    }


def _top_logprobs_by_text(report: TokenReport) -> dict[str, float] | None:
    """Returns the top logprobs by the texts of the tokens.

    As in OpenAI's API, the sampled token is always included.
    """
    if report.logprob is None:
        return None
    logprobs = {report.token.text: report.logprob}
    for token, logprob in report.top:
        logprobs.setdefault(token.text, logprob)
    return logprobs


def chat_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    """Returns the `logprobs` of a chat: one object per token."""
    content = []
    for report in reports:
        tops = [_token_entry(token, logprob) for token, logprob in report.top]
        content.append(
            {**_token_entry(report.token, report.logprob), "top_logprobs": tops}
        )
    return {"content": content, "refusal": None}


def _token_entry(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}


def model_card(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    """Returns an entry of /v1/models.

    Args:
        created: Seconds since 1970.
        max_model_len: Length of the context in tokens; None until the engine has
            reported this length.
    """
    about = {"object": "model", "created": created, "owned_by": "baton"}
    origin = {"root": name, "parent": None}  # the model is not a LoRA adapter
    return {"id": name, **about, **origin, "max_model_len": max_model_len}
