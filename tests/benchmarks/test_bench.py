"""`baton bench` with a scripted endpoint: the load and the report."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from benchmarks.bench import cli


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--html", "report.html"], "unknown option --html"),
        (["--ratee=3"], "unknown option --ratee (did you mean --rate"),
        (["compare", "--a", "http://a", "--side", "b"], "unknown option --side"),
        (["--max-requests", "0"], "is not above 0"),
        (["--rate", "0"], "not a finite number above 0"),
        (["--rate", "inf"], "not a finite number above 0"),
        (["--shared-len", "300", "--input-len", "200"], "--shared-len 300"),
        (["--endpoint", "chat", "--prompt", "token-ids"], "use words"),
        (["--vocab-size", "5"], "must be above 32"),
        (["--save", "/no/such/folder/figures"], "cannot be written"),
        (["--url", "ftp://127.0.0.1"], "write http://host:port"),
        (["--url", "http://127.0.0.1/models"], "write http://host:port"),
        (["--slo", "tft=1"], "unknown key 'tft' (did you mean ttft?)"),
        (["--slo", "ttft=fast"], "ttft=fast must be a number of seconds"),
        (["--slo", "ttft=1,ttft=2"], "ttft is given twice"),
        (["--load", "2"], "--load and --length-scale need --trace"),
        (["--trace", "/no/such/trace"], "cannot be read"),
        (["--trace", "t", "--output-len", "5"], "--output-len has no effect with"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
        (
            ["--url", "http://a", "--url", "http://b", "--metrics", "http://c"],
            "use one --url",
        ),
    ],
)
def test_invalid_options_end_in_one_line(argv, message, capsys):
    try:
        status = cli.main(argv)
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in last_line
    assert last_line.startswith("baton bench")


@pytest.fixture(autouse=True)
def _in_new_folder(monkeypatch, tmp_path):
    """Changes to a new working directory, because runs save their results there."""
    monkeypatch.chdir(tmp_path)


class Endpoint:
    """An endpoint that streams `max_tokens` tokens to each request.

    While `failing` is set, every third request gets status 503. Of the other requests,
    those with a number that is a multiple of 4 end with an error event.

    Attributes:
        delay_s: time before the first token.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.failing = False
        self.delay_s = 0.0
        self.owner = "someone"
        self.url = ""

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "owned_by": self.owner}]})

    async def metrics(self, request: Request) -> Response:
        count = len(self.bodies)
        return PlainTextResponse(
            "# TYPE baton_kv_transfer_bytes_total counter\n"
            f'baton_kv_transfer_bytes_total{{way="a"}} {500_000 * count}\n'
            f'baton_kv_transfer_bytes_total{{way="b"}} {500_000 * count}\n'
            "# TYPE vllm:prefix_cache_hits_total counter\n"
            f"vllm:prefix_cache_hits_total {count}\n"
            "# TYPE vllm:prefix_cache_queries_total counter\n"
            f"vllm:prefix_cache_queries_total {4 * count}\n"
        )

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
        await asyncio.sleep(self.delay_s)
        last_chunk: dict[str, Any] = {"error": {"code": "engine_died"}}
        if not fails:
            usage = {"prompt_tokens": 16, "completion_tokens": num_tokens}
            last_chunk = {"choices": [], "usage": usage}
        token_chunk = {"choices": [{"text": "x", "token_ids": [77]}]}
        for chunk in [*([token_chunk] * num_tokens), last_chunk]:
            yield f"data: {json.dumps(chunk)}\n\n"
            await asyncio.sleep(0)
        self.in_flight -= 1
        yield "data: [DONE]\n\n"


@contextmanager
def running() -> Iterator[Endpoint]:
    """Runs an endpoint in a separate thread, because the benchmark has an event loop
    too.
    """
    scripted = Endpoint()
    routes = [Route("/v1/models", scripted.models), Route("/metrics", scripted.metrics)]
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
    try:
        yield scripted
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with running() as scripted:
        yield scripted


def last_document(capsys: Any) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out.strip().splitlines()[-1]))


@pytest.mark.parametrize("load", [["--rate", "500"], ["--concurrency", "3"]])
def test_run_prints_a_table_and_one_line_of_json(endpoint, load, capsys, tmp_path):
    argv = ["--url", endpoint.url, "--max-requests", "20", "--input-len", "16"]
    assert cli.main([*argv, "--output-len", "5", "--shared-len", "4", *load]) == 0
    captured = capsys.readouterr()
    *lines, last = captured.out.strip().splitlines()
    document = json.loads(last)
    (saved_file,) = tmp_path.glob("bench-*.json")
    saved = json.loads(saved_file.read_text())
    assert len(saved.pop("request_rows")[document["sides"][0]["name"]]) == 20
    assert saved == document
    assert any("time to first token" in line for line in lines)
    assert any("load generator: requests sent" in line for line in lines)
    assert "request/s" not in captured.err  # no progress bar without a terminal
    (side,) = document["sides"]
    assert (side["succeeded"], side["wrong_lengths"]) == (20, 0)
    assert (side["output_tokens"], side["prompt_tokens"]) == (100, 320)
    assert side["kv_bytes_moved"] == 20e6
    assert side["cache_hit_rate"] == 0.25
    assert len(endpoint.bodies) == 21  # one more than measured, for the warm-up
    measured = endpoint.bodies[1:]
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in measured)
    assert len({tuple(body["prompt"]) for body in measured}) == 20
    assert len({tuple(body["prompt"][:4]) for body in measured}) == 1
    if "--concurrency" in load:
        assert endpoint.max_in_flight <= 3


def test_report_is_one_file_with_figures_and_plots(endpoint, tmp_path):
    argv = ["--url", endpoint.url, "--max-requests", "6", "--output-len", "3"]
    assert cli.main([*argv, "--save", str(tmp_path / "mine")]) == 0
    html = (tmp_path / "mine.html").read_text()
    assert "{{" not in html.partition("<script>")[0]
    for forbidden in ("src=", "href=", "@import", "https://"):
        assert forbidden not in html.replace("https://github.com/leeoniya/uPlot", "")
    assert "uPlot" in html
    text = html.partition('id="data">')[2].partition("</script>")[0]
    data = json.loads(text)
    titles = [plot["title"] for plot in data["plots"]]
    assert "Requests in flight" in titles and "Time between tokens" in titles
    for plot in data["plots"]:
        (series,) = plot["series"]
        assert len(series["x"]) == len(series["y"]) > 0
        assert series["x"] == sorted(series["x"])
    rows = {row[0]: row[1:] for row in data["table"]}
    assert rows["succeeded"] == ["6 of 6"]
    assert rows["KV moved (MB)"] == ["6.0"]


def test_requests_are_due_whether_or_not_earlier_ones_have_ended(endpoint, capsys):
    """With 50 requests per second and 0.3 s per request, about 15 are in flight."""
    endpoint.delay_s = 0.3
    argv = ["--url", endpoint.url, "--max-requests", "20", "--output-len", "1"]
    assert cli.main([*argv, "--rate", "50", "--warmup", "0"]) == 0
    assert endpoint.max_in_flight > 5


def test_wait_for_concurrency_counts_as_latency_in_an_open_loop(endpoint, capsys):
    endpoint.delay_s = 0.1
    argv = ["--url", endpoint.url, "--max-requests", "8", "--output-len", "1"]
    assert cli.main([*argv, "--rate", "1000", "--concurrency", "1"]) == 0
    (side,) = last_document(capsys)["sides"]
    assert side["ttft_ms"]["p99"] > 600  # the last request waits for seven others
    assert endpoint.max_in_flight == 1


def test_requests_that_do_not_end_count_as_failed(endpoint, capsys):
    endpoint.delay_s = 5.0
    argv = ["--url", endpoint.url, "--max-requests", "3", "--rate", "100"]
    limits = ["--warmup", "0", "--drain-s", "0.2", "--concurrency", "2"]
    assert cli.main([*argv, *limits]) == 1
    (side,) = last_document(capsys)["sides"]
    assert side["errors"] == {
        "did not finish within --drain-s": 2,
        "not sent within --drain-s": 1,
    }


def test_failures_are_counted_and_set_the_exit_status(endpoint, capsys):
    endpoint.failing = True
    argv = ["--url", endpoint.url, "--max-requests", "8", "--output-len", "2"]
    assert cli.main([*argv, "--concurrency", "1"]) == 1
    (side,) = last_document(capsys)["sides"]
    assert side["errors"] == {"status 503": 3, "engine_died": 2}
    assert side["succeeded"] == 3


def test_chat_prompts_are_words(endpoint):
    argv = ["--url", endpoint.url + "/v1", "--max-requests", "2", "--output-len", "2"]
    assert cli.main([*argv, "--endpoint", "chat", "--input-len", "6"]) == 0
    (message,) = endpoint.bodies[-1]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 6


def write_trace(path: Any, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_turns_wait_for_the_answer_and_contain_it(endpoint, tmp_path, capsys):
    endpoint.owner = "baton"
    turn = {"session_id": "s", "input_length": 5, "output_length": 3}
    rows = [{**turn, "timestamp": 0}, {**turn, "delay": 20}, {**turn, "delay": 20}]
    trace = write_trace(tmp_path / "trace.jsonl", *rows)
    argv = ["--url", endpoint.url, "--trace", trace, "--warmup", "0"]
    assert cli.main([*argv, "--save", str(tmp_path / "out")]) == 0
    prompts = [body["prompt"] for body in endpoint.bodies]
    assert [len(prompt) for prompt in prompts] == [5, 13, 21]
    assert prompts[1][:5] == prompts[0] and prompts[1][5:8] == [77, 77, 77]
    assert prompts[2][:13] == prompts[1]
    saved = json.loads((tmp_path / "out.json").read_text())
    (rows_of_side,) = saved["request_rows"].values()
    for earlier, later in itertools.pairwise(rows_of_side):
        assert later["due_s"] == pytest.approx(earlier["end_s"] + 0.02, abs=1e-5)


def test_later_turns_of_a_chat_contain_the_answers(endpoint, tmp_path):
    turn = {"session_id": 1, "input_length": 4, "output_length": 2}
    rows = [{**turn, "timestamp": 0}, {**turn, "delay": 0}]
    trace = write_trace(tmp_path / "trace.jsonl", *rows)
    argv = ["--url", endpoint.url, "--trace", trace, "--warmup", "0"]
    assert cli.main([*argv, "--endpoint", "chat"]) == 0
    messages = endpoint.bodies[1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0] == endpoint.bodies[0]["messages"][0]
    assert messages[1]["content"] == "xx"
    assert messages[2]["content"] != messages[0]["content"]


def test_failed_turn_ends_its_conversation(endpoint, tmp_path, capsys):
    endpoint.failing = True
    turn = {"session_id": 1, "input_length": 4, "output_length": 2}
    rows = [{**turn, "timestamp": 0}] + [{**turn, "delay": 0}] * 5
    trace = write_trace(tmp_path / "trace.jsonl", *rows)
    argv = ["--url", endpoint.url, "--trace", trace, "--warmup", "0"]
    assert cli.main(argv) == 1
    (side,) = last_document(capsys)["sides"]
    assert (side["succeeded"], side["requests"], side["skipped"]) == (2, 3, 3)


def test_several_urls_get_the_same_load(endpoint, capsys):
    with running() as other:
        argv = ["--url", endpoint.url, "--url", other.url, "--max-requests", "10"]
        assert cli.main([*argv, "--rate", "200", "--output-len", "2"]) == 0
        document = last_document(capsys)
        assert [side["succeeded"] for side in document["sides"]] == [10, 10]

        def key(body: dict[str, Any]) -> Any:
            return body["prompt"]

        assert sorted(endpoint.bodies, key=key) == sorted(other.bodies, key=key)


def test_unknown_model_names_those_that_are_served(endpoint, capsys):
    argv = ["--url", endpoint.url, "--model", "other"]
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == (
        f"baton bench: error: --model other: {endpoint.url} does not serve it; "
        "it serves m"
    )


def test_comparison_ends_in_one_sentence(endpoint, capsys, tmp_path):
    endpoint.failing = True
    with ExitStack() as stack:
        replicas = [stack.enter_context(running()) for _ in range(2)]
        argv = ["compare", "--a", endpoint.url, "--b"]
        argv += [replica.url for replica in replicas]
        argv += ["--max-requests", "20", "--output-len", "2", "--rate", "100"]
        argv += ["--warmup", "0", "--slo", "ttft=60", "--save", str(tmp_path / "out")]
        assert cli.main(argv) == 1  # requests of A failed
        *_, sentence, last = capsys.readouterr().out.strip().splitlines()
        assert sentence.startswith(
            "B won: A served 50.0% of its requests within ttft=60, B 100.0%; "
            "the difference is -50.0 points (95 % interval -"
        )
        assert sentence.endswith("20 paired requests).")
        verdict = json.loads(last)["verdict"]
        assert (verdict["winner"], verdict["num_pairs"]) == ("B", 20)
        assert sentence in (tmp_path / "out.html").read_text()
        # The two replicas of side B get requests alternately.
        assert [len(replica.bodies) for replica in replicas] == [10, 10]
        endpoint.failing = False
        assert cli.main(argv) == 0
        *_, sentence, _ = capsys.readouterr().out.strip().splitlines()
        assert sentence.startswith("No difference seen: A served 100.0%")
