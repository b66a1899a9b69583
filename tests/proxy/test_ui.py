"""The page's files and its data: what they are, who is asked for them and when; their bounds."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from proxy.ui import site, state
from tests.proxy.fakes import (
    Call,
    Fake,
    Rig,
    answers,
    decodes,
    drops,
    hangs,
    prefills,
    until,
)

GEOMETRY = {
    "model": "m",
    "tp": 2,
    "side_channel_host": "10.1.2.3",
    "side_channel_port": 9,
}


def served(number: int, request_id: str, **times: float) -> dict[str, Any]:
    return {
        "number": number, "id": request_id, "endpoint": "completions", "outcome": "length",
        "error": None, "times": times, "prompt_tokens": 3, "generated": 2, "kv": {"transferred": 3},
    }  # fmt: skip


class Tells:
    """A server's behaviour at GET /stats."""

    def __init__(self, **values: float) -> None:
        self.values = values
        self.server: dict[str, Any] = GEOMETRY
        self.served: list[dict[str, Any]] = []

    async def __call__(self, call: Call) -> None:
        told = {
            "server": self.server,
            "values": self.values,
            "served": self.served,
            "next": 7,
        }
        await call.answer(200, told)


async def look(rig: Rig, since: int = 0, epoch: str = "") -> dict[str, Any]:
    response = await rig.client.get(
        site.STATE_PATH, params={"since": since, "epoch": epoch}
    )
    assert response.status_code == 200, response.text
    found = response.json()
    assert isinstance(found, dict)
    return found


async def looks_until(rig: Rig, condition: Any) -> dict[str, Any]:
    while not condition(found := await look(rig)):
        await asyncio.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "INTERVAL_S", 0.01)
    monkeypatch.setattr(state, "POLLS_PER_S", 1000)


async def test_the_page_loads_nothing_from_elsewhere_and_runs_no_script_of_its_data():
    async with Rig() as rig:
        for path in site.OPEN_PATHS:
            got = await rig.client.get(path)
            assert got.status_code == 200
            csp = got.headers["content-security-policy"]
            assert (
                "default-src 'none'" in csp
                and "unsafe" not in csp
                and "http" not in csp
            )
            assert got.headers["x-content-type-options"] == "nosniff"
            head = await rig.client.head(path)
            assert (head.status_code, head.content) == (200, b"")
        page = (await rig.client.get("/")).text
        assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|//", page)
        texts = [(await rig.client.get(path)).text for path in site.OPEN_PATHS]
        linked = {
            one for text in texts for one in re.findall(r'"(?:/ui|[.])/([\w.]+)"', text)
        }
        assert (
            len(linked) > 10 and {f"/ui/{name}" for name in linked} <= site.OPEN_PATHS
        )
        assert rig.decode[0].looks == [], "the files alone cost servers nothing"


async def test_without_it_its_paths_are_unknown_and_nothing_is_noted():
    async with Rig(ui=False) as rig:
        await rig.complete()
        answered = [await rig.client.get(path) for path in site.PATHS]
        assert {answer.status_code for answer in answered} == {404}


async def test_a_request_is_shown_with_its_legs_and_what_the_servers_say_of_it():
    async with Rig() as rig:
        tells = rig.decode[0].on_stats = Tells(baton_requests_running=1.0)
        mine = "é".encode().decode("latin-1")
        await rig.complete(headers={"x-request-id": b"\xe9"}, prompt="SECRET")
        tells.served = [
            served(6, mine, admitted=0.1, end=0.4),
            served(5, "another proxy's"),
        ]
        found = await looks_until(rig, lambda found: found["requests"][0]["served"])
        (request,) = found["requests"]
        assert [name for name, _ in request["legs"]] == ["prefill-0", "decode-0"]
        assert (request["id"], request["status"], request["alone"]) == (
            mine,
            "200",
            None,
        )
        assert request["served"]["decode-0"]["times"] == {"admitted": 0.1, "end": 0.4}
        assert found["points"][-1]["pd"] == 1
        told = dict(zip(found["columns"], found["points"][-1]["decode"], strict=True))
        assert told == {"baton_requests_running": 1.0}
        decode = found["servers"]["decode-0"]
        assert (decode["tp"], decode["state"], decode["reason"]) == (2, "ready", "")
        assert "404" in found["servers"]["prefill-0"]["reason"], (
            "of a server that has no numbers"
        )
        await looks_until(rig, lambda _: "since=7" in rig.decode[0].looks[-1].query)
        hidden = ("SECRET", rig.decode[0].url, "10.1.2.3")
        assert not [text for text in hidden if text in str(found)]


async def test_a_page_gets_what_is_new_to_it_and_all_of_another_proxys():
    async with Rig() as rig:
        await rig.complete()
        first = await look(rig)
        again = await look(rig, first["number"], first["epoch"])
        assert (
            again["requests"] == []
            and again["servers"] == {}
            and again["columns"] is None
        )
        await rig.complete()
        (new,) = (await look(rig, first["number"], first["epoch"]))["requests"]
        assert new["number"] == 2
        assert len((await look(rig, 10**12, "another"))["requests"]) == 2
        wrong = await rig.client.get(site.STATE_PATH, params={"since": "-1"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since")


async def test_a_running_request_is_shown_until_it_ends_and_a_broken_one_is_called_so():
    async with Rig(decode=[Fake(hangs)]) as rig:
        task = asyncio.create_task(rig.complete())
        await until(lambda: bool(rig.decode[0].calls))
        found = await looks_until(
            rig, lambda found: len(found["requests"][0]["legs"]) == 2
        )
        assert found["running"] == [1] and found["requests"][0]["status"] is None
        assert found["servers"]["decode-0"]["in_flight"] == 1
        task.cancel()
        found = await looks_until(rig, lambda found: not found["running"])
        assert found["requests"][0]["status"] == "none", "the client has gone"
        await rig.decode[0].stop()
        found = await looks_until(
            rig, lambda found: found["servers"]["decode-0"]["state"] == "not_ready"
        )
        assert "127.0.0.1" not in found["servers"]["decode-0"]["reason"]


async def test_a_server_that_takes_either_leg_is_shown_twice_and_counted_once():
    both = Fake(decodes, role="both")
    both.on_stats = Tells(baton_requests_running=3.0)
    async with Rig([both], [], fixed_series=False) as rig:
        found = await looks_until(rig, lambda found: "decode-0" in found["names"])
        found = await looks_until(
            rig, lambda found: found["servers"]["decode-0"]["values"]
        )
        last = found["points"][-1]
        assert (len(found["names"]), last["prefill"], last["decode"]) == (2, [0], [3.0])


async def test_rings_are_bounded(monkeypatch):
    for name in ("MAX_REQUESTS", "MAX_RUNNING", "MAX_COLUMNS", "MAX_POINTS"):
        monkeypatch.setattr(state, name, 3)
    async with Rig() as rig:
        for _ in range(5):
            await rig.complete(headers={"x-request-id": "the same"})
        rig.decode[0].on_stats = Tells(**dict.fromkeys("abcde", 1.0))
        found = await looks_until(rig, lambda found: len(found["columns"]) == 3)
        assert len(found["points"][-1]["decode"]) == 3 >= len(found["points"])
        assert [request["number"] for request in found["requests"]] == [3, 4, 5]
        rig.decode[0].behave = hangs
        tasks = [asyncio.create_task(rig.complete()) for _ in range(5)]
        await until(lambda: len(rig.decode[0].calls) == 10)
        assert len((await look(rig))["running"]) == 3
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize(
    "on_stats", [drops, hangs, answers(200, {"values": 1}), answers(503, {})]
)
async def test_a_server_without_numbers_keeps_no_page_from_the_others(
    on_stats, monkeypatch
):
    monkeypatch.setattr(state, "POLL_TIMEOUT_S", 0.05)
    async with Rig([Fake(prefills)], [Fake(decodes), Fake(decodes)]) as rig:
        rig.decode[0].on_stats, rig.decode[1].on_stats = on_stats, Tells(x=1.0)
        servers = (await look(rig))["servers"]
        assert servers["decode-0"]["reason"] and servers["decode-0"]["state"] == "ready"
        assert servers["decode-1"]["values"] == {"x": 1.0}
        assert (await rig.complete()).status_code == 200


async def test_servers_are_asked_only_while_a_page_asks(monkeypatch):
    monkeypatch.setattr(state, "LINGER_S", 0.05)
    async with Rig() as rig:
        fake, rounds = rig.decode[0], []
        await rig.complete()
        assert fake.looks == []
        for _ in range(2):
            await look(rig)
            rounds.append(0)
            while (
                len(fake.looks) > rounds[-1]
            ):  # until none comes for some health checks
                rounds[-1], polls = len(fake.looks), fake.polls
                await until(lambda polls=polls: fake.polls > polls + 10)
        assert 0 < rounds[0] < rounds[1]


async def test_a_page_of_many_servers_is_asked_for_seldom():
    fakes = [Fake(prefills) for _ in range(25)], [Fake(decodes) for _ in range(25)]
    async with Rig(*fakes) as rig:
        found: httpx.Response = await rig.client.get(site.STATE_PATH)
        assert len(found.json()["names"]) == 50
        assert found.json()["interval_s"] == 50 / state.POLLS_PER_S


async def test_with_keys_all_may_have_the_files_and_admins_alone_the_data():
    async with Rig(api_key=("client's",), admin_key=("operator's",)) as rig:
        files = [await rig.client.get(path) for path in site.OPEN_PATHS]
        assert {answer.status_code for answer in files} == {200}
        for key, status in (("", 401), ("client's", 403), ("operator's", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            told = await rig.client.get(site.STATE_PATH, headers=headers)
            assert told.status_code == status
        assert (await rig.complete()).status_code == 401  # who has no key is not shown
        (await rig.complete({"x-api-key": "client's"})).raise_for_status()
        told = await rig.client.get(site.STATE_PATH, headers=headers)
        assert [each["status"] for each in told.json()["requests"]] == ["200"]


async def test_servers_with_keys_of_their_own_are_asked_with_the_proxys():
    async with Rig(upstream_api_key="servers'") as rig:
        await look(rig)
        assert rig.decode[0].looks[0].headers["authorization"] == "Bearer servers'"
