"""Both legs of a request start together if both servers support early decode legs."""

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


def fake(behave: Behave, name: str = "", **details: Any) -> Fake:
    """Return a server that supports early decode legs, unless `details` change that."""
    all_details = {
        "engine_id": name or str(time.monotonic_ns()),
        "incarnation": "i",
        "subscribes": 1,
        "side_channel_host": "h",
        "side_channel_port": 5,
        **details,
    }
    return Fake(behave, details=all_details)


def early_rig(prefill: list[Fake], decode: list[Fake], **settings: Any) -> Rig:
    return Rig(prefill, decode, cluster_secret=SecretStr(SECRET), **settings)


def params_of(call: Call) -> Any:
    return call.body["kv_transfer_params"]


def offer(call: Call) -> Offer | None:
    """Return the signed offer in a decode leg, if there is one."""
    return offer_of(params_of(call), SECRET.encode(), time.time())


def refuses(call: Call) -> Any:
    error = {
        "code": "kv_params_rejected",
        "param": "kv_transfer_params.subscribe.signature",
    }
    return answers(400, {"error": error})(call)


async def test_decode_server_may_answer_before_the_prefill_server():
    p = Waits(prefills)

    async def reads(call: Call) -> None:
        await p.begun.wait()  # there is no KV to pull before the prefill begins
        await decodes(call)

    async with early_rig([fake(p, "P")], [fake(reads)]) as rig:
        response = await rig.client.post("/v1/completions", json=BODY)
        assert (response.status_code, response.json()) == (200, {"text": "onetwo"})
        (prefill_call,) = rig.prefill[0].calls
        (decode_call,) = rig.decode[0].calls
        offered = offer(decode_call)
        assert (offered.engine_id, offered.incarnation) == ("P", "i")
        assert (offered.host, offered.port) == ("h", 5)
        assert offered.transfer_id == params_of(prefill_call)["transfer_id"]
        added = {
            "seed": prefill_call.body["seed"],
            "kv_transfer_params": params_of(decode_call),
        }
        assert decode_call.body == BODY | added
        # The KV is released, because no server will pull it any more.
        await until(lambda: bool(rig.prefill[0].releases))
        (release,) = rig.prefill[0].releases
        assert params_of(release)["transfer_id"] == offered.transfer_id
        await until(lambda: rig.in_flight() == 0)


@pytest.mark.parametrize("by_prefill", [True, False])
async def test_refusal_of_one_leg_is_the_answer_and_ends_the_other_leg(by_prefill):
    """The legs differ, so either may be refused: only the decode leg has the client's
    token limit, for example.
    """
    refusing = Waits(fails(400, "invalid_request"))
    other = Waits()
    prefill = refusing if by_prefill else other
    decode = other if by_prefill else refusing
    async with early_rig([fake(prefill)], [fake(decode)]) as rig:
        request = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await other.begun.wait()
        refusing.go.set()
        answer = await request
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_request"
        await other.left.wait()
        assert len(rig.prefill[0].calls) == len(rig.decode[0].calls) == 1
        await until(lambda: rig.in_flight() == 0)


async def test_new_decode_leg_names_the_server_that_replaces_a_lost_prefill_server():
    lost = Waits(drops)
    first = Waits()
    behaviours = iter([first, decodes])
    prefill = [fake(lost, "P0"), fake(hangs, "P1")]
    decode = fake(lambda call: next(behaviours)(call))
    async with early_rig(prefill, [decode]) as rig:
        request = asyncio.create_task(rig.client.post("/v1/completions", json=BODY))
        await first.begun.wait()
        lost.go.set()
        assert (await request).json() == {"text": "onetwo"}
        await first.left.wait()
        offers = [offer(call) for call in decode.calls]
        assert [offered.engine_id for offered in offers if offered] == ["P0", "P1"]
        await until(lambda: rig.in_flight() == 0)


@pytest.mark.parametrize("cooldown_s", [0.0, 1e6])
@pytest.mark.parametrize("refusal", [refuses, fails(502, "lease_gone")])
async def test_refused_offer_is_followed_by_the_prefill_servers_params(
    refusal, cooldown_s, monkeypatch
):
    """A server that rejected a signature gets no offers until a cooldown has passed or
    the server has restarted.
    """
    monkeypatch.setattr(upstreams, "TRUST_COOLDOWN_S", cooldown_s)

    async def refuses_offers(call: Call) -> None:
        if offer(call):
            await refusal(call)
        else:
            await decodes(call)

    refusing = fake(refuses_offers)
    other = fake(decodes)
    decode = [refusing, other]
    async with early_rig([fake(prefills)], decode, routing="round_robin") as rig:

        async def count_offers(num_requests: int) -> list[int]:
            for _ in range(num_requests):
                response = await rig.client.post("/v1/completions", json=BODY)
                assert response.json() == {"text": "onetwo"}
            return [
                sum(offer(call) is not None for call in server.calls)
                for server in decode
            ]

        num_refused, num_taken = await count_offers(9)
        if refusal is refuses and cooldown_s:
            assert (num_refused, num_taken) == (1, 8)
        else:
            assert num_refused > 1
        refusing.details["incarnation"] = "j"
        while (await count_offers(1))[0] == num_refused:
            pass


@pytest.mark.parametrize("failure", [drops, fails(503, "x"), fails(503, "engine_died")])
async def test_server_without_early_decode_gets_the_prefill_servers_params(failure):
    """For example, a server of another version does not support early decode legs."""
    async with early_rig(
        [fake(prefills)], [fake(failure), fake(decodes, subscribes=0)]
    ) as rig:
        response = await rig.client.post("/v1/completions", json=BODY)
        assert response.json() == {"text": "onetwo"}
        assert rig.decode[1].calls[0].body["kv_transfer_params"] == LENT


@pytest.mark.parametrize(
    ("details", "body_fields"),
    [
        ({"subscribes": 0}, {}),  # a server of another version
        ({"side_channel_port": None}, {}),
        ({}, {"prompt_logprobs": 1}),
        ({}, {"echo": True, "logprobs": 1}),
    ],
    ids=str,
)
async def test_decode_leg_follows_the_prefill_leg_if_it_cannot_start_early(
    details, body_fields
):
    async with early_rig(
        [fake(prefills, **details)], [fake(decodes, **details)]
    ) as rig:
        response = await rig.client.post("/v1/completions", json=BODY | body_fields)
        assert response.json() == {"text": "onetwo"}
        (decode_call,) = rig.decode[0].calls
        assert params_of(decode_call) == LENT


def decode_servers_sharing_outcomes(*outcomes: Behave) -> list[Fake]:
    """Return decode servers that share a list of outcomes.

    The n-th request, to any of the servers, gets the n-th outcome. There is one server
    more than there are outcomes.
    """
    remaining_outcomes = iter([*outcomes, *[fails(500, "one_too_many")] * 9])
    num_servers = len(outcomes) + 1
    return [
        fake(lambda call: next(remaining_outcomes)(call), str(index))
        for index in range(num_servers)
    ]


@pytest.mark.parametrize(
    ("outcomes", "max_resumes", "offers", "answer"),
    [
        # The second server gets the same offer.
        ([drops, decodes], 3, [1, 1], "onetwo"),
        # The limit on the number of servers is reached.
        ([drops, drops], 1, [1, 1], "decode_server_lost"),
        ([drops], 0, [1], "decode_server_lost"),
        ([fails(502, "x"), decodes], 3, [1, 0], "onetwo"),
        ([fails(502, "x")], 0, [1], "x"),
        ([drops, fails(502, "x")], 1, [1, 1], "x"),
        ([drops, fails(502, "x"), drops], 2, [1, 1, 0], "decode_server_lost"),
        ([drops, fails(502, "x"), drops, decodes], 3, [1, 1, 0, 0], "onetwo"),
    ],
)
async def test_number_of_decode_servers_that_get_a_request_is_limited(
    outcomes, max_resumes, offers, answer
):
    """At most 1 + --max-resumes servers get the request, with or without an offer.

    If all fail, the prefill server's KV is released.
    """
    prefill = fake(prefills)
    decode = decode_servers_sharing_outcomes(*outcomes)
    async with early_rig([prefill], decode, max_resumes=max_resumes) as rig:
        body = (await rig.client.post("/v1/completions", json=BODY)).json()
        assert answer in (body.get("text"), body.get("error", {}).get("code"))
        calls = [call for server in rig.decode for call in server.calls]
        received = [offer(call) for call in calls]
        has_offer = [offered is not None for offered in received]
        assert sorted(has_offer) == sorted(map(bool, offers))
        assert len({offered.transfer_id for offered in received if offered}) == 1
        await until(lambda: bool(prefill.releases) == (answer != "onetwo"))
        await until(lambda: rig.in_flight() == 0)


async def test_proxy_releases_no_kv_if_both_legs_succeed():
    p = Waits(prefills)

    async def streams(call: Call) -> None:
        p.go.set()
        await decodes(call)

    async with early_rig([fake(p)], [fake(streams)]) as rig:
        response = await rig.client.post(
            "/v1/completions", json=BODY | {"stream": True}
        )
        assert response.text.endswith("data: [DONE]\n\n")
        await until(lambda: rig.in_flight() == 0)
        assert not rig.prefill[0].releases


@pytest.mark.parametrize("names", ["", "1"])
async def test_prefill_is_not_repeated_for_an_answer_that_has_begun(names):
    """The prefill server is lost after the first event of the answer. The request must
    not be counted as decode-only.
    """
    lost = Waits(drops)
    decode = Waits(decodes, sends=b'data: {"text": "one"}\n\n')
    others = [fake(prefills, name) for name in names]
    async with early_rig([fake(lost, "P0"), *others], [fake(decode)]) as rig:
        request = rig.client.stream(
            "POST", "/v1/completions", json=BODY | {"stream": True}
        )
        async with request as response:
            lines = response.aiter_lines()
            assert "one" in await anext(lines)
            lost.go.set()
            await until(lambda: rig.in_flight() == 1)
        assert sum(len(server.calls) for server in rig.prefill) == 1
        await until(lambda: rig.in_flight() == 0)
        assert rig.decode_only("lost") == 0
        assert rig.metric("baton_proxy_requests", path="pd", reason="routed") == 1
