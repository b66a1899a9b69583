"""The bodies of /v1/completions and /v1/chat/completions, validated strictly.

Limits that are choices of ours: temperature up to 2 (as OpenAI), below 1e-5 it is greedy; seed
from 0 to 2**63 - 1 (a negative one is refused, not read as "random"); top_k -1 and 0 are off;
at most 1,024 prompts and 64 stop strings a request. `max_tokens` and `max_completion_tokens` may
both be given: both are limits, so the smaller one counts.
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from protocol.errors import InvalidRequest
from protocol.messages import SamplingParams
from protocol.openai_fields import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NEUTRAL_MESSAGE,
    NEUTRAL_STREAM_OPTIONS,
    drop_neutral,
    shown,
)

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
GREEDY_BELOW = 1e-5  # a softmax this cold overflows float32 and is greedy anyway

_MAX_INT31 = 2**31 - 1

# What each field must be, for the error message. One line per field, in the words of the fix.
_MUST_BE = {
    "model": "the name of a served model",
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids, "
    f"not empty, with at most {MAX_PROMPTS} prompts",
    "messages": "a list, not empty, of objects with `role` and `content`",
    "max_tokens": f"an integer from 1 to {_MAX_INT31}",
    "max_completion_tokens": f"an integer from 1 to {_MAX_INT31}",
    "temperature": "a number from 0 to 2",
    "top_p": "a number above 0 and at most 1",
    "top_k": f"an integer from -1 to {_MAX_INT31} (-1 and 0 are off)",
    "min_p": "a number from 0 to 1",
    "seed": "an integer from 0 to 2**63 - 1",
    "stop": f"a string or a list of at most {MAX_STOPS} strings, none of them empty or longer "
    f"than {MAX_STOP_CHARS} characters",
    "stream": "true or false",
    "stream_options": "an object with `include_usage`: true or false",
    "ignore_eos": "true or false",
    "return_token_ids": "true or false",
    "logprobs": "an integer from 0 to 20",
    "user": "a string",
    "kv_transfer_params": "an object, or a list of objects for several prompts",
}


def _check_prompt(prompt: Any) -> Any:
    """Refuses what no prompt can be; cheap on long lists of token ids."""
    if not isinstance(prompt, str | list) or not prompt:
        raise ValueError("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], int):
        return _check_ids(prompt)
    if len(prompt) > MAX_PROMPTS:
        raise ValueError("prompt")
    if isinstance(prompt[0], str):
        if not all(isinstance(item, str) and item for item in prompt):
            raise ValueError("prompt")
        return prompt
    return [_check_ids(item) for item in prompt]


def _check_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
        raise ValueError("prompt")
    return ids


def _as_stops(stop: Any) -> Any:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOPS:
        raise ValueError("stop")
    if not all(isinstance(item, str) and 0 < len(item) <= MAX_STOP_CHARS for item in stops):
        raise ValueError("stop")
    return tuple(stops)


Tokens = Annotated[int, Field(ge=1, le=_MAX_INT31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False


class GenerationRequest(_Strict):
    """What both endpoints share."""

    endpoint: ClassVar[str]

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_as_stops)] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    user: str | None = None
    kv_transfer_params: dict[str, Any] | list[Any] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        """The tokens that the client allows, or None when it named no limit."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)

    @property
    def num_logprobs(self) -> int | None:
        return None

    def sampling(self, seed: int) -> SamplingParams:
        """How to draw the tokens; `seed` is the client's or one that the server drew."""
        return SamplingParams(
            temperature=self.temperature if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=seed,
            num_logprobs=self.num_logprobs,
        )


class CompletionRequest(GenerationRequest):
    endpoint = "/v1/completions"

    # Checked by hand: pydantic takes milliseconds for the token ids of a long prompt.
    prompt: Annotated[Any, BeforeValidator(_check_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt; a list of token ids is one prompt."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


class Message(_Strict):
    """One turn. `content` given as text parts is joined by newlines."""

    role: Literal["system", "user", "assistant", "developer"]
    content: str
    name: str | None = None  # passed to the chat template, which may use it


class ChatRequest(GenerationRequest):
    endpoint = "/v1/chat/completions"

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]


Request = TypeVar("Request", bound=GenerationRequest)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body, unvalidated: all that a proxy needs to know.

    Raises:
        InvalidRequest: not JSON, or not an object.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON ({error}); send a JSON object.") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body is {shown(body)}; send a JSON object.")
    return body


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Validates the body of /v1/completions. Raises InvalidRequest naming the field."""
    return _validate(CompletionRequest, _clean(body, CompletionRequest, NEUTRAL_COMPLETION))


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Validates the body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    cleaned = _clean(body, ChatRequest, NEUTRAL_CHAT)
    messages = cleaned.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refusal("messages", messages)
    cleaned["messages"] = tuple(_clean_message(i, message) for i, message in enumerate(messages))
    return _validate(ChatRequest, cleaned)


def _clean(
    body: dict[str, Any], model: type[GenerationRequest], neutral: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    cleaned = drop_neutral(body, frozenset(model.model_fields), neutral)
    options = cleaned.get("stream_options")
    if isinstance(options, dict):
        known = frozenset(StreamOptions.model_fields)
        cleaned["stream_options"] = drop_neutral(
            options, known, NEUTRAL_STREAM_OPTIONS, "stream_options."
        )
    return cleaned


def _clean_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"`{where}` is {shown(message)}; it must be an object.", param=where)
    cleaned = drop_neutral(message, frozenset(Message.model_fields), NEUTRAL_MESSAGE, where + ".")
    if isinstance(cleaned.get("content"), list):
        cleaned["content"] = "\n".join(_part_texts(cleaned["content"], where + ".content"))
    for field, must_be in (
        ("role", "system, user, assistant or developer"),
        ("content", "a string or a list of text parts"),
        ("name", "a string"),
    ):
        value = cleaned.get(field, "" if field == "name" else None)
        allowed = field != "role" or value in ("system", "user", "assistant", "developer")
        if not isinstance(value, str) or not allowed:
            raise InvalidRequest(
                f"`{where}.{field}` is {shown(value)}; it must be {must_be}.",
                param=f"{where}.{field}",
            )
    return cleaned


def _part_texts(parts: list[Any], where: str) -> Iterable[str]:
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text" or len(part) != 2:
            raise InvalidRequest(
                f"`{where}[{index}]` is {shown(part)}; only parts "
                '{"type": "text", "text": "..."} are supported.',
                param=f"{where}[{index}]",
            )
        yield text


def _validate(model: type[Request], cleaned: dict[str, Any]) -> Request:
    try:
        return model.model_validate(cleaned)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = str(first["loc"][0])
        raise _refusal(field, cleaned.get(field)) from None


def _refusal(field: str, value: Any) -> InvalidRequest:
    must_be = _MUST_BE.get(field, "left out")
    given = "missing" if value is None else shown(value)
    return InvalidRequest(f"`{field}` is {given}; it must be {must_be}.", param=field)
