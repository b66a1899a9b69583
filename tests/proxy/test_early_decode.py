"""Both legs of a request at once, before servers that say that they can do that."""

import asyncio
import time
from typing import Any

import pytest
from pydantic import SecretStr

from protocol.kv_offers import Offer, offer_of
from proxy.legs import upstreams
from tests.proxy.fakes import (
    LENT,
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


def fake(behave: Behave, name: str = "", **told: Any) -> Fake:
    own = {
        "engine_id": name or str(time.monotonic_ns()),
        "incarnation": "i",
        "subscribes": 1,
    }
    return Fake(
        behave, told={**own, "side_channel_host": "h", "side_channel_port": 5, **told}
    )


def early(prefill: list[Fake], decode: list[Fake], **settings: Any) -> Rig:
    return Rig(prefill, decode, cluster_secret=SecretStr(SECRET), **settings)


def params_of(call: Call) -> Any:
    return call.body["kv_transfer_params"]


def offer(call: Call) -> Offer | None:
    """What a decode server is offered, if anything; the proxy has signed it."""
    return offer_of(params_of(call), SECRET.encode(), time.time())


def refuses(call: Call) -> Any:
    error = {
        "code": "kv_params_rejected",
        "param": "kv_transfer_params.subscribe.signature",
    }
    return answers(400, {"error": error})(call)


async def test_the_decode_server_answers_while_the_prefill_server_has_not():
    p = Waits(prefills)

    async def reads(call: Call) -> None:
        await p.begun.wait()  # before it there is no KV
        await decodes(call)

    async with early([fake(p, "P")], [fake(reads)]) as rig:
        response = await rig.client.post("/v1/completions", json=BODY)
        assert (response.status_code, response.json()) == (200, {"text": "onetwo"})
        (to_p,), (to_d,) = rig.prefill[0].calls, rig.decode[0].calls
        told = offer(to_d)
        assert (told.engine_id, told.incarnation, told.host, told.port) == (
            "P",
            "i",
            "h",
            5,
        )
        assert told.transfer_id == to_p.body["kv_transfer_params"]["transfer_id"]
        own = {"seed": to_p.body["seed"], "kv_transfer_params": params_of(to_d)}
        assert to_d.body == BODY | own
        await until(
            lambda: bool(rig.prefill[0].releases)
        )  # what nobody comes for any more
        named = rig.prefill[0].releases[0].body["kv_transfer_params"]
        assert named["transfer_id"] == told.transfer_id
        await until(lambda: rig.in_flight() == 0)


@pytest.mark.parametrize("by_prefill", [True, False])
async def test_either_leg_s_refusal_ends_the_other_and_is_the_answer(by_prefill):
    """A decode server knows what a request for one token hides: how many the client wants."""
    refusing, other = Waits(fails(400, "invalid_request")), Waits()
    p, d = (refusing, other) if by_prefill else (other, refusing)
    async with early([fake(p)], [fake(d)]) as rig:
        asked = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await other.begun.wait()
        refusing.go.set()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            400,
            "invalid_request",
        )
        await other.left.wait()
        assert len(rig.prefill[0].calls) == len(rig.decode[0].calls) == 1
        await until(lambda: rig.in_flight() == 0)


async def test_a_prefill_server_that_is_lost_is_replaced_and_named_anew():
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
        told = [
            found.engine_id for call in rig.decode[0].calls if (found := offer(call))
        ]
        assert told == ["P0", "P1"]
        await until(lambda: rig.in_flight() == 0)


@pytest.mark.parametrize("doubted_s", [0.0, 1e6])
@pytest.mark.parametrize("refusal", [refuses, fails(502, "lease_gone")])
async def test_an_offer_of_no_use_is_followed_by_the_reference(
    refusal, doubted_s, monkeypatch
):
    """Who does not believe one is offered nothing until it restarts, or for a while."""
    monkeypatch.setattr(upstreams, "TRUST_COOLDOWN_S", doubted_s)
    d, other = (
        fake(lambda call: (refusal if offer(call) else decodes)(call)),
        fake(decodes),
    )
    async with early([fake(prefills)], [d, other], routing="round_robin") as rig:

        async def offers(num: int) -> list[int]:
            for _ in range(num):
                response = await rig.client.post("/v1/completions", json=BODY)
                assert response.json() == {"text": "onetwo"}
            return [
                sum(offer(call) is not None for call in each.calls)
                for each in (d, other)
            ]

        told, begun = await offers(9)
        assert (told, begun) == (1, 8) if refusal is refuses and doubted_s else told > 1
        d.told["incarnation"] = "j"
        while (await offers(1))[0] == told:
            pass


@pytest.mark.parametrize("fails", [drops, fails(503, "x"), fails(503, "engine_died")])
async def test_a_server_that_is_offered_nothing_goes_on_with_the_reference(fails):
    """Of another version, say, or the prefill server itself."""
    async with early(
        [fake(prefills)], [fake(fails), fake(decodes, subscribes=0)]
    ) as rig:
        response = await rig.client.post("/v1/completions", json=BODY)
        assert response.json() == {"text": "onetwo"}
        assert rig.decode[1].calls[0].body["kv_transfer_params"] == LENT


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ({"subscribes": 0}, {}),  # a server of another make, or version
        ({"side_channel_port": None}, {}),
        ({}, {"prompt_logprobs": 1}),
        ({}, {"echo": True, "logprobs": 1}),
    ],
    ids=str,
)
async def test_the_old_order_serves_what_cannot_be_begun_early(told, asked):
    async with early([fake(prefills, **told)], [fake(decodes, **told)]) as rig:
        response = await rig.client.post("/v1/completions", json=BODY | asked)
        assert response.json() == {"text": "onetwo"}
        (to_d,) = rig.decode[0].calls
        assert to_d.body["kv_transfer_params"] == LENT


def fails_in_turn(*outcomes: Behave) -> list[Fake]:
    """As many decode servers, the first one asked of which behaves as the first, and so on."""
    turns = iter([*outcomes, *[fails(500, "one_too_many")] * 9])
    return [
        fake(lambda call: next(turns)(call), str(at)) for at in range(len(outcomes) + 1)
    ]


@pytest.mark.parametrize(
    ("outcomes", "max_resumes", "offers", "told"),
    [
        ([drops, decodes], 3, [1, 1], "onetwo"),  # another one is given the same offer
        (
            [drops, drops],
            1,
            [1, 1],
            "decode_server_lost",
        ),  # no other is left that may have it
        ([drops], 0, [1], "decode_server_lost"),
        ([fails(502, "x"), decodes], 3, [1, 0], "onetwo"),
        ([fails(502, "x")], 0, [1], "x"),
        ([drops, fails(502, "x")], 1, [1, 1], "x"),
        ([drops, fails(502, "x"), drops], 2, [1, 1, 0], "decode_server_lost"),
        ([drops, fails(502, "x"), drops, decodes], 3, [1, 1, 0, 0], "onetwo"),
    ],
)
async def test_so_many_decode_servers_are_given_a_request(
    outcomes, max_resumes, offers, told
):
    """At most 1 + --max-resumes, by an offer or after it; then P has its KV back."""
    p = fake(prefills)
    async with early([p], fails_in_turn(*outcomes), max_resumes=max_resumes) as rig:
        said = (await rig.client.post("/v1/completions", json=BODY)).json()
        assert told in (said.get("text"), said.get("error", {}).get("code"))
        calls = [call for d in rig.decode for call in d.calls]
        early_ones = [offer(call) is not None for call in calls]
        assert sorted(early_ones) == sorted(map(bool, offers))
        assert len({found.transfer_id for call in calls if (found := offer(call))}) == 1
        await until(lambda: bool(p.releases) == (told != "onetwo"))
        await until(lambda: rig.in_flight() == 0)


async def test_both_legs_end_well_and_nothing_is_given_back():
    p = Waits(prefills)

    async def streams(call: Call) -> None:
        p.go.set()
        await decodes(call)

    async with early([fake(p)], [fake(streams)]) as rig:
        response = await rig.client.post(
            "/v1/completions", json=BODY | {"stream": True}
        )
        assert response.text.endswith("data: [DONE]\n\n")
        await until(lambda: rig.in_flight() == 0)
        assert not rig.prefill[0].releases


@pytest.mark.parametrize("names", ["", "1"])
async def test_no_other_prefill_server_works_for_an_answer_that_has_begun(names):
    """Nor does the request count as one that was served without any."""
    p, d = Waits(drops), Waits(decodes, sends=b'data: {"text": "one"}\n\n')
    others = [fake(prefills, name) for name in names]
    async with early([fake(p, "P0"), *others], [fake(d)]) as rig:
        asked = rig.client.stream(
            "POST", "/v1/completions", json=BODY | {"stream": True}
        )
        async with asked as response:
            lines = response.aiter_lines()
            assert "one" in await anext(lines)
            p.go.set()
            await until(lambda: rig.in_flight() == 1)
        assert sum(len(one.calls) for one in rig.prefill) == 1
        await until(lambda: rig.in_flight() == 0)
        assert rig.decode_only("lost") == 0
        assert rig.metric("baton_proxy_requests", path="pd", reason="routed") == 1
