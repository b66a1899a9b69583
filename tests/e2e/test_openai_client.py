"""OpenAI's own client against the proxy: what it sends is understood, what it gets it can read."""

import asyncio
from typing import Any

import openai
import pydantic
import pytest

from protocol.metrics import TABLE
from tests.e2e.reference import Reference
from tests.rigs.client import MODEL, complete
from tests.rigs.cluster import Cluster, Server, wait_until
from tests.rigs.plain_http import http

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_PROMPT = "Emma painted the green boat near the river. Emma"
_MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell a story about Anna and the red ball."},
]
_GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
_PAST_THE_END = {"ignore_eos": True}  # not OpenAI's, so it goes as extra_body


def _text(reference: Reference, prompt: str, num_tokens: int) -> str:
    """transformers' greedy continuation, past any end of sequence."""
    ids = reference.tokenizer(prompt).input_ids
    text: str = reference.tokenizer.decode(
        reference.generate(ids, num_tokens), skip_special_tokens=True
    )
    return text


def _answer(reference: Reference, limit: int) -> tuple[list[int], str]:
    """transformers' greedy answer to the messages, up to its end of sequence: (ids, text)."""
    prompt = reference.tokenizer.apply_chat_template(
        _MESSAGES, add_generation_prompt=True, return_dict=False
    )
    ids = reference.generate(prompt, limit)
    end = reference.tokenizer.eos_token_id
    ids = ids[: ids.index(end) + 1] if end in ids else ids
    return ids, reference.tokenizer.decode(ids, skip_special_tokens=True)


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


def _complete(client: openai.OpenAI, prompt: Any = _PROMPT, **members: Any) -> Any:
    return client.completions.create(**_GREEDY, prompt=prompt, extra_body=_PAST_THE_END, **members)


def _chat(client: openai.OpenAI, **members: Any) -> Any:
    return client.chat.completions.create(**{**_GREEDY, "messages": _MESSAGES, **members})


def test_a_completion_has_transformers_text_and_exact_usage(
    client: openai.OpenAI, tiny_reference: Reference
) -> None:
    answer = _complete(client, max_tokens=24)
    (choice,) = answer.choices
    assert choice.text == _text(tiny_reference, _PROMPT, 24)
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    num_prompt = len(tiny_reference.tokenizer(_PROMPT).input_ids)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 24)
    assert usage.total_tokens == num_prompt + 24
    assert _complete(client).usage.completion_tokens == 16  # by default


def test_a_streamed_completion_joins_to_the_whole_one(
    client: openai.OpenAI, tiny_reference: Reference
) -> None:
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *told, last = _complete(client, max_tokens=24, **with_usage)
    assert "".join(chunk.choices[0].text for chunk in told) == _text(tiny_reference, _PROMPT, 24)
    assert len(told) > 12, "tokens come as they are made"
    assert [c.choices[0].finish_reason for c in told[-2:]] == [None, "length"]
    assert {chunk.id for chunk in told} == {last.id}
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in told)


def test_several_prompts_as_texts_as_ids_and_streamed(
    client: openai.OpenAI, tiny_reference: Reference
) -> None:
    prompts = [_PROMPT, "Leo found the golden key", "Ida"]
    expected = [_text(tiny_reference, prompt, 8) for prompt in prompts]
    ids = [tiny_reference.tokenizer(prompt).input_ids for prompt in prompts]
    for given in (prompts, ids):
        answer = _complete(client, given, max_tokens=8)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 24
    (one,) = _complete(client, ids[0], max_tokens=8).choices
    assert one.text == expected[0]
    texts, reasons = ["", "", ""], {}
    for chunk in _complete(client, prompts, max_tokens=8, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == expected and reasons == dict.fromkeys(range(3), "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [".", ["%", " the "], ["."] * 4 + ["the"], "ver"])
def test_a_stop_string_ends_the_text_before_it(
    client: openai.OpenAI, tiny_reference: Reference, stop: Any, stream: bool
) -> None:
    whole = _text(tiny_reference, _PROMPT, 60)
    stops = [stop] if isinstance(stop, str) else stop
    ends = [whole.index(one) for one in stops if one in whole]
    answer = _complete(client, max_tokens=60, stop=stop, stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: min(ends, default=None)]
    assert choices[-1].finish_reason == ("stop" if ends else "length")


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    (choice,) = _complete(client, max_tokens=5, logprobs=3).choices
    assert "".join(choice.logprobs.tokens) == choice.text
    told = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    for chosen, top in zip(*told, strict=True):
        assert chosen == max(top.values()) <= 0, "greedy takes the likeliest"
        assert len(top) >= 3


def test_a_chat_is_the_template_and_a_greedy_generate(
    client: openai.OpenAI, tiny_reference: Reference
) -> None:
    ids, text = _answer(tiny_reference, 120)
    answer = _chat(client, max_tokens=120)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    ended = ids[-1] == tiny_reference.tokenizer.eos_token_id
    assert choice.finish_reason == ("stop" if ended else "length")
    assert (answer.object, answer.usage.completion_tokens) == ("chat.completion", len(ids))


def test_a_streamed_chat_joins_to_the_whole_one(
    client: openai.OpenAI, tiny_reference: Reference
) -> None:
    ids, text = _answer(tiny_reference, 30)
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *told, last = _chat(client, max_completion_tokens=30, **with_usage)
    deltas = [chunk.choices[0].delta for chunk in told]
    assert "".join(delta.content or "" for delta in deltas) == text
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert told[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == [] and last.usage.completion_tokens == len(ids)


def test_the_clients_streaming_helper_follows_a_chat(
    client: openai.OpenAI, tiny_reference: Reference
) -> None:
    _, text = _answer(tiny_reference, 60)
    with client.chat.completions.stream(
        **_GREEDY, messages=_MESSAGES, max_tokens=60, stop=["."]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(".")]
    assert final.choices[0].finish_reason == "stop"
    assert kinds.count("content.delta") > 3


def test_a_chat_without_a_limit_may_fill_the_context(
    client: openai.OpenAI, tiny_reference: Reference
) -> None:
    def messages(num_words: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "ball " * num_words}]

    def count(num_words: int) -> int:
        template = tiny_reference.tokenizer.apply_chat_template
        asked = messages(num_words)
        return len(template(asked, add_generation_prompt=True, return_dict=False))

    num_words = int(4060 / (count(1001) - count(1)) * 1000)
    answer = _chat(client, messages=messages(num_words), extra_body=_PAST_THE_END)
    assert answer.usage.prompt_tokens == count(num_words) < 4096
    assert answer.usage.total_tokens == 4096
    assert answer.choices[0].finish_reason == "length"


def test_a_seed_repeats_a_draw_and_seeds_differ(
    client: openai.OpenAI, tiny_cluster: Cluster
) -> None:
    shape = {"temperature": 1.5, "top_p": 0.95}

    def draw(seed: int) -> str:
        extra = {**_PAST_THE_END, "top_k": 40}
        asked: Any = {"model": MODEL, "prompt": _PROMPT, "max_tokens": 30, **shape}
        answer = client.completions.create(**asked, seed=seed, extra_body=extra)
        return str(answer.choices[0].text)

    drawn = [draw(seed) for seed in range(4)]
    assert len(set(drawn)) == 4
    assert [draw(seed) for seed in range(4)] == drawn
    alone = complete(tiny_cluster.decode[0].url, _PROMPT, 30, **shape, top_k=40, seed=2)
    assert alone.text == drawn[2]


def test_values_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    neutral: dict[str, Any] = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    neutral |= {"logprobs": False, "tools": [], "user": "somebody"}
    extra = {"min_tokens": 1, "skip_special_tokens": True, "include_reasoning": True}
    plain = {"response_format": {"type": "text"}, "extra_body": extra}
    assert _chat(client, max_tokens=3, **neutral, **plain).usage.completion_tokens == 3


def test_errors_become_the_clients_classes(client: openai.OpenAI) -> None:
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


def test_the_kv_really_went_from_one_server_to_the_other(
    client: openai.OpenAI, tiny_reference: Reference
) -> None:
    prompt = "Kate bought the silver lamp at night. " * 6
    num_tokens = len(tiny_reference.tokenizer(prompt).input_ids)
    raw = client.completions.with_raw_response.create(**_GREEDY, prompt=prompt, max_tokens=4)
    assert raw.headers["x-baton-kv"] == f"transferred={num_tokens}, recomputed=0, skipped=0"
    usage = raw.parse().usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    chunks = list(
        client.completions.create(**_GREEDY, prompt=prompt[5:], max_tokens=4, stream=True)
    )
    kv = (chunks[-1].model_extra or {})["baton_kv"]
    assert kv["transferred"] > 0 and kv["recomputed"] == 0


def test_the_async_client_asks_many_at_once(
    tiny_cluster: Cluster, tiny_reference: Reference
) -> None:
    prompts = [f"{name} took the {colour} map" for name in ("Ben", "Ida") for colour in "abcd"]

    async def whole(client: openai.AsyncOpenAI, prompt: str) -> str:
        answer = await client.completions.create(
            **_GREEDY, prompt=prompt, max_tokens=10, extra_body=_PAST_THE_END
        )
        return answer.choices[0].text

    async def streamed(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            **_GREEDY, prompt=prompt, max_tokens=10, stream=True, extra_body=_PAST_THE_END
        )
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async def chatted(client: openai.AsyncOpenAI) -> str | None:
        answer = await client.chat.completions.create(**_GREEDY, messages=_MESSAGES, max_tokens=30)
        return answer.choices[0].message.content

    async def ask() -> tuple[str | None, list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{tiny_cluster.url}/v1", api_key="unused", max_retries=0, timeout=60
        ) as client:
            calls = [call(client, prompt) for prompt in prompts for call in (whole, streamed)]
            chat, *texts = await asyncio.gather(chatted(client), *calls)
            return chat, texts

    chat, texts = asyncio.run(ask())
    expected = [_text(tiny_reference, prompt, 10) for prompt in prompts]
    assert texts[0::2] == expected
    assert texts[1::2] == expected
    assert chat == _answer(tiny_reference, 30)[1]


def test_a_client_that_closes_its_stream_aborts_the_request(
    client: openai.OpenAI, tiny_cluster: Cluster
) -> None:
    decode = tiny_cluster.decode[0]
    aborted = 'baton_requests_total{endpoint="completions",outcome="abort"}'
    before = decode.metrics().get(aborted, 0)
    stream = _complete(client, max_tokens=3900, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: decode.metrics().get(aborted, 0) == before + 1)
    wait_until(lambda: decode.metrics()["baton_requests_running"] == 0)
    wait_until(decode.all_blocks_home)


def test_servers_expose_the_metrics_of_the_docs_and_no_others(
    client: openai.OpenAI, tiny_cluster: Cluster
) -> None:
    _complete(client, max_tokens=2)
    proxy, *servers = (_families(server) for server in tiny_cluster.servers())
    origins = {"proxy": ("proxy", "any"), "server": ("server", "engine", "any")}
    docs = {
        name: {(s.name, s.kind): s for s in TABLE if s.origin in those}
        for name, those in origins.items()
    }
    assert proxy == docs["proxy"].keys()
    together = set().union(*servers)
    always = {key for key, spec in docs["server"].items() if not spec.labels}
    assert always <= together <= docs["server"].keys()


def _families(server: Server) -> set[tuple[str, str]]:
    """Names and types in /metrics, a counter's without `_total`."""
    lines = http.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    found = (line.split()[2:] for line in lines if line.startswith("# TYPE baton_"))
    return {(name.removesuffix("_total"), kind) for name, kind in found}


# -- /v1/responses

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
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": _INPUT}],
        max_tokens=12,
        temperature=0,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None and chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    is_cut = chat.choices[0].finish_reason == "length"
    assert answer.status == ("incomplete" if is_cut else "completed")


def test_a_stream_of_a_response_has_every_event_and_ends(client: openai.OpenAI) -> None:
    asked: Any = {**_GREEDY, "input": _INPUT, "max_output_tokens": 9}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response." + str(whole.status)


def test_a_response_is_parsed_as_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model=MODEL, input=_INPUT, text_format=Ball, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Ball)


def test_what_responses_do_not_support_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x " * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
