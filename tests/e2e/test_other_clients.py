"""langchain-openai and litellm read the proxy's answers, streams and errors."""

import asyncio
import enum
import functools
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

import pydantic
import pytest

from tests.e2e.reference import Reference
from tests.rigs.client import MODEL
from tests.rigs.cluster import Cluster

# For every chunk, litellm reads a deprecated attribute of pydantic's models.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecatedSince211"
)

_MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell a story about Leo and the green kite."},
]
_LANGCHAIN_MESSAGES = [(message["role"], message["content"]) for message in _MESSAGES]
_PROMPT = "Ida lost the white letter at night. Ida"
_LIMIT = 40


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import the clients. At the top of the file, the import would take 4 s in every
    process that collects the tests.
    """
    global ToolMessage, langchain_core, langchain_openai, litellm
    # Without this variable, litellm downloads a file.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import langchain_core.exceptions
    import langchain_openai
    import litellm
    from langchain_core.messages import ToolMessage


@pytest.fixture(scope="module")
def answer(tiny_reference: Reference) -> str:
    """The greedy answer of transformers to the messages, at most _LIMIT tokens long."""
    return tiny_reference.answer(_MESSAGES, _LIMIT)[1]


@pytest.fixture(scope="module")
def continuation(tiny_reference: Reference) -> str:
    """The greedy continuation of the prompt by transformers, up to the first full
    stop.
    """
    return tiny_reference.text(_PROMPT, _LIMIT).partition(".")[0]


@pytest.fixture
def chat(tiny_cluster: Cluster) -> Callable[..., Any]:
    """A function that makes langchain's chat model with the given arguments."""

    def make(**members: Any) -> Any:
        arguments = {"model": MODEL, "temperature": 0, "max_tokens": _LIMIT, **members}
        return langchain_openai.ChatOpenAI(
            base_url=f"{tiny_cluster.url}/v1",
            api_key="unused",
            max_retries=0,
            **arguments,
        )

    return make


@pytest.fixture
def lite(tiny_cluster: Cluster) -> Iterator[dict[str, Any]]:
    """litellm's arguments for the proxy.

    The fixture provides an event loop. Otherwise litellm creates one and leaves it
    open, and pytest blames the next test.
    """
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        yield {
            "model": f"openai/{MODEL}",
            "api_base": f"{tiny_cluster.url}/v1",
            "api_key": "unused",
            "max_retries": 0,
            "timeout": 60,
            "temperature": 0,
            "max_tokens": _LIMIT,
        }


def test_langchain_chats(chat, answer):
    message = chat(logprobs=True, top_logprobs=2).invoke(_LANGCHAIN_MESSAGES)
    assert message.content == answer
    assert message.response_metadata["finish_reason"] in ("stop", "length")
    assert message.response_metadata["model_name"] == MODEL
    assert message.usage_metadata["input_tokens"] > 10
    assert message.usage_metadata["output_tokens"] <= _LIMIT
    entries = message.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(answer)
    assert all(
        entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in entries
    )


def test_langchain_streams_with_usage(chat, answer):
    chunks = list(chat(stream_usage=True).stream(_LANGCHAIN_MESSAGES))
    assert "".join(chunk.content for chunk in chunks) == answer
    num_pieces = sum(bool(chunk.content) for chunk in chunks)
    assert num_pieces > len(answer.split()) // 2, "tokens did not arrive one by one"
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert len(usages) == 1 and usages[0]["output_tokens"] <= _LIMIT


def test_langchain_completes_texts(tiny_cluster, continuation):
    arguments = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": _LIMIT,
        "max_retries": 0,
    }
    model = langchain_openai.OpenAI(
        base_url=f"{tiny_cluster.url}/v1", api_key="unused", **arguments
    )
    assert model.invoke(_PROMPT, stop=["."]) == continuation
    assert "".join(model.stream(_PROMPT, stop=["."])) == continuation
    assert model.batch([_PROMPT] * 3, stop=["."]) == [continuation] * 3


def test_langchain_recognizes_a_context_overflow(chat):
    with pytest.raises(langchain_core.exceptions.ContextOverflowError):
        chat().invoke([("user", "ball " * 5000)])


def test_litellm_streams_to_the_same_answer(lite, answer):
    chunks = list(
        litellm.completion(
            messages=_MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **lite,
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert len({chunk.id for chunk in chunks}) == 1
    rebuilt = litellm.stream_chunk_builder(chunks, messages=_MESSAGES)
    assert rebuilt.choices[0].message.content == answer
    complete_answer = litellm.completion(messages=_MESSAGES, **lite)
    assert rebuilt.usage.prompt_tokens == complete_answer.usage.prompt_tokens
    assert rebuilt.usage.completion_tokens == complete_answer.usage.completion_tokens


def test_litellm_completes_texts(lite, continuation):
    lite = {**lite, "model": f"text-completion-openai/{MODEL}", "stop": ["."]}
    response = litellm.text_completion(prompt=_PROMPT, **lite)
    assert response.choices[0].text == continuation


def test_litellm_maps_errors_to_its_exceptions(lite):
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=_MESSAGES, top_p=3.0, **lite)
    with pytest.raises(litellm.NotFoundError, match="gpt-17"):
        litellm.completion(messages=_MESSAGES, **{**lite, "model": "openai/gpt-17"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            messages=[{"role": "user", "content": "ball " * 5000}], **lite
        )


# -- structured output and tools


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


class Toy(pydantic.BaseModel):
    """A toy in the garden."""

    # If the schema allowed other members, a tiny model would invent members until it
    # reaches its token limit.
    model_config = pydantic.ConfigDict(extra="forbid")

    colour: Colour
    is_old: bool


_TOOL = {
    "type": "function",
    "function": {
        "name": "find_toy",
        "description": "Finds a toy.",
        "parameters": Toy.model_json_schema(),
    },
}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(chat, method):
    model = chat(max_tokens=200).with_structured_output(Toy, method=method)
    assert isinstance(model.invoke(_LANGCHAIN_MESSAGES), Toy)


def test_langchain_calls_tools(chat):
    model = chat(max_tokens=200).bind_tools([Toy], tool_choice="Toy")
    message = model.invoke(_LANGCHAIN_MESSAGES)
    (call,) = message.tool_calls
    assert call["name"] == "Toy"
    toy = Toy.model_validate(call["args"])
    streamed = list(model.stream(_LANGCHAIN_MESSAGES))
    joined = functools.reduce(operator.add, streamed)
    assert [(c["name"], c["args"]) for c in joined.tool_calls] == [
        ("Toy", call["args"])
    ]
    assert len(streamed) > 3, "arguments did not arrive in pieces"
    answered = [
        *_LANGCHAIN_MESSAGES,
        message,
        ToolMessage(toy.colour, tool_call_id=call["id"]),
    ]
    assert chat().invoke(answered).content is not None


def test_litellm_calls_tools(lite):
    lite = {**lite, "max_tokens": 200, "tools": [_TOOL], "tool_choice": "required"}
    # Otherwise the tiny model adds calls until it happens to end the message.
    lite["parallel_tool_calls"] = False
    message = litellm.completion(messages=_MESSAGES, **lite).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "find_toy"
    Toy.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(messages=_MESSAGES, stream=True, **lite))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=_MESSAGES)
    (again,) = rebuilt.choices[0].message.tool_calls
    assert again.function.arguments == call.function.arguments
    assert rebuilt.choices[0].finish_reason == "tool_calls"


def test_claude_code_gets_complete_calls_through_litellm(lite):
    """From the event that begins a call, litellm forwards only the function's name, so
    this event must contain no arguments.
    """
    from litellm.llms.anthropic.experimental_pass_through.adapters import (
        streaming_iterator,
    )

    arguments = {**lite, "max_tokens": 200, "tools": [_TOOL], "tool_choice": "required"}
    arguments |= {
        "parallel_tool_calls": False,
        "stream_options": {"include_usage": True},
    }
    chunks = litellm.completion(messages=_MESSAGES, stream=True, **arguments)
    events = list(streaming_iterator.AnthropicStreamWrapper(chunks, MODEL))
    entries = [
        event["delta"] for event in events if event["type"] == "content_block_delta"
    ]
    assert Toy.model_validate_json(
        "".join(delta.get("partial_json", "") for delta in entries)
    ).colour
