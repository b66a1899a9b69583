"""The proxy with OpenAI's Python client."""

from typing import Any

import openai
import pydantic
import pytest

from protocol.metrics import TABLE
from tests.rigs.client import MODEL
from tests.rigs.cluster import Server
from tests.rigs.plain_http import http

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_PROMPT = "Emma painted the green boat near the river. Emma"
_MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell a story about Anna and the red ball."},
]
_GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
_PAST_THE_END = {"ignore_eos": True}  # an extension of OpenAI's API, sent as extra_body


def test_served_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


def _complete(client: openai.OpenAI, prompt: Any = _PROMPT, **members: Any) -> Any:
    return client.completions.create(
        **_GREEDY, prompt=prompt, extra_body=_PAST_THE_END, **members
    )


def _chat(client: openai.OpenAI, **members: Any) -> Any:
    return client.chat.completions.create(
        **{**_GREEDY, "messages": _MESSAGES, **members}
    )


def test_completion_has_transformers_text_and_exact_usage(client, tiny_reference):
    answer = _complete(client, max_tokens=24)
    (choice,) = answer.choices
    assert choice.text == tiny_reference.text(_PROMPT, 24)
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    num_prompt = len(tiny_reference.tokenizer(_PROMPT).input_ids)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 24)
    assert usage.total_tokens == num_prompt + 24
    assert _complete(client).usage.completion_tokens == 16  # by default


def test_streamed_completion_equals_the_complete_one(client, tiny_reference):
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = _complete(client, max_tokens=24, **with_usage)
    assert "".join(chunk.choices[0].text for chunk in chunks) == tiny_reference.text(
        _PROMPT, 24
    )
    assert len(chunks) > 12, "tokens did not arrive one by one"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert {chunk.id for chunk in chunks} == {last.id}
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks)


def test_several_prompts_as_token_ids_and_as_streamed_texts(client, tiny_reference):
    prompts = [_PROMPT, "Leo families the golden key", "Ida"]
    expected = [tiny_reference.text(prompt, 8) for prompt in prompts]
    ids = [tiny_reference.tokenizer(prompt).input_ids for prompt in prompts]
    answer = _complete(client, ids, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.completion_tokens == 24
    texts = ["", "", ""]
    reasons = {}
    for chunk in _complete(client, prompts, max_tokens=8, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == expected
    assert reasons == dict.fromkeys(range(3), "length")


def test_chat_equals_template_and_greedy_generation(client, tiny_reference):
    ids, text = tiny_reference.answer(_MESSAGES, 120)
    answer = _chat(client, max_tokens=120)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    ended = ids[-1] == tiny_reference.tokenizer.eos_token_id
    assert choice.finish_reason == ("stop" if ended else "length")
    assert (answer.object, answer.usage.completion_tokens) == (
        "chat.completion",
        len(ids),
    )


@pytest.mark.parametrize("is_right", [True, False])
def test_prediction_changes_no_token(client, tiny_reference, is_right):
    ids, text = tiny_reference.answer(_MESSAGES, 60)
    content = text if is_right else _PROMPT
    chunks = list(
        _chat(
            client,
            max_tokens=60,
            n=2,
            prediction={"type": "content", "content": content},
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert texts == [text, text]
    usage = chunks[-1].usage
    details = usage.completion_tokens_details
    assert usage.completion_tokens == 2 * len(ids)
    assert 0 <= details.accepted_prediction_tokens <= usage.completion_tokens
    assert details.rejected_prediction_tokens >= 0


def test_streaming_helper_of_the_client_reads_a_chat(client, tiny_reference):
    _, text = tiny_reference.answer(_MESSAGES, 60)
    with client.chat.completions.stream(
        **_GREEDY,
        messages=_MESSAGES,
        max_tokens=60,
        stop=["."],
        n=2,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    for choice in final.choices:
        assert choice.message.content == text[: text.index(".")]
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content
    assert len(final.choices) == 2 and kinds.count("content.delta") > 3
    assert final.usage is not None and final.usage.completion_tokens > 3


def test_errors_become_exceptions_of_the_client(client):
    with pytest.raises(openai.NotFoundError, match="gpt-17") as unknown:
        client.completions.create(model="gpt-17", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature") as bad_value:
        _chat(client, temperature=7)
    assert bad_value.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="tools") as unsupported:
        _chat(client, stream=True, tools=[{"type": "function", "function": {}}])
    assert unsupported.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 4096)
    assert long.value.code == "context_length_exceeded"


def test_servers_expose_exactly_the_documented_metrics(client, tiny_cluster):
    _complete(client, max_tokens=2)
    proxy, *servers = (_families(server) for server in tiny_cluster.servers())
    origins = {"proxy": ("proxy", "any"), "server": ("server", "engine", "any")}
    docs = {
        role: {(s.name, s.kind): s for s in TABLE if s.origin in role_origins}
        for role, role_origins in origins.items()
    }
    assert proxy == docs["proxy"].keys()
    together = set().union(*servers)
    always = {key for key, spec in docs["server"].items() if not spec.labels}
    assert always <= together <= docs["server"].keys()


def _families(server: Server) -> set[tuple[str, str]]:
    """Return the names and types of all metrics in /metrics, without the suffix
    `_total`.
    """
    lines = http.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    families = (line.split()[2:] for line in lines if line.startswith("# TYPE baton_"))
    return {(name.removesuffix("_total"), kind) for name, kind in families}


# -- /v1/responses

_INPUT = "Tell a story about Anna and the red ball."


class Ball(pydantic.BaseModel):
    is_round: bool


def test_response_has_text_and_usage_of_the_chat(client, tiny_cluster):
    before = tiny_cluster.decode[0].metrics()
    answer = client.responses.create(
        model=MODEL,
        input=_INPUT,
        instructions="Be kind.",
        max_output_tokens=12,
        temperature=0,
    )
    moved = 'baton_kv_tokens_total{source="transferred"}'
    assert tiny_cluster.decode[0].metrics()[moved] > before.get(moved, 0.0)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": _INPUT},
        ],
        max_tokens=12,
        temperature=0,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None and chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    is_cut = chat.choices[0].finish_reason == "length"
    assert answer.status == ("incomplete" if is_cut else "completed")


def test_response_is_parsed_as_a_pydantic_model(client):
    answer = client.responses.parse(
        model=MODEL, input=_INPUT, text_format=Ball, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Ball)
