"""Reading a request body before anything is known of it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import InvalidRequest
from protocol.openai.chat import parse_chat
from protocol.openai.completions import parse_completion
from protocol.openai.requests import Strict, neutral, parse_json_object, validate
from protocol.openai.responses_request import parse_responses
from protocol.openai.tokenize import parse_tokenize


@pytest.mark.parametrize("body", [b'{"prompt": [' + b"[]," * 400_000 + b"[]]}", b"[" * (1 << 20)])
def test_the_collector_rests_while_a_large_body_is_read_and_not_after(body: bytes) -> None:
    begun: list[str] = []

    def seen(phase: str, info: dict[str, int]) -> None:
        begun.append(phase)

    gc.collect()
    gc.callbacks.append(seen)
    try:
        parse_json_object(body)
    except InvalidRequest:
        assert body.startswith(b"[[")
    finally:
        gc.callbacks.remove(seen)
    assert gc.isenabled() and len(begun) <= 4  # what making the error, or the answer, set off


COMPLETION: tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]
COMPLETION = (parse_completion, {"model": "m", "prompt": "a"})
CHAT = (parse_chat, {"model": "m", "messages": [{"role": "user", "content": "a"}]})
RESPONSES = (parse_responses, {"model": "m", "input": "a"})
TOKENIZE = (parse_tokenize, {"prompt": "a"})


@pytest.mark.parametrize(
    ("endpoint", "field", "told"),
    [
        (
            RESPONSES,
            "stop",
            "is not a parameter of /v1/responses but of /v1/chat/completions and /v1/completions; "
            "leave it out.",
        ),
        (RESPONSES, "max_tokens", "is called `max_output_tokens` at /v1/responses; send that."),
        (RESPONSES, "messages", "is called `input` at /v1/responses; send that."),
        (COMPLETION, "messages", "is called `prompt` at /v1/completions; send that."),
        (CHAT, "prompt", "is called `messages` at /v1/chat/completions; send that."),
        (
            COMPLETION,
            "tools",
            "is not a parameter of /v1/completions but of /v1/chat/completions; leave it out.",
        ),
        (TOKENIZE, "input", "is called `messages` at /tokenize; send that."),
        (RESPONSES, "topp", "is not supported (did you mean top_p?); leave it out."),
        (CHAT, "message", "is not supported (did you mean messages?); leave it out."),
        (CHAT, "weather", "is not supported; leave it out."),
    ],
)
def test_a_field_of_another_endpoint_is_told_from_a_misspelt_one(
    endpoint: tuple[Callable[[dict[str, Any]], Any], dict[str, Any]], field: str, told: str
) -> None:
    parse, body = endpoint
    with pytest.raises(InvalidRequest) as caught:
        parse({**body, field: "x"})
    assert caught.value.message == f"`{field}` {told}"
    assert caught.value.param == field


def test_zero_may_be_written_as_integer_or_float_but_never_as_false() -> None:
    class Body(Strict):
        number: Any = neutral(0.0)
        one: Any = neutral(1)
        switch: Any = neutral(True)

    for given in ({"number": 0, "one": 1, "switch": True}, {"number": 0.0}, {"one": None}):
        assert validate(Body, given) == Body()
    for field, value in (("number", False), ("one", True), ("one", 1.0), ("switch", 1)):
        with pytest.raises(InvalidRequest, match=f"`{field}`"):
            validate(Body, {field: value})
