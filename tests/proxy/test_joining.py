"""Members that a file, a name, a registration or an operator adds, over HTTP to a real proxy."""

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


def ends(*_: object) -> Any:
    return Waits(lambda call: call.write(END, more=False), b"data: 1\n\n")


def record(url: str, **said: Any) -> Record:
    issued_ms = int(time.time() * 1000) + next(_issued)
    usual: dict[str, Any] = {
        "role": "decode",
        "model": "m",
        "ttl_s": 60.0,
        "issued_ms": issued_ms,
    }
    return Record(url=url, **{**usual, **said})


def rig_of(decode: list[Fake] | None = None, **settings: Any) -> Rig:
    return Rig([], decode or [], cluster_secret=SECRET, **settings)


async def register(rig: Rig, said: Record, secret: str = SECRET) -> httpx.Response:
    return await rig.client.post("/register", content=seal(said, secret.encode()))


def names(rig: Rig) -> list[str]:
    return [server.name for server in rig.app.fleet.servers]


def ready(rig: Rig, *urls: str) -> Callable[[], bool]:
    return lambda: {each.url for each in rig.app.fleet.ready(Kind.DECODE)} == set(urls)


# -- registration


async def test_a_server_that_registers_serves_and_leaves_without_a_lost_stream():
    slow, other = Fake(ends()), Fake(decodes)
    async with rig_of(fixed_series=False, max_held_bytes=100) as rig:  # three requests'
        for fake in (slow, other):
            fake.start()
        told = Registrar([rig.url], record(slow.url), SECRET.encode())
        told.start()
        await until(ready(rig, slow.url))
        stream = asyncio.create_task(rig.complete(stream=True))
        await slow.behave.begun.wait()  # type: ignore[attr-defined]
        await told.leave()
        assert (await register(rig, record(other.url))).json()["server"] == "decode-1"
        await until(ready(rig, other.url))
        assert {(await rig.complete()).status_code for _ in range(3)} == {200}
        assert (len(slow.calls), len(other.calls)) == (1, 3)
        assert names(rig) == ["decode-0", "decode-1"]  # it has a stream
        slow.behave.go.set()  # type: ignore[attr-defined]
        assert (await stream).text == "data: 1\n\n" + END.decode()
        await until(lambda: names(rig) == ["decode-1"])
        text = (await rig.client.get("/metrics")).text
        assert 'server="decode-1"' in text and 'server="decode-0"' not in text
        await asyncio.gather(slow.stop(), other.stop())


@pytest.mark.parametrize("told", [{}, {"model": "m", "kv_digest": "a.b.c"}])
async def test_a_server_that_joined_while_a_prompt_was_computed_generates_its_answer(
    told,
):
    """The one that was there before may have left meanwhile."""
    slow, old, new = Waits(prefills), Fake(decodes, told=told), Fake(decodes, told=told)
    async with Rig(
        [Fake(slow, told=told)], [], cluster_secret=SECRET, fixed_series=False
    ) as rig:
        for fake in (old, new):
            fake.start()
        await register(rig, record(old.url))
        await until(ready(rig, old.url))
        asked = asyncio.create_task(rig.complete())
        await slow.begun.wait()
        await register(rig, record(new.url))
        await until(ready(rig, old.url, new.url))
        await register(rig, record(old.url, leaving=True))
        slow.go.set()
        answer = await asked
        await asyncio.gather(old.stop(), new.stop())
        assert answer.json() == {"text": "onetwo"}
        assert (len(old.calls), len(new.calls)) == (0, 1)


async def test_a_registration_that_is_not_repeated_lapses_unless_the_proxy_ends(caplog):
    ids = list[str | None]()
    seen = logging.Handler()
    seen.emit = lambda record: ids.append(current_request_id())  # type: ignore[method-assign]
    async with rig_of(fixed_series=False) as rig:
        await register(rig, record("http://d:2", ttl_s=1.0))
        rig.app.shut_down(60.0)
        assert (await register(rig, record("http://d:1", ttl_s=1.0))).status_code == 200
        logging.getLogger("baton.proxy").addHandler(seen)
        await until(lambda: names(rig) == ["decode-0"])
        logging.getLogger("baton.proxy").removeHandler(seen)
    assert "the registration of decode server http://d:1 has lapsed" in caplog.text
    assert set(ids) == {None}  # not that of the request that registered it


async def test_a_registration_that_is_repeated_while_the_proxy_stands_still_does_not_lapse(
    caplog,
):
    """As where its machine is suspended: what came meanwhile is in time."""
    async with rig_of(fixed_series=False) as rig:
        await register(rig, record("http://d:1", ttl_s=1.0))
        again = seal(record("http://d:1", ttl_s=60.0), SECRET.encode())
        with socket.create_connection(rig.listener.getsockname()) as client:
            head = (
                b"POST /register HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                % len(again)
            )
            client.sendall(head + again)
            time.sleep(1.2)
            client.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(client, 1000)
        assert b" 200 " in answer
        assert names(rig) == ["decode-0"] and "lapsed" not in caplog.text


async def test_what_is_no_registration_of_this_cluster_is_refused_and_named(caplog):
    now_ms = int(time.time() * 1000)
    late_ms = now_ms - int(MAX_AGE_S * 2000)
    async with rig_of(fixed_series=False) as rig:
        for said, secret, words in (
            (
                record("http://d:1"),
                "another secret",
                "http://d:1 has a different cluster secret",
            ),
            (
                record("http://d:2", issued_ms=late_ms),
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
            answer = await register(rig, said, secret)
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert error["code"] == "registration_refused" and words in error["message"]
            assert words in caplog.text
        for body in (b"", b"{}", b'{"record": {"role": "both"}, "mac": "0"}'):
            answer = await rig.client.post("/register", content=body)
            assert (answer.status_code, "malformed" in answer.text) == (403, True)
        assert names(rig) == []
    async with Rig() as without:
        answer = await register(without, record("http://d:1"))
        assert (answer.status_code, "BATON_CLUSTER_SECRET" in answer.text) == (
            403,
            True,
        )


async def test_a_copy_of_a_record_does_nothing_whatever_its_server_said_since():
    async with rig_of(fixed_series=False) as rig:
        first, last = record("http://d:1"), record("http://d:1", leaving=True)
        assert (await register(rig, first)).status_code == 200
        assert "is a copy" in (await register(rig, first)).text
        assert (await register(rig, last)).json() == {"status": "leaving"}
        for copy in (first, last):
            assert "is a copy" in (await register(rig, copy)).text
        assert names(rig) == []
        assert (await register(rig, record("http://d:1"))).status_code == 200


async def test_whoever_claims_a_name_serves_the_model_that_others_serve_by_it():
    known = Fake(decodes, told={"model": "m", "kv_digest": "a.b.c"})
    async with rig_of([known], fixed_series=False) as rig:
        for said, status in (
            ({"kv_digest": "x.b.c"}, 403),
            ({"kv_digest": "x.b.c", "model": "other"}, 200),
            ({"kv_digest": "a.b.*", "role": "prefill"}, 200),
        ):
            answer = await register(rig, record("http://d:1", **said))
            assert answer.status_code == status
            assert ('serves another model as \\"m\\" than decode-0' in answer.text) is (
                status == 403
            )


async def test_of_two_models_that_claim_a_name_the_first_has_it_until_it_leaves():
    async with rig_of(fixed_series=False) as rig:

        async def says(url: str, digest: str, **said: Any) -> int:
            return (
                await register(rig, record(url, kv_digest=digest, **said))
            ).status_code

        first, second = "http://d:1", "http://d:2"
        assert await says(first, "a.b.c") == 200
        assert await says(second, "x.b.c") == 403
        assert await says(first, "a.b.c") == 200  # again
        assert await says(second, "a.b.c") == 200
        assert await says(first, "x.b.c") == 403  # it has started anew
        assert [server.url for server in rig.app.fleet.servers] == [second]
        await says(second, "a.b.c", leaving=True)
        assert await says(first, "x.b.c") == 200


async def test_a_server_goes_on_until_a_proxy_takes_it(caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with rig_of(fixed_series=False) as rig:
        told = Registrar(
            [nobody, rig.url], record("http://d:1", ttl_s=1.0), SECRET.encode()
        )
        told.start()
        await until(lambda: names(rig) == ["decode-0"])
        await until(lambda: f"not registered with {nobody}" in caplog.text)
        await told.leave()
        assert names(rig) == []


async def test_a_server_registers_with_every_proxy_behind_a_name(monkeypatch):
    asked = list[tuple[str, str]]()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        asked.append(
            (writer.get_extra_info("sockname")[0], head.split("host: ")[1].split()[0])
        )
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
        )
        writer.close()

    async def behind(_: object) -> list[str]:
        return ["127.0.0.2", "127.0.0.3"]

    monkeypatch.setattr("engine.http.registrar.addresses_of", behind)
    async with await asyncio.start_server(proxy, "0.0.0.0", 0) as server:
        name = f"proxies.test:{server.sockets[0].getsockname()[1]}"
        told = Registrar([f"http://{name}"], record("http://d:1"), b"x")
        told.start()
        await until(lambda: len(asked) == 2)
        await told.leave()
        assert sorted(asked) == [("127.0.0.2", name)] * 2 + [("127.0.0.3", name)] * 2
    assert await addresses_of(URL("http://localhost:1")) == [
        "localhost"
    ]  # of either family one


# -- operators


async def test_an_operator_drains_a_server_and_takes_it_back():
    slow, other = Fake(ends()), Fake(decodes)
    async with rig_of([slow, other]) as rig:

        async def post(action: str, **body: str) -> Any:
            answer = await rig.client.post(f"/admin/members{action}", json=body)
            return answer.status_code, answer.json()

        stream = asyncio.create_task(rig.complete(stream=True))
        await slow.behave.begun.wait()  # type: ignore[attr-defined]
        status, told = await post("/drain", server="decode-0")
        (member,) = told["members"]
        assert (status, member["state"], member["in_flight"]) == (200, "draining", 1)
        assert {(await rig.complete()).status_code for _ in range(2)} == {200}
        assert (len(slow.calls), len(other.calls)) == (1, 2)
        slow.behave.go.set()  # type: ignore[attr-defined]
        assert (await stream).text.endswith(END.decode())
        listed = (await rig.client.get("/admin/members")).json()["members"]
        assert [(one["url"], one["state"]) for one in listed] == [
            (slow.url, "drained"),
            (other.url, "ready"),
        ]
        assert (await post("/undrain", server=slow.url))[1]["members"][0][
            "state"
        ] == "ready"
        added = await post("", role="prefill", url="http://p:1")
        assert added[1]["members"][0]["sources"] == ["operator"]
        assert (await post("/remove", server="http://p:1"))[0] == 200
        assert names(rig) == ["decode-0", "decode-1"]
        for action, body, status, words in (
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
            found = await post(action, **body)
            assert (found[0], words in found[1]["error"]["message"]) == (status, True)
        assert (await rig.client.get("/admin/members/drain")).status_code == 405
        for header in (
            "origin",
            "x-forwarded-for",
        ):  # of a browser or a proxy on the same machine
            headers = {header: "http://elsewhere"}
            answer = await rig.client.post(
                "/admin/members/drain", json={}, headers=headers
            )
            assert (answer.status_code, "not a browser" in answer.text) == (403, True)
        for host, status in (
            ("127.0.0.1.its.name:1", 403),
            ("LOCALHOST:1", 200),
            ("[::1]", 200),
        ):
            answer = await rig.client.get("/admin/members", headers={"host": host})
            assert answer.status_code == status


# -- files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it must say"),
        ("[]", "it must say"),
        ("decode: http://d:1", "must be a list"),
        ("decode: [d:1]", "is not a URL"),
        ("decode: []\nprefil: []", 'unknown key "prefil"'),
        ("decode: [\n", "not YAML"),
        ("decode: []\ndecode: []", "a second time"),
        ("#" * (MAX_FILE_BYTES + 1), "longer than"),
        (None, "No such file"),
    ],
)
def test_a_file_that_says_no_servers_is_refused(tmp_path, text, words):
    file = tmp_path / "servers.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadFile, match=words):
        read_servers(str(file))


async def test_a_file_is_followed_and_a_bad_one_changes_nothing(tmp_path, caplog):
    file, fakes = tmp_path / "servers.yaml", [Fake(decodes), Fake(decodes)]
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
        await until(ready(rig, a))
        file.write_text(f"decode: [{a}, {b}]\nprefill: []")
        await until(ready(rig, a, b))
        file.write_text("decode: [")
        await until(lambda: "not YAML" in caplog.text)
        assert (await rig.complete()).status_code == 200
        file.write_text(f"decode: [{b}]")
        await until(ready(rig, b))
        assert names(rig) == ["decode-1"]
        await asyncio.gather(*(fake.stop() for fake in fakes))


# -- names


async def test_every_address_of_a_name_is_a_member_and_old_answers_are_kept_for_a_while():
    now, looks = 0.0, 0
    answer: list[str] | OSError = ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"]

    async def resolve(name: str, port: int) -> list[str]:
        nonlocal looks
        looks += 1
        assert (name, port) == ("decodes", 8200)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def looked() -> list[str]:
        before = looks
        await until(lambda: looks > before + 1)
        return [server.url for server in fleet.servers]

    fleet = Fleet()
    settings = ProxySettings(
        decode=("dns+http://decodes:8200", "http://d:1"), discovery_interval_s=0.001
    )
    discovery = Discovery(fleet, settings, resolve, clock=lambda: now)
    discovery.start()
    first, second, third = (
        "http://10.0.0.1:8200",
        "http://10.0.0.2:8200",
        "http://[fd00::1]:8200",
    )
    assert await looked() == ["http://d:1", first, second, third]
    answer = ["10.0.0.2"]
    assert await looked() == ["http://d:1", second]
    answer = OSError("no such name")
    now = 200.0
    assert await looked() == ["http://d:1", second]
    now = 600.0
    assert await looked() == ["http://d:1"]
    answer = ["10.0.0.2"]
    assert await looked() == ["http://d:1", second]
    await discovery.close()
