"""The proxy's page for operators: its files and its data, access, polling and
limits.
"""

import asyncio
import re
import time
from typing import Any

import pytest

from proxy.ui import points, site, state
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


def finished_request(number: int, request_id: str, **times: float) -> dict[str, Any]:
    """Return a finished request as servers report it at GET /stats."""
    return {
        "number": number,
        "id": request_id,
        "endpoint": "completions",
        "outcome": "length",
        "error": None,
        "times": times,
        "prompt_tokens": 3,
        "generated": 2,
        "kv": {"transferred": 3},
    }


class Stats:
    """The behaviour of a server at GET /stats."""

    def __init__(self, **values: float) -> None:
        self.values = values
        self.server: dict[str, Any] = GEOMETRY
        self.served: list[dict[str, Any]] = []

    async def __call__(self, call: Call) -> None:
        stats = {
            "server": self.server,
            "values": self.values,
            "served": self.served,
            "next": 7,
        }
        await call.answer(200, stats)


async def poll(rig: Rig, since: int = 0, epoch: str = "") -> dict[str, Any]:
    """Return the data that the page gets when it polls."""
    response = await rig.client.get(
        site.STATE_PATH, params={"since": since, "epoch": epoch}
    )
    assert response.status_code == 200, response.text
    page_state = response.json()
    assert isinstance(page_state, dict)
    return page_state


async def poll_until(rig: Rig, condition: Any) -> dict[str, Any]:
    """Poll until the condition holds for the page's data. Return the data."""
    while True:
        page_state = await poll(rig)
        if condition(page_state):
            return page_state
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "INTERVAL_S", 0.01)
    monkeypatch.setattr(state, "POLLS_PER_S", 1000)


async def test_page_loads_nothing_from_other_hosts_and_runs_no_script_in_its_data():
    async with Rig() as rig:
        for path in site.OPEN_PATHS:
            response = await rig.client.get(path)
            assert response.status_code == 200
            csp = response.headers["content-security-policy"]
            assert "default-src 'none'" in csp
            assert "unsafe" not in csp and "http" not in csp
            assert response.headers["x-content-type-options"] == "nosniff"
            head = await rig.client.head(path)
            assert (head.status_code, head.content) == (200, b"")
        page = (await rig.client.get("/")).text
        assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|//", page)
        linked: set[str] = set()
        for path in site.OPEN_PATHS:
            text = (await rig.client.get(path)).text
            linked.update(re.findall(r'"(?:/ui|[.])/([\w.]+)"', text))
        assert len(linked) > 10
        assert {f"/ui/{name}" for name in linked} <= site.OPEN_PATHS
        assert rig.decode[0].stats_calls == [], "loading the files queried a server"


async def test_disabled_page_has_no_paths_and_records_nothing():
    async with Rig(ui=False) as rig:
        await rig.complete()
        for path in site.PATHS:
            assert (await rig.client.get(path)).status_code == 404


async def test_request_is_shown_with_its_legs_and_the_reports_of_its_servers():
    async with Rig() as rig:
        stats = Stats(baton_requests_running=1.0)
        rig.decode[0].on_stats = stats
        request_id = "é".encode().decode("latin-1")
        await rig.complete(headers={"x-request-id": b"\xe9"}, prompt="SECRET")
        stats.served = [
            finished_request(6, request_id, admitted=0.1, end=0.4),
            finished_request(5, "another proxy's"),
        ]
        page_state = await poll_until(rig, lambda data: data["requests"][0]["served"])
        (request,) = page_state["requests"]
        assert [name for name, _ in request["legs"]] == ["prefill-0", "decode-0"]
        assert request["id"] == request_id
        assert (request["status"], request["alone"]) == ("200", None)
        assert request["served"]["decode-0"]["times"] == {"admitted": 0.1, "end": 0.4}
        point = page_state["points"][-1]
        assert point["pd"] == 1
        values = dict(zip(page_state["columns"], point["decode"], strict=True))
        assert values == {"baton_requests_running": 1.0}
        decode = page_state["servers"]["decode-0"]
        assert (decode["tp"], decode["state"], decode["reason"]) == (2, "ready", "")
        # The prefill server has no path /stats.
        assert "404" in page_state["servers"]["prefill-0"]["reason"]
        await poll_until(
            rig, lambda _: "since=7" in rig.decode[0].stats_calls[-1].query
        )
        hidden = ("SECRET", rig.decode[0].url, "10.1.2.3")
        assert not [text for text in hidden if text in str(page_state)]


async def test_page_gets_only_changes_except_from_a_restarted_proxy():
    async with Rig() as rig:
        await rig.complete()
        first = await poll(rig)
        again = await poll(rig, first["number"], first["epoch"])
        assert (again["requests"], again["servers"]) == ([], {})
        assert again["columns"] is None
        await rig.complete()
        (new,) = (await poll(rig, first["number"], first["epoch"]))["requests"]
        assert new["number"] == 2
        assert len((await poll(rig, 10**12, "another"))["requests"]) == 2
        refused = await rig.client.get(site.STATE_PATH, params={"since": "-1"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "since")


async def test_running_and_broken_requests_are_shown_with_their_status():
    async with Rig(decode=[Fake(hangs)]) as rig:
        task = asyncio.create_task(rig.complete())
        await until(lambda: bool(rig.decode[0].calls))
        page_state = await poll_until(
            rig, lambda data: len(data["requests"][0]["legs"]) == 2
        )
        assert page_state["running"] == [1]
        assert page_state["requests"][0]["status"] is None
        assert page_state["servers"]["decode-0"]["in_flight"] == 1
        task.cancel()
        page_state = await poll_until(rig, lambda data: not data["running"])
        # The client has disconnected.
        assert page_state["requests"][0]["status"] == "none"
        await rig.decode[0].stop()
        page_state = await poll_until(
            rig, lambda data: data["servers"]["decode-0"]["state"] == "not_ready"
        )
        assert "127.0.0.1" not in page_state["servers"]["decode-0"]["reason"]


async def test_server_of_role_both_is_shown_twice_and_counted_once():
    both = Fake(decodes, role="both")
    both.on_stats = Stats(baton_requests_running=3.0)
    async with Rig([both], [], fixed_series=False) as rig:
        await poll_until(rig, lambda data: "decode-0" in data["names"])
        page_state = await poll_until(
            rig, lambda data: data["servers"]["decode-0"]["values"]
        )
        assert len(page_state["names"]) == 2
        point = page_state["points"][-1]
        assert (point["prefill"], point["decode"]) == ([0], [3.0])


async def test_recorded_data_is_bounded(monkeypatch):
    monkeypatch.setattr(points, "HISTORY_INTERVAL_S", 0)
    for name in ("MAX_REQUESTS", "MAX_RUNNING"):
        monkeypatch.setattr(state, name, 3)
    for name in ("MAX_COLUMNS", "MAX_RECENT", "MAX_HISTORY"):
        monkeypatch.setattr(points, name, 3)
    async with Rig() as rig:
        for _ in range(5):
            await rig.complete(headers={"x-request-id": "the same"})
        rig.decode[0].on_stats = Stats(**dict.fromkeys("abcde", 1.0))
        page_state = await poll_until(rig, lambda data: len(data["columns"]) == 3)
        assert len(page_state["points"][-1]["decode"]) == 3
        later = await poll_until(
            rig, lambda data: data["number"] > page_state["number"] + 10
        )
        assert len(later["points"]) == len(later["history"]) == 3
        assert [request["number"] for request in page_state["requests"]] == [3, 4, 5]
        rig.decode[0].behave = hangs
        tasks = [asyncio.create_task(rig.complete()) for _ in range(5)]
        await until(lambda: len(rig.decode[0].calls) == 10)
        assert len((await poll(rig))["running"]) == 3
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize(
    "on_stats", [drops, hangs, answers(200, {"values": 1}), answers(503, {})]
)
async def test_server_without_statistics_does_not_hide_the_other_servers(
    on_stats, monkeypatch
):
    monkeypatch.setattr(state, "POLL_TIMEOUT_S", 0.05)
    async with Rig([Fake(prefills)], [Fake(decodes), Fake(decodes)]) as rig:
        rig.decode[0].on_stats = on_stats
        rig.decode[1].on_stats = Stats(x=1.0)
        page_state = await poll_until(
            rig, lambda data: data["servers"]["decode-1"]["values"] == {"x": 1.0}
        )
        servers = page_state["servers"]
        assert servers["decode-0"]["reason"] and servers["decode-0"]["state"] == "ready"
        assert (await rig.complete()).status_code == 200


async def test_servers_are_queried_often_only_while_a_page_polls(monkeypatch):
    monkeypatch.setattr(state, "LINGER_S", 0.05)
    async with Rig() as rig:
        fake = rig.decode[0]
        num_queries: list[int] = []
        await rig.complete()
        assert fake.stats_calls == []
        for _ in range(2):
            await poll(rig)
            num_queries.append(0)
            # Wait until there was no query during ten health checks.
            while len(fake.stats_calls) > num_queries[-1]:
                num_queries[-1] = len(fake.stats_calls)
                polls = fake.polls
                await until(lambda polls=polls: fake.polls > polls + 10)
        assert 0 < num_queries[0] < num_queries[1]


async def test_history_of_the_time_before_the_page_was_opened_is_recorded(monkeypatch):
    for module in (state, points):
        monkeypatch.setattr(module, "HISTORY_INTERVAL_S", 0.02)
    async with Rig() as rig:
        rig.decode[0].on_stats = Stats(baton_requests_running=2.0)
        await until(lambda: len(rig.decode[0].stats_calls) > 3)
        begun_at = time.time()
        page_state = await poll(rig)
        before = [point for point in page_state["history"] if point["at"] < begun_at]
        assert len(before) >= 2 and page_state["columns"]
        assert before[-1]["decode"] == [2.0]
        assert all(point["at"] >= begun_at for point in page_state["points"])
        again = await poll(rig, page_state["number"], page_state["epoch"])
        times = {point["at"] for point in page_state["history"]}
        assert not times & {point["at"] for point in again["history"]}


async def test_page_of_many_servers_polls_less_often():
    prefill = [Fake(prefills) for _ in range(25)]
    decode = [Fake(decodes) for _ in range(25)]
    async with Rig(prefill, decode) as rig:
        page_state = await poll(rig)
        assert len(page_state["names"]) == 50
        assert page_state["interval_s"] == 50 / state.POLLS_PER_S


async def test_files_are_public_and_data_needs_an_admin_key():
    async with Rig(api_key=("client's",), admin_key=("operator's",)) as rig:
        for path in site.OPEN_PATHS:
            assert (await rig.client.get(path)).status_code == 200
        for key, status in (("", 401), ("client's", 403), ("operator's", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            response = await rig.client.get(site.STATE_PATH, headers=headers)
            assert response.status_code == status
        # A request without a key is refused and must not be shown.
        assert (await rig.complete()).status_code == 401
        (await rig.complete({"x-api-key": "client's"})).raise_for_status()
        response = await rig.client.get(site.STATE_PATH, headers=headers)
        assert [request["status"] for request in response.json()["requests"]] == ["200"]


async def test_queries_carry_the_upstream_api_key():
    async with Rig(upstream_api_key="servers'") as rig:
        await poll(rig)
        headers = rig.decode[0].stats_calls[0].headers
        assert headers["authorization"] == "Bearer servers'"
