"""Answers that the proxy gives itself, log lines of requests, and the shutdown."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from protocol.process import logging as baton_logging
from proxy.pd_request import PDRequest
from tests.proxy.fakes import Call, Fake, Rig, Waits, answers, decodes, prefills, until


async def _pieces() -> Any:
    for _ in range(20):
        yield b"x" * 100


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"{not json", 400, "not valid JSON"),
        (b"[1, 2]", 400, "must be a JSON object"),
        (b"", 400, "not valid JSON"),
        (b'{"prompt": "' + b"x" * 1000 + b'"}', 413, "the limit is 1000"),
        (b'{"prompt": "' + b"x" * 100_000 + b'"}', 413, "the limit is 1000"),
        (None, 413, "more than 1000 bytes"),  # sent without a Content-Length
    ],
)
async def test_invalid_bodies_are_refused_and_reach_no_server(content, status, words):
    async with Rig(max_body_bytes=1000) as rig:
        sent = _pieces() if content is None else content
        response = await rig.client.post("/v1/completions", content=sent)
        assert response.status_code == status
        error = response.json()["error"]
        code = "invalid_request" if status == 400 else "payload_too_large"
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert words in error["message"]
        assert rig.prefill[0].calls == rig.decode[0].calls == []
        longest = b'{"p": "' + b"x" * 991 + b'"}'
        again = await rig.client.post("/v1/completions", content=longest)
        # The connection can still be used.
        assert (len(longest), again.status_code) == (1000, 200)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/ui", 404, "GET"),
        ("POST", "/", 405, "use GET"),
        ("POST", "/" + "x" * 4000, 404, "POST"),
        ("POST", "/v1/embeddings", 404, "POST"),
        ("POST", "/v1/completions/", 404, "did you mean /v1/completions"),
        ("POST", "/completions", 404, "did you mean /v1/completions"),
        ("GET", "/v1/completions", 405, "use POST"),
        ("GET", "/tokenize", 405, "use POST"),
        ("POST", "/ready", 405, "use GET"),
        ("DELETE", "/v1/models", 405, "use GET"),
    ],
)
async def test_errors_for_unknown_paths_and_methods_name_the_fix(
    method, path, status, words
):
    async with Rig() as rig:
        response = await rig.client.request(method, path)
        assert response.status_code == status
        assert words in response.json()["error"]["message"]
        allowed = "GET, HEAD" if "GET" in words else "POST"
        assert response.headers.get("allow") == (allowed if status == 405 else None)


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v2/<b>", "/v1/completions"])
async def test_browser_gets_a_page_with_links_for_a_path_without_content(path):
    async with Rig() as rig:
        page = await rig.client.get(path, headers=BROWSER)
        assert page.status_code in (404, 405)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for link in ("/", "/v1/models", "/docs"):
            assert f'<a href="{link}">' in page.text
        assert "<b>" not in page.text, "the path was not escaped"
        plain = await rig.client.get(path)
        assert plain.json()["error"]["message"]
    async with Rig(ui=False) as rig:
        assert '<a href="/">' not in (await rig.client.get(path, headers=BROWSER)).text


async def test_the_base_url_names_the_list_of_models():
    async with Rig() as rig:
        for accepted in ({}, BROWSER):
            response = await rig.client.get("/v1", headers=accepted)
            assert response.status_code == 404
            assert "base URL" in response.text and "GET /v1/models" in response.text


async def test_browser_without_a_key_gets_a_page_too():
    async with Rig(api_key=("a client's key",)) as rig:
        page = await rig.client.get("/v1/models", headers=BROWSER)
        assert page.status_code == 401 and page.text.startswith("<!doctype html>")
        assert "www-authenticate" in page.headers


async def test_ready_counts_servers_and_reports_what_is_missing():
    prefill = [Fake(prefills), Fake(prefills, ready=False)]
    async with Rig(prefill, [Fake(decodes, ready=False)]) as rig:
        await until(lambda: all(f.polls > 0 for f in (*rig.prefill, *rig.decode)))
        refused = await rig.client.get("/ready")
        assert refused.status_code == 503
        state = refused.json()
        assert state["status"] == "not_ready"
        assert state["prefill"] == {"ready": 1, "configured": 2}
        assert state["decode"] == {"ready": 0, "configured": 1}
        assert state["missing"] == ["no decode server is ready"]
        assert state["servers"] == {
            "prefill-0": True,
            "prefill-1": False,
            "decode-0": False,
        }
        assert (await rig.client.get("/health")).status_code == 200
        completion = await rig.complete()
        assert completion.status_code == 503
        assert completion.json()["error"]["code"] == "no_server_available"
        assert completion.headers["retry-after"] == "1"
        assert rig.prefill[0].calls == []

        rig.decode[0].ready = True
        await until(lambda: rig.is_ready(2))
        accepted = await rig.client.get("/ready")
        assert (accepted.status_code, accepted.json()["missing"]) == (200, [])
    async with Rig(prefill=[]) as rig:
        response = await rig.client.get("/ready")
        assert response.status_code == 200
        assert response.json()["missing"] == ["no prefill server is ready"]


async def test_responses_contain_no_address_of_a_server(caplog):
    async with Rig(health_interval_s=60.0) as rig:
        servers = (rig.prefill[0], rig.decode[0])
        for fake in servers:
            await fake.stop()
        responses = [await rig.complete(), await rig.complete()]
        for path in ("/ready", "/metrics", "/v1/models"):
            responses.append(await rig.client.get(path))
        for response in responses:
            assert "127.0.0.1" not in response.text
        for fake in servers:
            assert f"-0 {fake.url}" in caplog.text, "the log lacks the address"


async def test_server_listed_under_the_wrong_kind_receives_no_request(caplog):
    prefill = [Fake(decodes, role="decode")]
    decode = [Fake(prefills, role="prefill")]
    async with Rig(prefill, decode, ready=False) as rig:
        await until(lambda: rig.prefill[0].polls > 3 and rig.decode[0].polls > 1)
        assert (await rig.complete()).status_code == 503
        assert rig.prefill[0].calls == rig.decode[0].calls == []
    assert (
        "not ready: it is a prefill server; name it by --prefill, not by --de"
        in caplog.text
    )
    warning = "not ready: it is a decode server; name it by --decode, not by --prefill"
    assert caplog.text.count(warning) == 1


async def test_progress_of_a_starting_server_is_logged_once(caplog):
    polls: list[Call] = []

    async def starts(call: Call) -> None:
        polls.append(call)
        await call.answer(503, {"reason": f"downloading: {len(polls)} of 9.5 GiB"})

    async with Rig([], [Fake(decodes, pages={"/ready": starts})], ready=False):
        await until(lambda: len(polls) > 3)
    assert caplog.text.count(" downloading: ") == 1


async def test_servers_that_stop_with_the_proxy_cause_no_warning(caplog):
    async with Rig() as rig:
        rig.app.shut_down(60.0)
        await rig.decode[0].stop()
        await until(lambda: not rig.is_ready(1))
    for record in caplog.records:
        assert record.levelno < logging.WARNING, record


async def test_bug_in_the_proxy_is_answered_and_logged(monkeypatch, caplog):
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("boom")

    async with Rig() as rig:
        monkeypatch.setattr(PDRequest, "run", broken)
        response = await rig.complete()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "boom" not in response.text
    assert "boom" in caplog.text


async def test_every_line_about_a_request_carries_its_id():
    ids: list[str | None] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ids.append(baton_logging.current_request_id())

    async with Rig(prefill=[Fake(answers(500, {}))]) as rig:
        logger = logging.getLogger("baton.proxy")
        handler = Handler()
        logger.addHandler(handler)
        logger.setLevel("INFO")
        try:
            await rig.complete(headers={"X-Request-Id": "mine"})
            await until(lambda: len(ids) > 1)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
    # One line is about the failed leg, one about the end of the request.
    assert ids == ["mine", "mine"]


# -- shutdown


async def test_requests_in_flight_may_finish_during_the_shutdown():
    slow = Waits(
        lambda call: call.write(b"data: [DONE]\n\n", more=False), b"data: 1\n\n"
    )
    async with Rig(decode=[Fake(slow)], shutdown_grace_s=20.0) as rig:
        request = asyncio.create_task(rig.complete(stream=True))
        await slow.begun.wait()
        rig.server.should_exit = True
        await until(lambda: rig.app.shutting_down)
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False, verify=False) as other:
                await other.get(f"{rig.url}/ready")
        slow.go.set()
        assert (await request).text == "data: 1\n\ndata: [DONE]\n\n"
        await rig.task


async def test_client_that_is_still_sending_gets_an_error_at_shutdown(caplog):
    async with Rig(shutdown_grace_s=1.0) as rig:
        reader, writer = await asyncio.open_connection(*rig.listener.getsockname())
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n{"
        )
        await writer.drain()
        await until(lambda: bool(rig.server.server_state.tasks))
        rig.server.should_exit = True
        answer = await reader.read()
        writer.close()
        assert (
            answer.startswith(b"HTTP/1.1 503") and b'"code":"shutting_down"' in answer
        )
        await rig.task
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_that_outlast_the_grace_period_end_with_an_error(stream):
    endless = Waits(sends=b"data: 1\n\n" if stream else b"")
    async with Rig(decode=[Fake(endless)], shutdown_grace_s=0.2) as rig:
        request = asyncio.create_task(rig.complete(stream=stream))
        await endless.begun.wait()
        rig.server.should_exit = True
        response = await request
        await endless.left.wait()
        await rig.task
        if stream:
            first, last = response.text.split("\n\n")[:2]
            assert first == "data: 1"
            data = last.removeprefix("event: error\ndata: ")
        else:
            assert response.status_code == 503
            data = response.text
        assert json.loads(data)["error"]["code"] == "shutting_down"


# -- requests that a decode server answers


@pytest.mark.parametrize(
    ("path", "server_path"),
    [
        ("/tokenize", None),
        ("/detokenize", None),
        ("/openapi.json", None),
        ("/docs", None),
        ("/v1/models", None),
        ("/v1/models/org/name%20x", "/v1/models/org/name x"),
    ],
)
async def test_decode_server_answers_tokenizer_and_document_paths(path, server_path):
    async def answers_with_path(call: Call) -> None:
        await call.answer(201, {"path": call.path})

    async with Rig(decode=[Fake(answers_with_path)]) as rig:
        body = b'{"prompt":  "a"}' if "tokenize" in path else None
        headers = {"x-request-id": "r", "Authorization": "Bearer k"}
        method = "POST" if body else "GET"
        response = await rig.client.request(method, path, content=body, headers=headers)
        assert response.status_code == 201
        assert response.json() == {"path": server_path or path}
        (call,) = rig.decode[0].calls
        assert (call.raw, call.headers["x-request-id"]) == (body or b"", "r")
        assert call.headers["authorization"] == "Bearer k"
        assert rig.prefill[0].calls == []
        await rig.decode[0].stop()
        response = await rig.client.request(method, path, content=body)
        assert response.status_code == 503


# -- metrics


async def test_metrics_count_only_the_requests_of_this_proxy():
    async with Rig() as rig, Rig() as other:
        await rig.complete()
        await rig.client.post("/v1/completions", content=b"{")
        texts = [(await each.client.get("/metrics")).text for each in (rig, other)]
        lines, others = (text.splitlines() for text in texts)
        for line, is_new in (
            ('baton_proxy_requests_total{path="pd",reason="routed"} 1.0', True),
            ('baton_proxy_responses_total{status="200"} 1.0', True),
            ('baton_proxy_responses_total{status="400"} 1.0', True),
            (
                'baton_proxy_upstream_ready{role="prefill",server="prefill-0"} 1.0',
                False,
            ),
            (
                'baton_proxy_upstream_in_flight{role="prefill",server="prefill-0"} 0.0',
                False,
            ),
            ("baton_proxy_requests_in_progress 0.0", False),
            ("baton_proxy_request_seconds_count 2.0", True),
            # The count is 0, because no response was a stream.
            ("baton_proxy_first_byte_seconds_count 0.0", False),
        ):
            assert line in lines and (line in others) is not is_new
