"""Series are exposed before the first event that they count."""

from protocol.metrics import SPECS
from tests.proxy.fakes import Call, Drop, Fake, Rig, decodes, prefills


def series(rig: Rig) -> set[str]:
    """The names and labels of what counts with labels."""
    lines = rig.app.metrics.expose().decode().splitlines()
    counting = [spec.name for spec in SPECS.values() if spec.origin == "proxy" and spec.labels]
    return {line.rsplit(" ", 1)[0] for line in lines if line.startswith(tuple(counting))}


async def refuses(call: Call) -> None:
    await call.answer(400, {"error": {"code": "invalid_request"}})


async def is_full(call: Call) -> None:
    await call.answer(503, {"error": {"code": "overloaded"}})


async def fails(call: Call) -> None:
    await call.answer(500, {"error": {"code": "internal_error"}})


async def drops(call: Call) -> None:
    raise Drop


async def says_nothing_of_kv(call: Call) -> None:
    await call.answer(200, {"choices": []})


async def test_no_request_adds_a_series() -> None:
    for behaviour in (prefills, refuses, is_full, fails, drops, says_nothing_of_kv):
        async with Rig(prefill=[Fake(behaviour)]) as rig:
            before = series(rig)
            await rig.complete()
            await rig.complete(max_tokens=0, echo=True)
            await rig.client.post("/v1/completions", content=b"{")
            assert series(rig) == before, behaviour
        async with Rig(decode=[Fake(behaviour)]) as rig:
            before = series(rig)
            await rig.complete()
            await rig.complete(stream=True)
            assert series(rig) == before, behaviour


async def test_no_request_that_servers_have_no_room_for_adds_a_series() -> None:
    async def is_too_long(call: Call) -> None:
        await call.answer(400, {"error": {"code": "context_length_exceeded"}})

    async def has_too_long_a_body(call: Call) -> None:
        await call.answer(413, {"error": {"code": "payload_too_large"}})

    small = Fake(is_too_long, max_model_len=100, max_num_seqs=4)
    async with Rig([small], [Fake(decodes, max_model_len=300, max_num_seqs=8)]) as rig:
        before = series(rig)
        for reason, n in (("prefill_context", 1), ("prefill_choices", 5), ("decode_choices", 9)):
            await rig.complete(n=n)
            assert rig.decode_only(reason) == 1
        small.behave = has_too_long_a_body
        await rig.complete()
        assert rig.decode_only("prefill_body") == 1
        assert series(rig) == before


async def test_a_fleet_that_was_never_seen_has_its_series() -> None:
    async with Rig(prefill=[], decode=[Fake(prefills, ready=False)]) as rig:
        assert {
            'baton_proxy_upstream_ready{role="decode",server="decode-0"}',
            'baton_proxy_upstream_in_flight{role="decode",server="decode-0"}',
            'baton_proxy_upstream_failures_total{leg="prefill",reason="unreachable"}',
            'baton_proxy_requests_total{path="decode_only",reason="no_prefill_server"}',
            'baton_proxy_responses_total{status="503"}',
            'baton_proxy_retries_total{leg="decode"}',
        } <= series(rig)
        before = series(rig)
        assert (await rig.complete()).status_code == 503
        assert series(rig) == before
