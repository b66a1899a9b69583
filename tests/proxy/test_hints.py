"""Who is told of whom: the server that computes a prompt, of one that has more of it."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from protocol.kv_offers import hint_of
from protocol.messages import KVHint
from proxy.health import Health, SideChannel
from proxy.knowledge import Knowledge
from proxy.legs.request_profile import ask_of
from proxy.membership import Kind, Server, hint
from proxy.placement import Ask
from tests.proxy.fakes import Fake, Rig, answers, decodes, prefills

SECRET = "a secret of the cluster, 32 bytes"
TURN_1 = [{"role": "user", "content": "some words that many have in common " * 60}]
TURN_2 = [
    *TURN_1,
    {"role": "assistant", "content": "an answer " * 50},
    {"role": "user"},
]


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


def ask(messages: Any, answer: int = 400) -> Ask:
    return ask_of(b"m", json.dumps(messages, separators=(",", ":")).encode(), answer)


def server(kind: Kind, index: int, **health: Any) -> Server:
    channel = SideChannel(f"engine {kind.value}{index}", "1", "", 7000 + index)
    told = {
        "ready": True,
        "kv_digest": "m.f32",
        "side_channel": channel,
        "subscribes": True,
    }
    return Server(
        kind, f"http://host-{kind.value}{index}:1", index, Health(**{**told, **health})
    )


class Fleet:
    """Two prefill and two decode servers, of which the first ones had turn 1."""

    def __init__(self, **health: Any) -> None:
        self.clock = Clock()
        self.knowledge = Knowledge("auto", "always", clock=self.clock)
        self.knowledge.pulls = True
        self.p, self.q = (server(Kind.PREFILL, index) for index in range(2))
        self.d, self.e = (server(Kind.DECODE, index) for index in range(2))
        for each in (self.p, self.q, self.d, self.e):
            self.knowledge.lends(each, True)
        legs = [(self.p, True, False), (self.d, False, True)]
        for had, computes, generates in legs:
            work = self.knowledge.begin(
                had, ask(TURN_1), computes=computes, generates=generates
            )
            self.clock.now += 1.0
            self.knowledge.answered(work)
            self.knowledge.ended(work)

    def named(self, reader: Server, messages: Any = TURN_2) -> str | None:
        found = hint(reader, self.knowledge.lenders(reader, ask(messages)))
        return found.engine_id if found else None


def test_whoever_lacks_something_is_told_of_who_has_it():
    fleet = Fleet()
    assert fleet.named(fleet.p) == "engine decode0", "which has the answer"
    assert fleet.named(fleet.q) == fleet.named(fleet.e) == "engine decode0"
    assert fleet.named(fleet.d) is None, "nobody has more"
    assert fleet.named(fleet.p, TURN_1) is None
    branch = [{**TURN_1[0], "content": TURN_1[0]["content"] + "and more"}, *TURN_2[1:]]
    assert fleet.named(fleet.p, branch) is None, "it is no answer to that"
    assert fleet.named(fleet.q, branch) in ("engine prefill0", "engine decode0")
    assert fleet.named(fleet.q, [{"content": "new"}]) is None
    found = hint(fleet.q, fleet.knowledge.lenders(fleet.q, ask(TURN_2)))
    assert found is not None and (found.host, found.port) == ("host-decode0", 7000)


def test_what_a_server_is_yet_to_compute_it_neither_lends_nor_has():
    fleet, prompt = Fleet(), [{"role": "user", "content": "other words " * 400}]
    knowledge, leg = fleet.knowledge, {"computes": True, "generates": False}
    computed = knowledge.begin(fleet.p, ask(prompt), **leg)
    assert fleet.named(fleet.q, prompt) is None
    knowledge.answered(computed)
    assert fleet.named(fleet.q, prompt) == "engine prefill0"
    pulling = knowledge.begin(fleet.q, ask(prompt), **leg)
    assert fleet.named(fleet.q, prompt) == "engine prefill0", (
        "it is on its way, for another prompt"
    )
    knowledge.answered(pulling)
    assert fleet.named(fleet.q, prompt) is None
    for busy, idle in ((fleet.p, "engine prefill1"), (fleet.q, "engine prefill0")):
        work = knowledge.begin(busy, ask([{"content": "long " * 9000}]), **leg)
        assert fleet.named(fleet.e, prompt) == idle, "who answers soonest"
        knowledge.ended(work)
    coming = knowledge.begin(fleet.d, ask(prompt), computes=False, generates=True)
    assert fleet.named(fleet.d, prompt) == "engine prefill0"
    knowledge.answered(coming)
    assert fleet.named(fleet.d, prompt) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ready": False}, "engine prefill0"),
        ({"open_until": 5.0}, "engine prefill0"),
        ({"kv_digest": "m.bf16"}, "engine prefill0"),
        ({"kv_digest": ""}, "engine prefill0"),
        ({"side_channel": None}, "engine prefill0"),
        ({}, "engine decode0"),
    ],
)
def test_nobody_is_told_of_a_server_that_cannot_lend(change, named):
    fleet = Fleet()
    fleet.d.health = replace(fleet.d.health, **change)
    assert fleet.named(fleet.q) == named


@pytest.mark.parametrize("change", [{"is_foreign": True}, {"subscribes": False}])
def test_foreign_servers_are_told_nothing(change):
    fleet = Fleet()
    fleet.q.health = replace(fleet.q.health, **change)
    assert fleet.named(fleet.q) is None


def test_nobody_is_told_of_servers_that_have_forgotten_or_while_there_is_no_secret():
    fleet = Fleet()
    fleet.knowledge.forget(fleet.d)
    assert fleet.named(fleet.q) == "engine prefill0"
    fleet.knowledge.left(fleet.p)
    assert fleet.named(fleet.q) is None
    fleet = Fleet()
    fleet.knowledge.pulls = False
    assert fleet.named(fleet.q) is None


def test_what_a_server_pulls_does_not_keep_it_busy():
    waits = []
    for lends in (True, False):
        knowledge, ask = (
            Knowledge("auto", "auto", clock=lambda: 1.0),
            ask_of(b"", b"x" * 80_000, 9),
        )
        knowledge.pulls = True
        knowledge.lends("a", lends)
        knowledge.answered(knowledge.begin("a", ask, computes=True, generates=False))
        knowledge.begin("b", ask, computes=True, generates=False)
        waits.append(knowledge.wait_s("b"))
    assert waits[0] < 0.5 * waits[1]


def test_the_decode_server_of_a_conversation_appends_the_new_tokens_itself():
    fleet = Fleet()
    knowledge, turn_2 = Knowledge("auto", "auto", clock=fleet.clock), ask(TURN_2)
    work = knowledge.begin("d", ask(TURN_1), computes=False, generates=True)
    fleet.clock.now += 1.0
    knowledge.answered(work)
    knowledge.ended(work)
    assert knowledge.goes_alone(turn_2, ["p"], ["d", "e"])
    assert knowledge.first(["e", "d"], turn_2, computes=True, generates=True) == "d"


# -- over HTTP


def fakes(count: int, behave: Any, kind: str) -> list[Fake]:
    about = {
        "subscribes": 1,
        "incarnation": "1",
        "side_channel_host": "",
        "side_channel_port": 9,
    }
    about |= {"kv_digest": "m.f32"}
    return [
        Fake(behave, told={**about, "engine_id": f"{kind}{at}"}) for at in range(count)
    ]


def told(fake: Fake) -> KVHint | None:
    params = fake.calls[-1].body.get("kv_transfer_params")
    return hint_of(params, SECRET.encode(), time.time())


async def turns(rig: Rig, count: int) -> None:
    for _ in range(count):
        own = {"hint": {"host": "evil"}}
        answer = await rig.complete(prompt=list(range(1000)), kv_transfer_params=own)
        assert answer.status_code == 200


async def test_the_leg_that_computes_carries_a_hint_which_servers_believe():
    options = {"routing": "round_robin", "cluster_secret": SECRET}
    async with Rig(fakes(2, prefills, "p"), fakes(2, decodes, "d"), **options) as rig:
        await turns(rig, 2)
        assert told(rig.prefill[0]) is None, "the first of all: nobody has it"
        found = told(rig.prefill[1])
        assert found is not None and found.engine_id in ("p0", "d0")
        assert (found.host, found.port) == ("127.0.0.1", 9)
        assert rig.prefill[1].calls[0].body["kv_transfer_params"]["do_remote_decode"]
        assert [told(each) for each in rig.decode] == [None, None], (
            "they compute nothing"
        )
        assert rig.metric("baton_proxy_hints", leg="prefill") == 1
    options["disaggregate"] = "never"
    async with Rig(fakes(1, prefills, "p"), fakes(2, decodes, "d"), **options) as rig:
        await turns(rig, 2)
        found = told(rig.decode[1])
        assert found is not None and found.engine_id == "d0"
        assert list(rig.decode[1].calls[0].body["kv_transfer_params"]) == ["hint"]
        assert rig.metric("baton_proxy_hints", leg="decode") == 1


@pytest.mark.parametrize(("prefix_blocks", "refused"), [(0, 0), (1000, 1)])
async def test_a_hint_that_is_not_believed_costs_one_more_request(
    prefix_blocks, refused
):
    wrong = {
        "error": {
            "code": "kv_params_rejected",
            "param": "kv_transfer_params.hint.signature",
        }
    }

    async def behave(call: Any) -> None:
        is_hinted = "hint" in (call.body.get("kv_transfer_params") or {})
        await (answers(400, wrong) if is_hinted else decodes)(call)

    options = {
        "routing": "round_robin",
        "disaggregate": "never",
        "cluster_secret": SECRET,
    }
    options["prefix_blocks"] = prefix_blocks
    async with Rig(fakes(1, prefills, "p"), fakes(2, behave, "d"), **options) as rig:
        await turns(rig, 4)
        assert sum(len(each.calls) for each in rig.decode) == 4 + refused
