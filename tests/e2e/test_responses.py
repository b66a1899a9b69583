"""/v1/responses through a prefill and a decode server, with OpenAI's own client."""

import openai
import pydantic
import pytest

from tests.rigs.client import MODEL
from tests.rigs.cluster import Cluster

_INPUT = "Tell a story about Anna and the red ball."


class Ball(pydantic.BaseModel):
    is_round: bool


def test_a_response_has_the_chats_text_and_usage(
    client: openai.OpenAI, tiny_cluster: Cluster
) -> None:
    before = tiny_cluster.decode[0].metrics()
    answer = client.responses.create(
        model=MODEL, input=_INPUT, instructions="Be kind.", max_output_tokens=12, temperature=0
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
    assert answer.status == ("incomplete" if chat.choices[0].finish_reason == "length" else
                             "completed")  # fmt: skip


def test_a_stream_has_every_event_and_ends(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=_INPUT, max_output_tokens=9, temperature=0)
    with client.responses.stream(
        model=MODEL, input=_INPUT, max_output_tokens=9, temperature=0
    ) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response." + str(whole.status)


def test_a_pydantic_model_is_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model=MODEL, input=_INPUT, text_format=Ball, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Ball)


def test_what_is_not_supported_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x " * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
