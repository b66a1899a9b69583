"""Both legs of a request at once, before servers that say that they can do that."""

import asyncio
from typing import Any

import pytest
from pydantic import SecretStr

from protocol import kv_params
from tests.proxy.fakes import (
    Behave,
    Call,
    Fake,
    Rig,
    Waits,
    answers,
    decodes,
    drops,
    fails,
    hangs,
    prefills,
    until,
)

SECRET = "the secret of these servers"
BODY = {"prompt": "p", "max_tokens": 7, "temperature": 0}


def fake(behave: Behave, name: str = "engine", **told: Any) -> Fake:
    channel = {"engine_id": name, "incarnation": "i", "side_channel_host": "h"}
    return Fake(behave, told={**channel, "side_channel_port": 5, "subscribes": 1, **told})


def early(prefill: list[Fake], decode: list[Fake], **settings: Any) -> Rig:
    return Rig(prefill, decode, cluster_secret=SecretStr(SECRET), **settings)


def offer(call: Call) -> kv_params.Offer:
    """What a decode server is offered; the proxy has signed it."""
    found = kv_params.parse_offer(call.body["kv_transfer_params"])
    found.verify(SECRET.encode())
    return found


def refuses(call: Call) -> Any:
    error = {"code": "kv_params_rejected", "param": "kv_transfer_params.subscribe.signature"}
    return answers(400, {"error": error})(call)


async def test_the_decode_server_answers_while_the_prefill_server_has_not() -> None:
    p = Waits(prefills)
    async with early([fake(p, "P")], [fake(decodes)]) as rig:
        response = await rig.client.post("/v1/completions", json=BODY)
        assert (response.status_code, response.json()) == (200, {"text": "onetwo"})
        (to_p,), (to_d,) = rig.prefill[0].calls, rig.decode[0].calls
        told = offer(to_d)
        assert (told.engine_id, told.incarnation, told.host, told.port) == ("P", "i", "h", 5)
        assert told.transfer_id == to_p.body["kv_transfer_params"]["transfer_id"]
        assert {
            k: v for k, v in to_d.body.items() if k not in ("seed", "kv_transfer_params")
        } == BODY
        assert to_d.body["seed"] == to_p.body["seed"]
        await until(lambda: bool(rig.prefill[0].releases))  # what nobody comes for any more
        named = rig.prefill[0].releases[0].body["kv_transfer_params"]
        assert named["transfer_id"] == told.transfer_id
        await until(lambda: rig.in_flight() == 0)


async def test_a_refused_prefill_ends_the_decode_leg_and_is_the_answer() -> None:
    p, d = Waits(fails(400, "no_such_model")), Waits()
    async with early([fake(p)], [fake(d)]) as rig:
        asked = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await d.begun.wait()
        p.go.set()
        assert (await asked).json()["error"]["code"] == "no_such_model"
        await d.left.wait()
        assert len(rig.decode[0].calls) == 1
        await until(lambda: rig.in_flight() == 0)


async def test_a_prefill_server_that_is_lost_is_replaced_and_named_anew() -> None:
    p, (first, second) = Waits(drops), (Waits(), decodes)
    behaviours = iter([first, second])
    async with early(
        [fake(p, "P0"), fake(hangs, "P1")], [fake(lambda call: next(behaviours)(call))]
    ) as rig:
        asked = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await first.begun.wait()
        p.go.set()
        assert (await asked).json() == {"text": "onetwo"}
        await first.left.wait()
        assert [offer(call).engine_id for call in rig.decode[0].calls] == ["P0", "P1"]
        await until(lambda: rig.in_flight() == 0)


@pytest.mark.parametrize("refusal", [refuses, fails(502, "lease_gone")])
async def test_an_offer_of_no_use_is_followed_by_the_reference(refusal: Behave) -> None:
    """A decode server of another secret is offered nothing more, one that failed is."""
    behaviours = iter([refusal, decodes, decodes])
    d = fake(lambda call: next(behaviours)(call))
    async with early([fake(prefills)], [d]) as rig:
        for _ in range(2):
            response = await rig.client.post("/v1/completions", json=BODY)
            assert response.json() == {"text": "onetwo"}
        early_ones = [kv_params.is_offer(call.body["kv_transfer_params"]) for call in d.calls]
        assert early_ones == [True, False, refusal is not refuses]
