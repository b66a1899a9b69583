"""The load benchmark: its arithmetic, and a run against an endpoint of known behaviour."""

import asyncio
import itertools
import json
import statistics
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks import serve
from benchmarks.serve import WORDS, Timeline, arrivals_s, drawn, figures, table, union_s


def timeline(due: float, *token_at: float, **members: Any) -> Timeline:
    found = Timeline(due, token_at=list(token_at), ended_at=token_at[-1], done=True)
    found.output_tokens = len(token_at)
    for name, value in members.items():
        setattr(found, name, value)
    return found


def test_arrivals_are_a_seeded_poisson_process():
    times = arrivals_s(20.0, 5000, seed=1)
    assert times == arrivals_s(20.0, 5000, seed=1) != arrivals_s(20.0, 5000, seed=2)
    assert times[0] == 0.0 and times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(
        1 / 20, rel=0.1
    )  # exponential: equal


def test_prompts_are_seeded_and_share_what_they_are_told_to():
    ids = range(32, 100)
    one, two = (drawn(ids, 20, 0, index, shared=5) for index in (1, 2))
    assert one == drawn(ids, 20, 0, 1, shared=5)
    assert one[:5] == two[:5]
    assert one[5:] != two[5:]
    assert len(one) == 20
    assert all(32 <= token < 100 for token in one)
    assert len(drawn(WORDS, 7, 0, 1)) == 7


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_the_union_of_spans_counts_no_moment_twice(spans):
    covered = {t for start, length in spans for t in range(start, start + length)}
    assert union_s((start, start + length) for start, length in spans) == len(covered)


def slo(ttft_ms: float, itl_ms: float, output_len: int) -> Namespace:
    return Namespace(slo_ttft_ms=ttft_ms, slo_itl_ms=itl_ms, output_len=output_len)


def test_figures_of_two_requests():
    first = timeline(
        10.0, 10.1, 10.2, 10.4, kv={"transferred": 5, "recomputed": 1, "skipped": 2}
    )
    second = timeline(10.0, 10.3, 10.5, 10.7)
    failed = Timeline(10.0, error="status 503")
    result = figures([first, second, failed], 2.0, slo(200.0, 160.0, 3))
    assert result["requests"] == 3
    assert result["succeeded"] == 2
    assert result["errors"] == {"status 503": 1}
    assert result["output_tokens_per_s"] == 3.0
    assert result["decode_tokens_per_s"] == pytest.approx(
        4 / 0.6, abs=0.01
    )  # 10.1 to 10.7
    assert result["ttft_ms"]["p50"] == pytest.approx(200.0)
    assert result["gap_1_2_ms"]["p50"] == pytest.approx(150.0)
    assert result["mean_itl_ms"]["p99"] == pytest.approx(199.5)
    assert result["slo_met"] == 1  # the second's first token is late
    assert result["goodput_requests_per_s"] == 0.5
    assert result["baton_kv"] == {"transferred": 5, "recomputed": 1, "skipped": 2}
    assert "goodput 0.50 requests/s" in table(result)


def test_figures_of_nothing_can_be_shown():
    result = figures([Timeline(0.0, error="lost")], 1.0, slo(1.0, 1.0, 1))
    assert result["ttft_ms"]["p50"] is None
    json.loads(json.dumps(result, allow_nan=False))
    assert "errors: {'lost': 1}" in table(result)


@pytest.mark.parametrize(
    ("played", "good"),
    [
        (timeline(0.0, 0.09, 0.13), True),
        (timeline(0.0, 0.11, 0.13), False),
        (timeline(0.0, 0.09, 0.15), False),
        (timeline(0.0, 0.09, error="lost"), False),
    ],
)
def test_a_slow_token_or_a_late_start_misses_the_objective(played, good):
    assert played.is_good(ttft_ms=100.0, itl_ms=50.0) == good


def test_events_without_tokens_are_no_tokens():
    seen = Timeline(0.0)
    for now, data in enumerate(
        [
            '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
            '{"choices": [{"delta": {"content": "a"}}]}',
            '{"choices": [{"text": "b"}]}',
            '{"choices": [{"text": "", "token_ids": [5]}]}',
            '{"choices": [{"text": "", "finish_reason": "length"}]}',
            '{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3},'
            ' "baton_kv": {"transferred": 4}}',
            "[DONE]",
        ]
    ):
        seen.observe(data.encode(), float(now))
    assert seen.token_at == [1.0, 2.0, 3.0]
    assert (seen.prompt_tokens, seen.output_tokens, seen.kv) == (
        4,
        3,
        {"transferred": 4},
    )
    assert seen.done


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-requests", "0"],
        ["--rate", "0"],
        ["--rate", "inf"],
        ["--shared-len", "300", "--input-len", "200"],
        ["--endpoint", "chat", "--prompt", "token-ids"],
        ["--vocab-size", "5"],
        ["--url", "ftp://127.0.0.1"],
        ["--url", "http://127.0.0.1/models"],
    ],
)
def test_options_that_cannot_be_are_refused(argv):
    with pytest.raises(SystemExit) as ended:
        serve.main(argv)
    assert ended.value.code == 2


class Endpoint:
    """Streams as many tokens as asked; when told so every third request fails, and of the others
    each fourth after its first token."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.failing = False
        self.url = ""

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "owned_by": "someone"}]})

    async def complete(self, request: Request) -> Response:
        self.bodies.append(body := await request.json())
        if self.failing and len(self.bodies) % 3 == 0:
            return JSONResponse({"error": {}}, 503)
        breaks = self.failing and len(self.bodies) % 4 == 0
        return StreamingResponse(self._events(body["max_tokens"], breaks))

    async def _events(self, num_tokens: int, breaks: bool) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        usage = {"prompt_tokens": 16, "completion_tokens": num_tokens}
        last = (
            {"error": {"code": "engine_died"}}
            if breaks
            else {"choices": [], "usage": usage}
        )
        for chunk in [{"choices": [{"text": "x"}]}] * num_tokens + [last]:
            yield f"data: {json.dumps(chunk)}\n\n"
            await asyncio.sleep(0)
        self.in_flight -= 1
        yield "data: [DONE]\n\n"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """Served by a thread with a loop of its own: the benchmark has one too."""
    played = Endpoint()
    routes = [Route("/v1/models", played.models)]
    for path in ("/v1/completions", "/v1/chat/completions"):
        routes.append(Route(path, played.complete, methods=["POST"]))
    config = uvicorn.Config(
        Starlette(routes=routes), port=0, log_level="warning", lifespan="off"
    )
    server, listener = uvicorn.Server(config), config.bind_socket()
    played.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([listener],))
    listener.listen()
    thread.start()
    yield played
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.mark.parametrize("load", [["--rate", "500"], ["--concurrency", "3"]])
def test_a_run_prints_a_table_and_one_line_of_json(endpoint, load, capsys):
    argv = ["--url", endpoint.url, "--num-requests", "20", "--input-len", "16"]
    assert serve.main([*argv, "--output-len", "5", "--shared-len", "4", *load]) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    assert any("time to first token" in line for line in lines)
    assert (result["succeeded"], result["short_outputs"]) == (20, 0)
    assert result["output_tokens"] == 100
    assert result["prompt_tokens"] == 320
    assert len(endpoint.bodies) == 21  # one for warming up
    measured = endpoint.bodies[1:]
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in measured)
    assert len({tuple(body["prompt"]) for body in measured}) == 20
    assert len({tuple(body["prompt"][:4]) for body in measured}) == 1
    if "--concurrency" in load:
        assert endpoint.most_in_flight <= 3


def test_failures_are_counted_and_make_the_status(endpoint, capsys):
    endpoint.failing = True
    argv = ["--url", endpoint.url, "--num-requests", "8", "--output-len", "2"]
    assert serve.main([*argv, "--concurrency", "1"]) == 1
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["errors"] == {"status 503": 3, "engine_died": 2}
    assert result["succeeded"] == 3


def test_chat_is_asked_in_words(endpoint):
    argv = ["--url", endpoint.url + "/v1", "--num-requests", "2", "--output-len", "2"]
    assert serve.main([*argv, "--endpoint", "chat", "--input-len", "6"]) == 0
    (message,) = endpoint.bodies[-1]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 6


def test_an_endpoint_that_is_not_there_is_named(capsys):
    assert serve.main(["--url", "http://127.0.0.1:1"]) == 2
    told = "--url does not answer: Cannot connect to host 127.0.0.1:1"
    assert told in capsys.readouterr().err
