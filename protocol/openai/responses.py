"""The JSON that clients read, streamed and whole.

No pydantic on this path.
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
    """How a token is shown. `text` names one token alone, so that answers can be keyed by it."""

    text: str
    raw: bytes  # one token may be a part of a character


class TokenReport(msgspec.Struct, frozen=True):
    """One token of an answer, or of an echoed prompt, with its log-probabilities."""

    token: TokenText
    logprob: float | None  # None: the prompt's first token, which nothing predicts
    top: Sequence[
        tuple[TokenText, float]
    ] = ()  # the likeliest tokens, most likely first
    offset: int = 0  # characters of the answer before it
    is_of_text: bool = True  # not of the reasoning or of its tags


class ChoicePiece(msgspec.Struct):
    """What one or more new tokens add to one choice."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenReport] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort", on the last piece
    stop_reason: str | int | None = (
        None  # the stop string or the client's stop token found
    )
    first: bool = False
    prompt_token_ids: list[int] | None = (
        None  # on the first piece, when they were asked for
    )
    prompt_logprobs: list[Any] | None = None  # likewise
    reasoning: str = ""  # before the text, and not in `text`
    tool_calls: list[ToolCallPiece] = []  # what the text says of them is not in `text`

    @property
    def has_text(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)

    def extend(self, other: "ChoicePiece") -> None:
        """Adds the piece that follows this one."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.token_ids += other.token_ids
        self.tool_calls += other.tool_calls
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        if self.logprobs is not None and other.logprobs is not None:
            self.logprobs += other.logprobs


class Usage(msgspec.Struct):
    """Token counts of a whole request, summed over its prompts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    kv: KVUsage = KVUsage()
    reasoning_tokens: int = 0  # of the completion's

    def to_openai(
        self, read: str = "prompt", made: str = "completion"
    ) -> dict[str, Any]:
        """`read` and `made` are what an endpoint calls them."""
        return {
            f"{read}_tokens": self.prompt_tokens,
            f"{made}_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            f"{read}_tokens_details": {"cached_tokens": self.kv.cached_tokens},
            f"{made}_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def baton_kv(self, leg: str = "") -> dict[str, int]:
        """Where the prompts' KV came from, in tokens; `leg` is "prefill_" for that leg."""
        names = ("transferred", "recomputed", "skipped")
        return {name: getattr(self.kv, leg + name) for name in names}


def add_kv(usages: Sequence[KVUsage]) -> KVUsage:
    """The sum over several prompts."""
    names = KVUsage.__struct_fields__
    return KVUsage(
        **{name: sum(getattr(usage, name) for usage in usages) for name in names}
    )


def kv_header(usage: Usage, leg: str = "") -> str:
    """The value of the `x-baton-kv` response header, or of the one of the prefill `leg`."""
    return ", ".join(f"{name}={tokens}" for name, tokens in usage.baton_kv(leg).items())


class ResponseWriter:
    """Writes the answer to one request; the subclasses know the endpoints' shapes.

    Args:
        response_id: unique. The answer's `id` is made from it, unless its request names one.
        created: seconds since the epoch.
        fingerprint: of the model and this version: what a seed's results depend on.
    """

    id_prefix: ClassVar[str]
    has_prompt_ids_in_choices: ClassVar[bool] = True
    full_object: ClassVar[str]
    chunk_object: ClassVar[str]
    end: ClassVar[bytes] = sse.DONE  # what a stream ends with

    def __init__(
        self,
        response_id: str,
        created: int,
        asked: GenerationRequest,
        fingerprint: str | None = None,
    ) -> None:
        self._asked = asked
        self._head = {
            "id": self.id_prefix + (asked.request_id or response_id),
            "created": created,
            "model": asked.model,
            "system_fingerprint": fingerprint,
        }

    def choice(self, piece: ChoicePiece) -> dict[str, Any]:
        """One entry of `choices` in a whole response."""
        asked = piece.prompt_logprobs
        return self.delta(piece) | ({} if asked is None else {"prompt_logprobs": asked})

    def delta(self, piece: ChoicePiece) -> dict[str, Any]:
        """One entry of `choices` in a chunk."""
        raise NotImplementedError

    def parts(self, piece: ChoicePiece) -> list[ChoicePiece]:
        """What is told in an event of its own."""
        return [piece]

    def about_prompt(self, piece: ChoicePiece) -> dict[str, Any]:
        """What the event of a piece has of its prompt outside of `choices`."""
        return {}

    def chunk(self, piece: ChoicePiece, usage: Usage | None = None) -> bytes:
        """The events for one piece of one choice; `usage` so far where a client wants it."""
        tail = (
            {"usage": usage and usage.to_openai()} if self._asked.include_usage else {}
        )
        return self._events(piece, tail, tail)

    def last_chunk(
        self, piece: ChoicePiece, usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        """The events for the piece that finishes the last choice, with `baton_kv` on the last."""
        tail = {"baton_kv": usage.baton_kv(), **extra}
        if not self._asked.include_usage:
            return self._events(piece, {}, tail)
        so_far = usage if self._asked.continuous_usage else None
        return self.chunk(piece, so_far) + self._choices_event(
            [], {"usage": usage.to_openai(), **tail}
        )

    def error(self, error: BatonError) -> bytes:
        """What ends a stream that failed."""
        return sse.error_event(error)

    def take(self, piece: ChoicePiece) -> None:
        """The next piece of an answer that is told whole."""

    def full(
        self, pieces: Sequence[ChoicePiece], usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        """The whole response body, of the pieces that were taken, joined by choice."""
        choices = [self._with_extras(self.choice(piece), piece) for piece in pieces]
        body = {**self._head, "object": self.full_object, "choices": choices}
        return _encode({**body, "usage": usage.to_openai(), **extra})

    def _events(
        self, piece: ChoicePiece, tail: dict[str, Any], last: dict[str, Any]
    ) -> bytes:
        parts = self.parts(piece)
        events: list[bytes] = []
        for number, part in enumerate(parts, 1):
            choice = self._with_extras(self.delta(part), part)
            more = last if number == len(parts) else tail
            events.append(
                self._choices_event([choice], {**self.about_prompt(part), **more})
            )
        return b"".join(events)

    def _choices_event(
        self, choices: list[dict[str, Any]], tail: dict[str, Any]
    ) -> bytes:
        body = {**self._head, "object": self.chunk_object, "choices": choices, **tail}
        return sse.event(_encode(body))

    def _with_extras(
        self, choice: dict[str, Any], piece: ChoicePiece
    ) -> dict[str, Any]:
        """Adds what is not OpenAI's, where it was asked for or there is something to tell."""
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._asked.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.prompt_token_ids is not None and self.has_prompt_ids_in_choices:
                choice["prompt_token_ids"] = piece.prompt_token_ids
        return choice


def _entry(
    piece: ChoicePiece, shape: Callable[[Sequence[TokenReport]], Any], **own: Any
) -> dict[str, Any]:
    logprobs = None if piece.logprobs is None else shape(piece.logprobs)
    end = {"logprobs": logprobs, "finish_reason": piece.finish_reason}
    return {"index": piece.index, **own, **end}


class CompletionWriter(ResponseWriter):
    id_prefix = "cmpl-"
    full_object = "text_completion"
    chunk_object = "text_completion"

    def delta(self, piece: ChoicePiece) -> dict[str, Any]:
        return _entry(piece, completion_logprobs, text=piece.text)


class ChatWriter(ResponseWriter):
    id_prefix = "chatcmpl-"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_prompt_ids_in_choices = False  # its choices share one prompt
    _is_prompt_written = False

    def about_prompt(self, piece: ChoicePiece) -> dict[str, Any]:
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
        return _entry(piece, chat_logprobs, message=message)

    def parts(self, piece: ChoicePiece) -> list[ChoicePiece]:
        """Thoughts, a text, what is new of one call, and the end, as OpenAI tells them: some
        clients look for one of them only."""
        if not (
            piece.tool_calls or piece.finish_reason or (piece.reasoning and piece.text)
        ):
            return [piece]
        told: list[dict[str, Any]] = [
            {"reasoning": piece.reasoning},
            {"text": piece.text},
        ]
        told += ({"tool_calls": [call]} for call in piece.tool_calls)
        told += [
            {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        ]
        parts = [ChoicePiece(piece.index, **one) for one in told if any(one.values())]
        parts[0].first, parts[0].prompt_token_ids = piece.first, piece.prompt_token_ids
        parts[0].logprobs, parts[0].token_ids = piece.logprobs, piece.token_ids
        return parts

    def delta(self, piece: ChoicePiece) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if piece.first else {}
        if piece.text or piece.first:
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = [call.delta() for call in piece.tool_calls]
        return _entry(piece, chat_logprobs, delta=delta)

    def full(
        self, pieces: Sequence[ChoicePiece], usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        own = self.about_prompt(pieces[0])
        found = [p.prompt_logprobs for p in pieces if p.prompt_logprobs is not None]
        if found:
            own["prompt_logprobs"] = found[0]
        return super().full(pieces, usage, {**extra, **own})


def completion_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    """The `logprobs` of a completion's choice: parallel lists, one entry per token."""
    return {
        "tokens": [report.token.text for report in reports],
        "token_logprobs": [report.logprob for report in reports],
        "top_logprobs": [_by_text(report) for report in reports],
        "text_offset": [report.offset for report in reports],
    }


def _by_text(report: TokenReport) -> dict[str, float] | None:
    """The token itself is always there, as in OpenAI's API."""
    if report.logprob is None:
        return None
    found = {report.token.text: report.logprob}
    for token, logprob in report.top:
        found.setdefault(token.text, logprob)
    return found


def chat_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice: one object per token."""
    content = []
    for report in reports:
        tops = [_of_token(token, logprob) for token, logprob in report.top]
        content.append(
            {**_of_token(report.token, report.logprob), "top_logprobs": tops}
        )
    return {"content": content, "refusal": None}


def _of_token(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}


def model_card(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    """One entry of /v1/models; `max_model_len` in tokens, None until the engine said."""
    about = {"object": "model", "created": created, "owned_by": "baton"}
    origin = {"root": name, "parent": None}  # no server has adapters
    return {"id": name, **about, **origin, "max_model_len": max_model_len}
