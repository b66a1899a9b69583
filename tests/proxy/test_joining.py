"""Servers that join and leave a running proxy: by file, DNS, registration and
operators.
"""

import asyncio
import itertools
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from yarl import URL

from engine.http.registrar import Registrar, addresses_of
from protocol.process.logging import current_request_id
from protocol.registration import MAX_AGE_S, Record, seal
from protocol.settings.settings import ProxySettings
from proxy.discovery.sources import MAX_FILE_BYTES, BadFile, Discovery, read_servers
from proxy.membership import Fleet, Kind
from tests.proxy.fakes import Fake, Rig, Waits, decodes, prefills, until

SECRET = "a secret of this test"
END = b"data: [DONE]\n\n"
_issued = itertools.count(1)


def stream_until_released(*_: object) -> Any:
    return Waits(lambda call: call.write(END, more=False), b"data: 1\n\n")


def record(url: str, **fields: Any) -> Record:
    """Return a registration record that is newer than all records before it."""
    issued_ms = int(time.time() * 1000) + next(_issued)
    defaults: dict[str, Any] = {
        "role": "decode",
        "model": "m",
        "ttl_s": 60.0,
        "issued_ms": issued_ms,
    }
    return Record(url=url, **{**defaults, **fields})


def rig_of(decode: list[Fake] | None = None, **settings: Any) -> Rig:
    return Rig([], decode or [], cluster_secret=SECRET, **settings)


async def register(
    rig: Rig, server_record: Record, secret: str = SECRET
) -> httpx.Response:
    sealed = seal(server_record, secret.encode())
    return await rig.client.post("/register", content=sealed)


def server_names(rig: Rig) -> list[str]:
    return [server.name for server in rig.app.fleet.servers]


def are_ready(rig: Rig, *urls: str) -> Callable[[], bool]:
    return lambda: (
        {server.url for server in rig.app.fleet.ready(Kind.DECODE)} == set(urls)
    )


# -- registration


async def test_registered_server_serves_and_leaves_without_losing_a_stream():
    slow = Fake(stream_until_released())
    other = Fake(decodes)
    # max_held_bytes is enough for three requests.
    async with rig_of(fixed_series=False, max_held_bytes=100) as rig:
        for fake in (slow, other):
            fake.start()
        registrar = Registrar([rig.url], record(slow.url), SECRET.encode())
        registrar.start()
        await until(are_ready(rig, slow.url))
        stream = asyncio.create_task(rig.complete(stream=True))
        await slow.behave.begun.wait()  # type: ignore[attr-defined]
        await registrar.leave()
        assert (await register(rig, record(other.url))).json()["server"] == "decode-1"
        await until(are_ready(rig, other.url))
        assert {(await rig.complete()).status_code for _ in range(3)} == {200}
        assert (len(slow.calls), len(other.calls)) == (1, 3)
        # decode-0 stays while it has a stream.
        assert server_names(rig) == ["decode-0", "decode-1"]
        slow.behave.go.set()  # type: ignore[attr-defined]
        assert (await stream).text == "data: 1\n\n" + END.decode()
        await until(lambda: server_names(rig) == ["decode-1"])
        text = (await rig.client.get("/metrics")).text
        assert 'server="decode-1"' in text and 'server="decode-0"' not in text
        await asyncio.gather(slow.stop(), other.stop())


@pytest.mark.parametrize("details", [{}, {"model": "m", "kv_digest": "a.b.c"}])
async def test_server_that_joins_during_a_prefill_can_generate_the_answer(details):
    """The only decode server leaves during the prefill, while a new one joins."""
    slow = Waits(prefills)
    prefill = Fake(slow, details=details)
    old = Fake(decodes, details=details)
    new = Fake(decodes, details=details)
    async with Rig([prefill], [], cluster_secret=SECRET, fixed_series=False) as rig:
        for fake in (old, new):
            fake.start()
        await register(rig, record(old.url))
        await until(are_ready(rig, old.url))
        request = asyncio.create_task(rig.complete())
        await slow.begun.wait()
        await register(rig, record(new.url))
        await until(are_ready(rig, old.url, new.url))
        await register(rig, record(old.url, leaving=True))
        slow.go.set()
        answer = await request
        await asyncio.gather(old.stop(), new.stop())
        assert answer.json() == {"text": "onetwo"}
        assert (len(old.calls), len(new.calls)) == (0, 1)


async def test_registration_expires_unless_renewed_or_the_proxy_shuts_down(caplog):
    ids = list[str | None]()

    class IdRecorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ids.append(current_request_id())

    handler = IdRecorder()
    async with rig_of(fixed_series=False) as rig:
        await register(rig, record("http://d:2", ttl_s=1.0))
        rig.app.shut_down(60.0)
        assert (await register(rig, record("http://d:1", ttl_s=1.0))).status_code == 200
        logging.getLogger("baton.proxy").addHandler(handler)
        await until(lambda: server_names(rig) == ["decode-0"])
        logging.getLogger("baton.proxy").removeHandler(handler)
    assert "the registration of decode server http://d:1 has expired" in caplog.text
    assert set(ids) == {None}, "log lines have the id of the registering request"


async def test_registration_renewed_while_the_proxy_is_suspended_does_not_expire(
    caplog,
):
    """A renewal that arrived while the proxy was suspended counts as in time."""
    async with rig_of(fixed_series=False) as rig:
        await register(rig, record("http://d:1", ttl_s=1.0))
        renewal = seal(record("http://d:1", ttl_s=60.0), SECRET.encode())
        with socket.create_connection(rig.listener.getsockname()) as client:
            head = b"POST /register HTTP/1.1\r\nHost: x\r\n"
            head += b"Content-Length: %d\r\n\r\n" % len(renewal)
            client.sendall(head + renewal)
            time.sleep(1.2)
            client.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(client, 1000)
        assert b" 200 " in answer
        assert server_names(rig) == ["decode-0"] and "has expired" not in caplog.text


async def test_invalid_registrations_are_refused_with_a_reason(caplog):
    now_ms = int(time.time() * 1000)
    too_old_ms = now_ms - int(MAX_AGE_S * 2000)
    async with rig_of(fixed_series=False) as rig:
        for server_record, secret, words in (
            (
                record("http://d:1"),
                "another secret",
                "http://d:1 has a different cluster secret",
            ),
            (
                record("http://d:2", issued_ms=too_old_ms),
                SECRET,
                " s old by this proxy's clock",
            ),
            (
                record("http://d:3", issued_ms=now_ms + 90_000),
                SECRET,
                "the clock of the server or of the proxy is wrong",
            ),
            (record("http://0.0.0.0:4"), SECRET, "--advertise-url"),
            (record("d:5"), SECRET, "is not a URL"),
        ):
            answer = await register(rig, server_record, secret)
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert error["code"] == "registration_refused" and words in error["message"]
            assert words in caplog.text
        for body in (b"", b"{}", b'{"record": {"role": "both"}, "mac": "0"}'):
            answer = await rig.client.post("/register", content=body)
            assert (answer.status_code, "malformed" in answer.text) == (403, True)
        assert server_names(rig) == []
    async with Rig() as without:
        answer = await register(without, record("http://d:1"))
        assert answer.status_code == 403
        assert "BATON_CLUSTER_SECRET" in answer.text


async def test_copy_of_a_record_is_refused_also_after_the_server_has_left():
    async with rig_of(fixed_series=False) as rig:
        first = record("http://d:1")
        last = record("http://d:1", leaving=True)
        assert (await register(rig, first)).status_code == 200
        assert "is a copy" in (await register(rig, first)).text
        assert (await register(rig, last)).json() == {"status": "leaving"}
        for copy in (first, last):
            assert "is a copy" in (await register(rig, copy)).text
        assert server_names(rig) == []
        assert (await register(rig, record("http://d:1"))).status_code == 200


async def test_server_with_other_weights_under_a_used_model_name_is_refused():
    member = Fake(decodes, details={"model": "m", "kv_digest": "a.b.c"})
    async with rig_of([member], fixed_series=False) as rig:
        for fields, status in (
            ({"kv_digest": "x.b.c"}, 403),
            ({"kv_digest": "x.b.c", "model": "other"}, 200),
            ({"kv_digest": "a.b.*", "role": "prefill"}, 200),
        ):
            answer = await register(rig, record("http://d:1", **fields))
            assert answer.status_code == status
            message = 'and decode-0 serve different models as \\"m\\"'
            assert (message in answer.text) is (status == 403)


async def test_model_name_belongs_to_the_first_model_until_its_servers_leave():
    async with rig_of(fixed_series=False) as rig:

        async def send_record(url: str, digest: str, **fields: Any) -> int:
            server_record = record(url, kv_digest=digest, **fields)
            return (await register(rig, server_record)).status_code

        first, second = "http://d:1", "http://d:2"
        assert await send_record(first, "a.b.c") == 200
        assert await send_record(second, "x.b.c") == 403
        assert await send_record(first, "a.b.c") == 200  # renewed
        assert await send_record(second, "a.b.c") == 200
        assert await send_record(first, "x.b.c") == 403  # restarted with other weights
        assert [server.url for server in rig.app.fleet.servers] == [second]
        await send_record(second, "a.b.c", leaving=True)
        assert await send_record(first, "x.b.c") == 200


async def test_registrar_tries_proxies_until_one_accepts(caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        unreachable = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with rig_of(fixed_series=False) as rig:
        server_record = record("http://d:1", ttl_s=1.0)
        registrar = Registrar([unreachable, rig.url], server_record, SECRET.encode())
        registrar.start()
        await until(lambda: server_names(rig) == ["decode-0"])
        await until(lambda: f"not registered with {unreachable}" in caplog.text)
        await registrar.leave()
        assert server_names(rig) == []


async def test_server_registers_with_every_proxy_behind_a_name(monkeypatch):
    # For each request, the address that received it and the request's Host header.
    requests = list[tuple[str, str]]()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        address = writer.get_extra_info("sockname")[0]
        requests.append((address, head.split("host: ")[1].split()[0]))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
        )
        writer.close()

    async def resolve(_: object) -> list[str]:
        return ["127.0.0.2", "127.0.0.3"]

    monkeypatch.setattr("engine.http.registrar.addresses_of", resolve)
    async with await asyncio.start_server(proxy, "0.0.0.0", 0) as server:
        name = f"proxies.test:{server.sockets[0].getsockname()[1]}"
        registrar = Registrar([f"http://{name}"], record("http://d:1"), b"x")
        registrar.start()
        await until(lambda: len(requests) == 2)
        await registrar.leave()
        by_address = sorted(requests)
        assert by_address == [("127.0.0.2", name)] * 2 + [("127.0.0.3", name)] * 2
    # The IPv4 and the IPv6 address of one proxy do not count as two proxies.
    assert await addresses_of(URL("http://localhost:1")) == ["localhost"]


# -- operators


async def test_operator_drains_and_undrains_a_server():
    slow = Fake(stream_until_released())
    other = Fake(decodes)
    async with rig_of([slow, other]) as rig:

        async def post(action: str, **body: str) -> Any:
            answer = await rig.client.post(f"/admin/members{action}", json=body)
            return answer.status_code, answer.json()

        stream = asyncio.create_task(rig.complete(stream=True))
        await slow.behave.begun.wait()  # type: ignore[attr-defined]
        status, answer = await post("/drain", server="decode-0")
        (member,) = answer["members"]
        assert (status, member["state"], member["in_flight"]) == (200, "draining", 1)
        assert {(await rig.complete()).status_code for _ in range(2)} == {200}
        assert (len(slow.calls), len(other.calls)) == (1, 2)
        slow.behave.go.set()  # type: ignore[attr-defined]
        assert (await stream).text.endswith(END.decode())
        listed = (await rig.client.get("/admin/members")).json()["members"]
        assert [(server["url"], server["state"]) for server in listed] == [
            (slow.url, "drained"),
            (other.url, "ready"),
        ]
        _, answer = await post("/undrain", server=slow.url)
        assert answer["members"][0]["state"] == "ready"
        _, answer = await post("", role="prefill", url="http://p:1")
        assert answer["members"][0]["sources"] == ["operator"]
        assert (await post("/remove", server="http://p:1"))[0] == 200
        assert server_names(rig) == ["decode-0", "decode-1"]
        for action, body, expected_status, words in (
            (
                "/drain",
                {"server": "decode-7"},
                404,
                "the members are decode-0, decode-1",
            ),
            ("/drain", {"sever": "decode-0"}, 400, "sever"),
            ("", {"role": "both", "url": "http://p:1"}, 400, "role"),
            ("", {"role": "decode", "url": "p:1"}, 400, "is not a URL"),
        ):
            status, answer = await post(action, **body)
            assert status == expected_status
            assert words in answer["error"]["message"]
        assert (await rig.client.get("/admin/members/drain")).status_code == 405
        # With these headers, a request may come from a web page or from a distant
        # client, so it is refused.
        for header in ("origin", "x-forwarded-for"):
            headers = {header: "http://elsewhere"}
            response = await rig.client.post(
                "/admin/members/drain", json={}, headers=headers
            )
            assert response.status_code == 403
            assert "not a browser" in response.text
        for host, status in (
            ("127.0.0.1.its.name:1", 403),
            ("LOCALHOST:1", 200),
            ("[::1]", 200),
        ):
            response = await rig.client.get("/admin/members", headers={"host": host})
            assert response.status_code == status


# -- files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it must have"),
        ("[]", "it must have"),
        ("decode: http://d:1", "must be a list"),
        ("decode: [d:1]", "is not a URL"),
        ("decode: []\nprefil: []", 'unknown key "prefil"'),
        ("decode: [\n", "not YAML"),
        ("decode: []\ndecode: []", "a second time"),
        ("#" * (MAX_FILE_BYTES + 1), "longer than"),
        (None, "No such file"),
    ],
)
def test_invalid_file_of_servers_is_refused(tmp_path, text, words):
    file = tmp_path / "servers.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadFile, match=words):
        read_servers(str(file))


async def test_file_is_reloaded_and_an_invalid_one_changes_nothing(tmp_path, caplog):
    file = tmp_path / "servers.yaml"
    fakes = [Fake(decodes), Fake(decodes)]
    a, b = (fake.url for fake in fakes)
    file.write_text(json.dumps({"decode": [a]}))
    options = {
        "servers_file": str(file),
        "discovery_interval_s": 0.01,
        "fixed_series": False,
    }
    async with rig_of(**options) as rig:
        for fake in fakes:
            fake.start()
        await until(are_ready(rig, a))
        file.write_text(f"decode: [{a}, {b}]\nprefill: []")
        await until(are_ready(rig, a, b))
        file.write_text("decode: [")
        await until(lambda: "not YAML" in caplog.text)
        assert (await rig.complete()).status_code == 200
        file.write_text(f"decode: [{b}]")
        await until(are_ready(rig, b))
        assert server_names(rig) == ["decode-1"]
        await asyncio.gather(*(fake.stop() for fake in fakes))


# -- names


async def test_all_addresses_of_a_dns_name_are_members_until_lookups_fail_for_long():
    now = 0.0
    num_lookups = 0
    answer: list[str] | OSError = ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"]

    async def resolve(name: str, port: int) -> list[str]:
        nonlocal num_lookups
        num_lookups += 1
        assert (name, port) == ("decodes", 8200)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def urls_after_lookup() -> list[str]:
        before = num_lookups
        await until(lambda: num_lookups > before + 1)
        return [server.url for server in fleet.servers]

    fleet = Fleet()
    settings = ProxySettings(
        decode=("dns+http://decodes:8200", "http://d:1"), discovery_interval_s=0.001
    )
    discovery = Discovery(fleet, settings, resolve, clock=lambda: now)
    discovery.start()
    first = "http://10.0.0.1:8200"
    second = "http://10.0.0.2:8200"
    third = "http://[fd00::1]:8200"
    assert await urls_after_lookup() == ["http://d:1", first, second, third]
    answer = ["10.0.0.2"]
    assert await urls_after_lookup() == ["http://d:1", second]
    answer = OSError("no such name")
    now = 200.0
    assert await urls_after_lookup() == ["http://d:1", second]
    now = 600.0
    assert await urls_after_lookup() == ["http://d:1"]
    answer = ["10.0.0.2"]
    assert await urls_after_lookup() == ["http://d:1", second]
    await discovery.close()
