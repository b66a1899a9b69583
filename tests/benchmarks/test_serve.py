"""The load benchmark benchmarks/serve.py: its arithmetic, and runs with a scripted
endpoint.
"""

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
from benchmarks.endpoint import Timeline
from benchmarks.serve_figures import figures, table, union_s
from benchmarks.serve_requests import WORDS, arrivals_s, draw_prompt


def timeline(due_at: float, *token_at: float, **attributes: Any) -> Timeline:
    """Returns a completed request with one token at each of these times."""
    result = Timeline(due_at, token_at=list(token_at), ended_at=token_at[-1], done=True)
    result.output_tokens = len(token_at)
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


def test_arrivals_are_a_seeded_poisson_process():
    times = arrivals_s(20.0, 5000, seed=1)
    assert times == arrivals_s(20.0, 5000, seed=1) != arrivals_s(20.0, 5000, seed=2)
    assert times[0] == 0.0 and times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    # The standard deviation of an exponential distribution equals its mean.
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.1)


def test_prompts_are_seeded_and_share_their_prefix():
    ids = range(32, 100)
    one = draw_prompt(ids, 20, 0, 1, shared=5)
    two = draw_prompt(ids, 20, 0, 2, shared=5)
    assert one == draw_prompt(ids, 20, 0, 1, shared=5)
    assert one[:5] == two[:5]
    assert one[5:] != two[5:]
    assert len(one) == 20
    assert all(32 <= token < 100 for token in one)
    assert len(draw_prompt(WORDS, 7, 0, 1)) == 7


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_union_of_spans_counts_no_moment_twice(spans):
    moments = set[int]()
    for start, length in spans:
        moments.update(range(start, start + length))
    assert union_s((start, start + length) for start, length in spans) == len(moments)


def options(ttft_ms: float, itl_ms: float, output_len: int) -> Namespace:
    return Namespace(slo_ttft_ms=ttft_ms, slo_itl_ms=itl_ms, output_len=output_len)


def test_figures_of_two_requests():
    kv = {"transferred": 5, "recomputed": 1, "skipped": 2}
    first = timeline(10.0, 10.1, 10.2, 10.4, kv=kv)
    second = timeline(10.0, 10.3, 10.5, 10.7)
    failed = Timeline(10.0, error="status 503")
    result = figures([first, second, failed], 2.0, options(200.0, 160.0, 3))
    assert result["requests"] == 3
    assert result["succeeded"] == 2
    assert result["errors"] == {"status 503": 1}
    assert result["output_tokens_per_s"] == 3.0
    assert result["decode_tokens_per_s"] == pytest.approx(
        4 / 0.6, abs=0.01
    )  # from 10.1 s to 10.7 s
    assert result["ttft_ms"]["p50"] == pytest.approx(200.0)
    assert result["gap_1_2_ms"]["p50"] == pytest.approx(150.0)
    assert result["mean_itl_ms"]["p99"] == pytest.approx(199.5)
    assert result["slo_met"] == 1  # the second request exceeds the TTFT limit
    assert result["goodput_requests_per_s"] == 0.5
    assert result["baton_kv"] == kv
    assert "goodput 0.50 requests/s" in table(result)


def test_run_without_success_has_figures_and_a_table():
    result = figures([Timeline(0.0, error="lost")], 1.0, options(1.0, 1.0, 1))
    assert result["ttft_ms"]["p50"] is None
    json.loads(json.dumps(result, allow_nan=False))
    assert "errors: {'lost': 1}" in table(result)


@pytest.mark.parametrize(
    ("request_timeline", "meets"),
    [
        (timeline(0.0, 0.09, 0.13), True),
        (timeline(0.0, 0.11, 0.13), False),
        (timeline(0.0, 0.09, 0.15), False),
        (timeline(0.0, 0.09, error="lost"), False),
    ],
)
def test_late_first_token_or_slow_tokens_miss_the_slo(request_timeline, meets):
    assert request_timeline.meets_slo(ttft_ms=100.0, itl_ms=50.0) == meets


def test_only_events_with_tokens_get_a_time():
    observed = Timeline(0.0)
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
        observed.observe(data.encode(), float(now))
    assert observed.token_at == [1.0, 2.0, 3.0]
    assert observed.prompt_tokens == 4
    assert observed.output_tokens == 3
    assert observed.kv == {"transferred": 4}
    assert observed.done


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-requests", "0"],
        ["--rate", "0"],
        ["--rate", "inf"],
        ["--shared-len", "300", "--input-len", "200"],
        ["--endpoint", "chat", "--prompt", "token-ids"],
        ["--vocab-size", "5"],
        ["--save", "/no/such/folder/figures.json"],
        ["--url", "ftp://127.0.0.1"],
        ["--url", "http://127.0.0.1/models"],
    ],
)
def test_invalid_options_are_refused(argv):
    with pytest.raises(SystemExit) as exit_info:
        serve.main(argv)
    assert exit_info.value.code == 2


@pytest.fixture(autouse=True)
def _in_own_folder(monkeypatch, tmp_path):
    """Changes to a new working directory, because runs save their results there."""
    monkeypatch.chdir(tmp_path)


class Endpoint:
    """An endpoint that streams `max_tokens` tokens to each request.

    While `failing` is set, every third request gets status 503. Of the other requests,
    those with a number that is a multiple of 4 end with an error event.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.failing = False
        self.url = ""

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "owned_by": "someone"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.failing and len(self.bodies) % 3 == 0:
            return JSONResponse({"error": {}}, 503)
        fails = self.failing and len(self.bodies) % 4 == 0
        return StreamingResponse(self._events(body["max_tokens"], fails))

    async def _events(self, num_tokens: int, fails: bool) -> AsyncIterator[str]:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        last_chunk: dict[str, Any] = {"error": {"code": "engine_died"}}
        if not fails:
            usage = {"prompt_tokens": 16, "completion_tokens": num_tokens}
            last_chunk = {"choices": [], "usage": usage}
        token_chunk = {"choices": [{"text": "x"}]}
        for chunk in [*([token_chunk] * num_tokens), last_chunk]:
            yield f"data: {json.dumps(chunk)}\n\n"
            await asyncio.sleep(0)
        self.in_flight -= 1
        yield "data: [DONE]\n\n"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A running endpoint, in a separate thread, because the benchmark has an event loop
    too.
    """
    scripted = Endpoint()
    routes = [Route("/v1/models", scripted.models)]
    for path in ("/v1/completions", "/v1/chat/completions"):
        routes.append(Route(path, scripted.complete, methods=["POST"]))
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    scripted.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([listener],))
    listener.listen()
    thread.start()
    yield scripted
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.mark.parametrize("load", [["--rate", "500"], ["--concurrency", "3"]])
def test_run_prints_a_table_and_one_line_of_json(endpoint, load, capsys, tmp_path):
    argv = ["--url", endpoint.url, "--num-requests", "20", "--input-len", "16"]
    assert serve.main([*argv, "--output-len", "5", "--shared-len", "4", *load]) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    (saved_file,) = tmp_path.glob("serve-*.json")
    assert json.loads(saved_file.read_text()) == result
    assert any("time to first token" in line for line in lines)
    assert (result["succeeded"], result["short_outputs"]) == (20, 0)
    assert result["output_tokens"] == 100
    assert result["prompt_tokens"] == 320
    assert len(endpoint.bodies) == 21  # one more than measured, for the warm-up
    measured = endpoint.bodies[1:]
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in measured)
    assert len({tuple(body["prompt"]) for body in measured}) == 20
    assert len({tuple(body["prompt"][:4]) for body in measured}) == 1
    if "--concurrency" in load:
        assert endpoint.max_in_flight <= 3


def test_progress_is_reported_and_the_result_saved(
    endpoint, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(serve, "_PROGRESS_INTERVAL_S", 0.01)
    argv = ["--url", endpoint.url, "--num-requests", "50", "--output-len", "20"]
    path = tmp_path / "figures.json"
    assert serve.main([*argv, "--concurrency", "1", "--save", str(path)]) == 0
    captured = capsys.readouterr()
    assert " of 50 requests have ended, 0 of them failed" in captured.err
    assert json.loads(path.read_text()) == json.loads(captured.out.splitlines()[-1])


def test_failures_are_counted_and_set_the_exit_status(endpoint, capsys):
    endpoint.failing = True
    argv = ["--url", endpoint.url, "--num-requests", "8", "--output-len", "2"]
    assert serve.main([*argv, "--concurrency", "1"]) == 1
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["errors"] == {"status 503": 3, "engine_died": 2}
    assert result["succeeded"] == 3


def test_chat_prompts_are_words(endpoint):
    argv = ["--url", endpoint.url + "/v1", "--num-requests", "2", "--output-len", "2"]
    assert serve.main([*argv, "--endpoint", "chat", "--input-len", "6"]) == 0
    (message,) = endpoint.bodies[-1]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 6


def test_unreachable_endpoint_is_an_error(capsys):
    assert serve.main(["--url", "http://127.0.0.1:1"]) == 2
    message = "--url does not answer: Cannot connect to host 127.0.0.1:1"
    assert message in capsys.readouterr().err
