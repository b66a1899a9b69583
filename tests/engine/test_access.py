"""API keys work alike at the proxy and at a server: access, paths and rate limits."""

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from engine.text.tokenizer import Tokenizer
from protocol.errors import RateLimited
from protocol.http.access import check
from protocol.metrics import Metrics
from protocol.settings.server_options import ListenOptions
from protocol.settings.settings import ProxySettings
from proxy.keys import FileAccess, KeyLine, LimitedKey
from tests.proxy.fakes import Fake, Rig, Waits, answers, decodes, until
from tests.rigs.http_server import Running, serving
from tests.rigs.metric import without_model
from tests.rigs.scripted_engine import ScriptedEngine

ALICE, BOB, ROOT, OTHER = (
    f"sk-{name}-0123456789" for name in ("alice", "bob", "root", "other")
)
KEYS = [
    {"name": "alice", "key": ALICE},
    {"name": "bob", "sha256": hashlib.sha256(BOB.encode()).hexdigest().upper()},
    {"name": "root", "key": ROOT, "admin": True},
]
KEY_OPTIONS = {
    "api_key": (SecretStr(ALICE), SecretStr(BOB)),
    "admin_key": (SecretStr(ROOT),),
}
COMPLETE = "POST /v1/completions"
SIDES = pytest.mark.parametrize("side", ["proxy", "server"])


def write_keys(path: Path, keys: list[dict[str, Any]]) -> str:
    """Writes a key file and returns its path."""
    path.write_text("# keys\n\n" + "\n".join(map(json.dumps, keys)) + "\n")
    return str(path)


@asynccontextmanager
async def open_client(
    side: str, tokenizer: Tokenizer, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a proxy or of a server that runs with `options`."""
    if side == "proxy":
        async with Rig(decode=[Fake(answers(200, {"ok": 1}))], **options) as rig:
            yield rig.client
    else:
        origins = options.pop("cors_origin", ())
        async with serving(tokenizer, origins=origins, **options) as server:
            yield server.http


async def send(client: httpx.AsyncClient, line: str, **headers: str) -> httpx.Response:
    method, path = line.split()
    body = {"model": "m", "prompt": "ab"} if method == "POST" else None
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.request(method, path, json=body, headers=named)


@pytest.mark.parametrize("key_source", ["proxy", "server", "file"])
async def test_access_by_key_and_path(key_source, tokenizer, tmp_path):
    options: dict[str, Any] = {"api_keys_file": write_keys(tmp_path / "keys", KEYS)}
    alice, bob, side = (
        ("alice", "bob", "proxy")
        if key_source == "file"
        else ("api-key-1", "api-key-2", key_source)
    )
    bearers = {f"Bearer {ALICE}": 200, f"bearer   {BOB}": 200, f"Bearer {ROOT}": 200}
    refused = (
        f"Bearer {OTHER}",
        f"Basic {ALICE}",
        ALICE,
        f"Bearer {ALICE[:-1]}",
        f"Bearer {ALICE}0",
    )
    bearers |= dict.fromkeys(refused, 401)
    closed = (
        "GET /v1/models",
        "GET /docs",
        "GET /openapi.json",
        "GET /no/such/path",
        "GET /metrics",
    )
    cases: list[tuple[str, dict[str, str], int]] = [
        *(
            (COMPLETE, {"authorization": authorization}, status)
            for authorization, status in bearers.items()
        ),
        (COMPLETE, {}, 401),
        (COMPLETE, {"x_api_key": ALICE}, 200),
        (COMPLETE, {"authorization": "Bearer", "x_api_key": ALICE}, 200),
        (COMPLETE, {"authorization": "Bearer wrong", "x_api_key": ALICE}, 401),
        *(
            (COMPLETE, {"x_api_key": key}, 401)
            for key in (KEYS[1]["sha256"], "x" * 10_000)
        ),
        *(
            (request_line, {}, 401)
            for request_line in (*closed, "DELETE /v1/completions")
        ),
        ("GET /v1/models", {"x_api_key": BOB}, 200),
        ("GET /metrics", {"x_api_key": ALICE}, 403),
        *((f"GET /{page}", {"x_api_key": BOB}, 403) for page in ("stats", "ui/state")),
        ("POST /admin/members", {"x_api_key": BOB}, 403),
        ("GET /metrics", {"x_api_key": ROOT}, 200),
        *(("GET /health", headers, 200) for headers in ({}, {"x_api_key": "wrong"})),
        ("HEAD /ready", {}, 200),
    ]
    async with open_client(
        side, tokenizer, **options if key_source == "file" else KEY_OPTIONS
    ) as client:
        for request_line, headers, status in cases:
            answer = await send(client, request_line, x_request_id="mine", **headers)
            assert answer.status_code == status, (request_line, headers, answer.text)
            assert answer.headers["x-request-id"] == "mine"
            challenge = answer.headers.get("www-authenticate")
            assert challenge == ('Bearer realm="baton"' if status == 401 else None)
            if status >= 400:
                error = answer.json()["error"]
                code = {401: "invalid_api_key", 403: "insufficient_permissions"}[status]
                assert (error["code"], error["phase"]) == (code, "access")
                assert "Bearer KEY" in error["message"] or status == 403
        for headers in ({}, {"x_api_key": "wrong"}, {"x_api_key": ALICE}):
            bare = (await send(client, "GET /ready", **headers)).json()
            assert bare.pop("status", "ready") == "ready" and bare.pop("ready", True)
            assert bare == {"details": "are for admin keys"}
        assert len((await send(client, "GET /ready", x_api_key=ROOT)).json()) > 3
        response = await send(client, "GET /metrics", x_api_key=ROOT)
        metrics = without_model(response.text)
        counted = {
            line.partition("{")[2]
            for line in metrics.splitlines()
            if "key_requests_total{" in line
        }
        assert f'key="{alice}",outcome="accepted"}} 3.0' in counted
        assert f'key="{bob}",outcome="accepted"}} 2.0' in counted
        assert f'key="{bob}",outcome="forbidden"}} 3.0' in counted
        unknown = sum(status == 401 for *_, status in cases)
        assert f'key="-",outcome="unknown"}} {unknown}.0' in counted
        assert not any(key in metrics for key in (ALICE, BOB, ROOT, OTHER))


@SIDES
async def test_only_pages_of_a_named_origin_may_send_a_key(side, tokenizer):
    page = {"origin": "http://page:1"}
    options: dict[str, Any] = {
        "api_key": (SecretStr(ALICE),),
        "cors_origin": ("http://page:1",),
    }
    async with open_client(side, tokenizer, **options) as client:
        request = {"access-control-request-method": "POST"}
        request["access-control-request-headers"] = "authorization,content-type"
        allowed = await client.options("/v1/completions", headers={**page, **request})
        assert allowed.status_code == 200
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = await send(client, COMPLETE, **page)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://page:1"
        assert "retry-after" in refused.headers["access-control-expose-headers"]
        served = await send(client, COMPLETE, **page, x_api_key=ALICE)
        assert served.status_code == 200
        assert served.headers["access-control-allow-origin"] == "http://page:1"
        other = await send(client, COMPLETE, origin="http://page:2", x_api_key=ALICE)
        assert "access-control-allow-origin" not in other.headers
    # Without cors_origin, no page may read answers.
    async with open_client(side, tokenizer) as client:
        other = await send(client, COMPLETE, **page)
        assert "access-control-allow-origin" not in other.headers


@SIDES
async def test_request_without_access_is_refused_before_its_body(side, tokenizer):
    async with open_client(side, tokenizer, api_key=(SecretStr(ALICE),)) as client:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n"
        writer.write(head + b"Expect: 100-continue\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()


def limited_rig(tmp_path: Path, decode: list[Fake] | None = None, **limits: int) -> Rig:
    """Returns a proxy with a key file that gives ALICE these limits."""
    file = write_keys(tmp_path / "keys", [{"name": "one", "key": ALICE, **limits}])
    return Rig(decode=decode, api_keys_file=file)


async def test_limits_are_reported_and_enforced(tmp_path):
    async with limited_rig(tmp_path, requests_per_minute=2) as rig:
        remaining = []
        for status in (200, 200, 429):
            answer = await send(rig.client, COMPLETE, x_api_key=ALICE)
            assert answer.status_code == status
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
            remaining.append(answer.headers["x-ratelimit-remaining-requests"])
        assert remaining == ["1", "0", "0"]
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (
            "rate_limit_exceeded",
            "rate_limit_error",
        )
        assert (
            error["retryable"]
            and "one is limited to 2 requests a minute" in error["message"]
        )


async def test_requested_tokens_are_counted(tmp_path):
    async with limited_rig(tmp_path, tokens_per_minute=1000) as rig:
        remaining = []
        one = "x" * 40
        two = ["x" * 20] * 2
        headers = {"x-api-key": ALICE}
        requests = (
            (one, 300, 200),
            (two, 300, 200),
            ([[1], [2]], 300, 429),
            (one, 50, 200),
        )
        for prompt, max_tokens, status in requests:
            answer = await rig.complete(headers, prompt=prompt, max_tokens=max_tokens)
            assert answer.status_code == status
            remaining.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
            assert ("one is limited to 1000 tokens a minute" in answer.text) == (
                status == 429
            )
        assert 670 < remaining[0] < 700 and remaining[3] < remaining[2] < 120
        assert len(rig.decode[0].calls) == 3


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 60)), max_size=60))
def test_key_never_exceeds_its_token_rate(charges):
    now = [5.0]
    key = LimitedKey(KeyLine(name="one", tokens_per_minute=100), lambda: now[0])
    taken = 0
    for tokens, pause_s in charges:
        now[0] += pause_s
        try:
            key.charge(tokens)
        except RateLimited as error:
            now[0] += float(error.headers["retry-after"])
            key.charge(tokens)
        taken += tokens
        assert taken <= 100 * (1 + (now[0] - 5.0) / 60) + max(tokens, 100)


async def test_concurrent_requests_are_counted_until_they_end(tmp_path):
    waits = Waits(then=decodes)
    async with limited_rig(tmp_path, [Fake(waits)], max_concurrent=1) as rig:
        first = asyncio.create_task(send(rig.client, COMPLETE, x_api_key=ALICE))
        await waits.begun.wait()
        second = await send(rig.client, COMPLETE, x_api_key=ALICE)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        waits.go.set()
        assert (await first).status_code == 200
        assert (await send(rig.client, COMPLETE, x_api_key=ALICE)).status_code == 200


async def test_key_cannot_request_a_forbidden_priority(tmp_path):
    async with limited_rig(tmp_path, min_priority=-2) as rig:
        cases = (
            (-2, 200),
            (0, 200),
            (None, 200),
            ("-3", 403),
            (-3.0, 403),
            (-(10**11), 403),
        )
        for priority, status in (*cases, (-3, 403)):
            answer = await rig.complete({"x-api-key": ALICE}, priority=priority)
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "priority"


async def test_default_priority_is_the_highest_that_the_key_allows(tmp_path):
    async with limited_rig(tmp_path, min_priority=3) as rig:
        for priority_fields, status in (
            ({}, 200),
            ({"priority": None}, 200),
            ({"priority": 0}, 403),
        ):
            assert (
                await rig.complete({"x-api-key": ALICE}, **priority_fields)
            ).status_code == status
        assert [call.body["priority"] for call in rig.decode[0].calls] == [3, 3]


async def test_disconnect_ends_the_count_of_a_concurrent_request(tmp_path):
    waits = Waits()
    async with limited_rig(tmp_path, [Fake(waits)], max_concurrent=1) as rig:
        request = asyncio.create_task(send(rig.client, COMPLETE, x_api_key=ALICE))
        await waits.begun.wait()
        request.cancel()
        await waits.left.wait()
        while (
            answer := await send(rig.client, "GET /no/path", x_api_key=ALICE)
        ).status_code == 429:
            await asyncio.sleep(0.002)
        assert answer.status_code == 404


async def test_log_has_the_name_of_the_key_but_no_key_and_no_prompt(caplog, tokenizer):
    with caplog.at_level(logging.DEBUG, logger="baton"):
        for side in ("proxy", "server"):
            async with open_client(side, tokenizer, **KEY_OPTIONS) as client:
                for key in (ALICE, "unknown-" + ALICE):
                    await send(client, COMPLETE, x_api_key=key)
                wrong = {"prompt": {"text": "a private matter"}}
                await client.post(
                    "/v1/completions", json=wrong, headers={"x-api-key": ALICE}
                )
    lines = [line for line in caplog.messages if " key=api-key-1 " in line]
    assert len(lines) == 4 and "error=invalid_request: prompt" in lines[-1]
    assert not any(key in caplog.text for key in (ALICE, BOB, ROOT, "private"))


def make_access(keys: list[dict[str, Any]], path: Path, now: list[float]) -> FileAccess:
    settings = ProxySettings(api_keys_file=write_keys(path, keys))
    return FileAccess(settings, Metrics("proxy"), clock=lambda: now[0])


def admit(keys: FileAccess) -> float:
    """Returns 0 if a request with ALICE is admitted, else the seconds to wait."""
    headers = [(b"x-api-key", ALICE.encode())]
    try:
        with keys.admit(
            {"method": "POST", "path": "/v1/completions", "headers": headers}
        ):
            return 0.0
    except RateLimited as error:
        return float(error.headers["retry-after"])


@given(limit=st.integers(1, 100), pauses_s=st.lists(st.floats(0, 90), max_size=60))
def test_key_gets_its_limit_per_minute_and_retry_after(
    limit, pauses_s, tmp_path_factory
):
    now = [1000.0]
    path = tmp_path_factory.mktemp("keys") / "keys"
    keys = make_access(
        [{"name": "alice", "key": ALICE, "requests_per_minute": limit}], path, now
    )
    taken = []
    for number, pause_s in enumerate(pauses_s):
        now[0] += pause_s
        wait_s = admit(keys)
        assert number >= limit or wait_s == 0
        if wait_s:
            assert now[0] - taken[-limit] < 60
            now[0] += wait_s
            assert admit(keys) == 0
        taken.append(now[0])
    for begin in taken:
        assert sum(begin <= time_s <= begin + 60 for time_s in taken) <= 2 * limit + 1


async def test_changed_key_file_is_reloaded_and_a_broken_one_ignored(caplog, tmp_path):
    now = [0.0]
    path = tmp_path / "keys"
    one = {"name": "alice", "key": ALICE, "requests_per_minute": 3}
    keys = make_access([one], path, now)
    watching = asyncio.create_task(keys.watch_file(0.001))
    waits = [admit(keys) for _ in range(4)]
    assert [bool(wait) for wait in waits] == [False, False, False, True]
    with caplog.at_level(logging.INFO, logger="baton"):
        path.write_text("{")
        await until(lambda: "stay as they were" in caplog.text)
        assert "line 1" in caplog.text
        path.unlink()
        await until(lambda: caplog.text.count("stay as they were") >= 2)
        assert admit(keys)  # the counted usage is kept, so the limit still holds
        write_keys(path, [{**one, "name": "new", "requests_per_minute": 6}])
        await until(lambda: "reloaded" in caplog.text)
    now[0] += 10
    assert admit(keys) == 0 and admit(keys)
    watching.cancel()


KEY_LINE_START = '{"name": "a", "key": "12345678"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 keys; it must have at least one, .*: write one JSON"),
        ("# none\n", "has 0 keys"),
        ("alice", "line 1: JSON is malformed"),
        ("[1]", "line 1: Expected `object`"),
        ('{"key": "12345678"}', "line 1: .*missing required field `name`"),
        ('{"name": "a"}', 'line 1: give a a "key", or the "sha256" of a key'),
        (
            '{"name": "a", "key": "12345678", "sha256": "%s"}' % ("0" * 64),
            "line 1: give a a",
        ),
        (
            '{"name": "a", "key": "short"}',
            "line 1: Expected `str` of length >= 8 - at .*key`",
        ),
        (
            '{"name": "a b", "key": "12345678"}',
            r"line 1: Expected `str` matching .*name`",
        ),
        (
            KEY_LINE_START + ', "rpm": 1}',
            "unknown field `rpm`; .*requests_per_minute, tokens",
        ),
        (
            KEY_LINE_START + ', "max_concurrent": 0}',
            "line 1: Expected `int` >= 1 - at .*max_concurrent",
        ),
        (
            KEY_LINE_START + '}\n\n{"name": "a", "key": "12345679"}',
            "line 3: the name of a is",
        ),
        (
            KEY_LINE_START + '}\n{"name": "b", "key": "12345678"}',
            "line 2: the key of b is used twice",
        ),
        (
            '{"name": "a", "key": "sk-alice-0123456789"}',
            "line 1: the key of a is used twice",
        ),
        ('{"name": "api-key-1", "key": "12345678"}', "the name of api-key-1 is"),
        (KEY_LINE_START + "}\n#" + "x" * (1 << 23), "more than 8388608 bytes"),
        ('{"name": "\\ud800", "key": "12345678"}\xff', "line 1: "),
    ],
)
def test_invalid_key_file_is_refused_with_the_line(text, message, tmp_path):
    (tmp_path / "keys").write_bytes(text.encode("latin-1"))
    other = (SecretStr("sk-alice-0123456789"),)
    settings = ProxySettings(api_keys_file=str(tmp_path / "keys"), api_key=other)
    with pytest.raises(ValueError, match=message) as raised:
        FileAccess(settings, Metrics("proxy"))
    assert "12345678" not in str(raised.value) and "keys" in str(raised.value)
    with pytest.raises(ValueError, match="none: No such file"):
        FileAccess(
            ProxySettings(api_keys_file=str(tmp_path / "none")), Metrics("proxy")
        )


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "some-name"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "0.0.0.0", "api_key": (SecretStr(ALICE),)}, False),
        ({"host": "::", "admin_key": (SecretStr(ROOT),)}, False),
    ],
)
def test_server_without_keys_logs_a_warning(options, warns, caplog):
    with caplog.at_level(logging.WARNING, logger="baton"):
        check(ListenOptions(**options))
    assert bool(caplog.messages) == warns


def test_salts_by_key_need_keys():
    with pytest.raises(
        ValueError, match="--cache-salt-by-key has no effect without API keys"
    ):
        check(ListenOptions(cache_salt_by_key=True))
    check(ListenOptions(cache_salt_by_key=True, api_key=(SecretStr(ALICE),)))


async def test_servers_learn_which_requests_share_a_key_but_no_key_name(
    tokenizer, tmp_path
):
    async def shares(url: str, engine: ScriptedEngine, *keys: str) -> list[str]:
        file = write_keys(tmp_path / "keys", KEYS)
        async with Rig([], [Running(url)], api_keys_file=file) as rig:
            for key in keys:
                assert (
                    await send(rig.client, COMPLETE, x_api_key=key)
                ).status_code == 200
        return [request.share for request in engine.added]

    async with serving(tokenizer, role="decode") as server:
        url = f"http://{server.host}:{server.port}"
        alice, bob, again = await shares(url, server.engine, ALICE, BOB, ALICE)
    assert alice == again != bob
    assert alice and bob and not {"alice", "bob"} & {alice, bob}
    async with serving(tokenizer, api_key=(SecretStr(ALICE),)) as server:
        await send(server.http, COMPLETE, x_api_key=ALICE)
        assert [request.share for request in server.engine.added] == ["api-key-1"]
