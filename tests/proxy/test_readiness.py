"""GET /ready of the proxy: which servers it waits for, and when the wait ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protocol.settings.settings import ProxySettings
from proxy.discovery.readiness import Readiness
from proxy.health import HealthReport
from proxy.membership import LISTED, Fleet, Kind
from tests.proxy.fakes import Fake, Rig, decodes, prefills, until

MODEL_A = {"model": "a", "kv_digest": "1.1.1"}
MODEL_B = {"model": "b", "kv_digest": "2.1.1"}
NO_PREFILL = "no prefill server is ready"


async def probe(rig: Rig) -> tuple[int, list[str]]:
    response = await rig.client.get("/ready")
    return response.status_code, response.json()["missing"]


async def wait_for_polls(rig: Rig) -> None:
    """Wait until the proxy has checked the health of every server once more."""
    num_polls = {fake: fake.polls for fake in (*rig.prefill, *rig.decode)}
    await until(
        lambda: all(fake.polls > before + 1 for fake, before in num_polls.items())
    )


@pytest.mark.parametrize("disaggregate", ["always", "auto"])
async def test_ready_waits_for_the_prefill_server_and_then_requests_are_disaggregated(
    disaggregate,
):
    late_prefill = Fake(prefills, ready=False)
    async with Rig([late_prefill], disaggregate=disaggregate) as rig:
        await wait_for_polls(rig)
        assert await probe(rig) == (503, [NO_PREFILL])
        # A decode server can answer alone.
        assert (await rig.complete()).status_code == 200
        assert late_prefill.calls == []
        late_prefill.ready = True
        await until(lambda: rig.is_ready(0))
        assert await probe(rig) == (200, [])
        if disaggregate == "always":
            await rig.complete()
            assert len(late_prefill.calls) == 1


async def test_proxy_stays_ready_when_every_prefill_server_is_lost_later():
    async with Rig() as rig:
        rig.prefill[0].ready = False
        await until(lambda: not rig.is_ready(0))
        assert await probe(rig) == (200, [NO_PREFILL])
        rig.decode[0].ready = False
        await until(lambda: not rig.is_ready(1))
        assert (await probe(rig))[0] == 503


async def test_proxy_is_ready_if_the_prefill_server_is_lost_before_the_first_probe():
    async with Rig() as rig:
        await rig.prefill[0].stop()
        await until(lambda: not rig.is_ready(0))
        assert await probe(rig) == (200, [NO_PREFILL])


@pytest.mark.parametrize(
    "settings", [{"disaggregate": "never"}, {"prefill_wait_s": 0.0}]
)
async def test_ready_does_not_wait_for_prefill_servers_if_configured_so(settings):
    async with Rig([Fake(prefills, ready=False)], **settings) as rig:
        assert (await probe(rig))[0] == 200


async def test_the_wait_for_a_prefill_server_is_bounded(caplog):
    async with Rig([Fake(prefills, ready=False)], prefill_wait_s=0.2) as rig:
        while (await probe(rig))[0] != 200:
            await wait_for_polls(rig)
        assert f"{NO_PREFILL} within 0.2 s (--prefill-wait-s)" in caplog.text


async def test_each_model_waits_for_a_prefill_server_of_this_model():
    prefill = [
        Fake(prefills, details=MODEL_A),
        Fake(prefills, details=MODEL_B, ready=False),
    ]
    decode = [Fake(decodes, details=MODEL_A), Fake(decodes, details=MODEL_B)]
    async with Rig(prefill, decode) as rig:
        await wait_for_polls(rig)
        assert await probe(rig) == (503, ['no prefill server of model "b" is ready'])
        prefill[1].ready = True
        await until(lambda: rig.is_ready(1))
        assert await probe(rig) == (200, [])


async def test_model_without_a_prefill_server_waits_for_none():
    decode = [Fake(decodes, details=MODEL_A), Fake(decodes, details=MODEL_B)]
    async with Rig([Fake(prefills, details=MODEL_A)], decode) as rig:
        assert await probe(rig) == (200, [])


async def test_report_says_if_no_decode_server_can_read_the_kv():
    other = {**MODEL_A, "kv_digest": "1.2.1"}
    async with Rig(
        [Fake(prefills, details=other)], [Fake(decodes, details=MODEL_A)]
    ) as rig:
        missing = "no prefill server has KV that a ready decode server can read"
        assert await probe(rig) == (503, [missing])


async def test_ready_does_not_wait_for_a_drained_prefill_server():
    async with Rig([Fake(prefills, ready=False)]) as rig:
        assert (await probe(rig))[0] == 503
        drained = await rig.client.post(
            "/admin/members/drain", json={"server": "prefill-0"}
        )
        assert drained.status_code == 200
        assert (await probe(rig))[0] == 200


@asynccontextmanager
async def serving(*fakes: Fake) -> AsyncIterator[None]:
    """Run servers that are not in the options of any proxy."""
    for fake in fakes:
        fake.start()
    try:
        yield
    finally:
        await asyncio.gather(*(fake.stop() for fake in fakes))


async def test_ready_waits_for_the_servers_of_a_file(tmp_path):
    late_prefill = Fake(prefills, ready=False)
    decode = Fake(decodes)
    file = tmp_path / "servers.yml"
    file.write_text(f"prefill: [{late_prefill.url}]\ndecode: [{decode.url}]\n")
    async with (
        serving(late_prefill, decode),
        Rig([], [], servers_file=str(file), fixed_series=False) as rig,
    ):
        await until(lambda: len(rig.app.fleet.servers) == 2 and rig.is_ready(1))
        assert await probe(rig) == (503, [NO_PREFILL])
        late_prefill.ready = True
        await until(lambda: rig.is_ready(0))
        assert (await probe(rig))[0] == 200


async def join(rig: Rig, prefill: Fake) -> None:
    body = {"role": "prefill", "url": prefill.url}
    assert (await rig.client.post("/admin/members", json=body)).status_code == 200


async def test_explicit_wait_includes_servers_that_join_later():
    late_prefill = Fake(prefills)
    async with (
        serving(late_prefill),
        Rig([], fixed_series=False, prefill_wait_s=600.0) as rig,
    ):
        assert await probe(rig) == (503, [NO_PREFILL])
        await join(rig, late_prefill)
        await until(lambda: rig.is_ready(0) and rig.is_ready(1))
        assert await probe(rig) == (200, [])


async def test_prefill_server_that_joins_a_ready_proxy_changes_nothing():
    late_prefill = Fake(prefills, ready=False)
    async with serving(late_prefill), Rig([], fixed_series=False) as rig:
        assert (await probe(rig))[0] == 200, (
            "not ready although no prefill server is configured"
        )
        await join(rig, late_prefill)
        assert (await probe(rig))[0] == 200


def test_ready_waits_for_a_dns_name_without_addresses():
    settings = ProxySettings(
        prefill=("dns+http://p.example:1",), decode=("http://d:1",)
    )
    fleet = Fleet()
    readiness = Readiness(fleet, settings, clock=lambda: 0.0)
    decode = fleet.join(Kind.DECODE, "http://d:1", LISTED)
    fleet.polled(decode, HealthReport(True), 1.0)
    assert readiness.report() == (False, [NO_PREFILL])
    prefill = fleet.join(Kind.PREFILL, "http://10.0.0.1:1", LISTED)
    fleet.polled(prefill, HealthReport(True), 1.0)
    assert readiness.report() == (True, [])


async def test_probe_of_a_proxy_with_keys_reports_no_details():
    async with Rig([Fake(prefills, ready=False)], api_key=("a client's key",)) as rig:
        response = await rig.client.get("/ready")
        assert response.status_code == 503
        assert "missing" not in response.json()
