"""A pull hint names a peer that has more of a prompt's KV than the server that gets the
hint.
"""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from protocol.kv_offers import hint_of
from protocol.messages import HostTierReport, KVHint
from proxy.health import Health, SideChannel
from proxy.legs.pull_hint import pull_hint
from proxy.membership import Kind, Server
from proxy.placement.host_tiers import StoreLender
from proxy.placement.load_tracker import LoadTracker
from proxy.placement.request_profile import RequestProfile, profile_prompt
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


def profile(messages: Any, max_output_tokens: int = 400) -> RequestProfile:
    text = json.dumps(messages, separators=(",", ":")).encode()
    return profile_prompt(b"m", text, max_output_tokens)


def server(kind: Kind, index: int, **health: Any) -> Server:
    channel = SideChannel(f"engine {kind.value}{index}", "1", "", 7000 + index)
    fields = {
        "ready": True,
        "kv_digest": "m.f32",
        "side_channel": channel,
        "subscribes": True,
        **health,
    }
    url = f"http://host-{kind.value}{index}:1"
    return Server(kind, url, index, Health(**fields))


class Fleet:
    """Two prefill servers (p, q) and two decode servers (d, e). p and d have TURN_1
    cached.
    """

    def __init__(self, **health: Any) -> None:
        self.clock = Clock()
        self.load_tracker = LoadTracker("auto", "always", clock=self.clock)
        self.load_tracker.pulls = True
        self.p, self.q = (server(Kind.PREFILL, index) for index in range(2))
        self.d, self.e = (server(Kind.DECODE, index) for index in range(2))
        for each in (self.p, self.q, self.d, self.e):
            self.load_tracker.set_lender(each, True)
        legs = [(self.p, True, False), (self.d, False, True)]
        for leg_server, computes, generates in legs:
            assignment = self.load_tracker.start(
                leg_server, profile(TURN_1), computes=computes, generates=generates
            )
            self.clock.now += 1.0
            self.load_tracker.on_answer(assignment)
            self.load_tracker.end(assignment)

    def hint(self, reader: Server, messages: Any = TURN_2) -> KVHint | None:
        lenders = self.load_tracker.lenders(reader, profile(messages))
        return pull_hint(reader, lenders)

    def hinted_engine(self, reader: Server, messages: Any = TURN_2) -> str | None:
        """Return the engine ID in the hint that `reader` gets, or None without a
        hint.
        """
        hint = self.hint(reader, messages)
        return hint.engine_id if hint else None


def test_hint_names_the_server_with_the_longest_cached_prefix():
    fleet = Fleet()
    # Decode server d has more cached than p, because d also has KV of the answer.
    assert fleet.hinted_engine(fleet.p) == "engine decode0"
    assert (
        fleet.hinted_engine(fleet.q) == fleet.hinted_engine(fleet.e) == "engine decode0"
    )
    assert fleet.hinted_engine(fleet.d) is None, "a hint although no server has more"
    assert fleet.hinted_engine(fleet.p, TURN_1) is None
    branch = [{**TURN_1[0], "content": TURN_1[0]["content"] + "and more"}, *TURN_2[1:]]
    # If the question differs, the cached KV of the answer cannot be used.
    assert fleet.hinted_engine(fleet.p, branch) is None
    assert fleet.hinted_engine(fleet.q, branch) in ("engine prefill0", "engine decode0")
    assert fleet.hinted_engine(fleet.q, [{"content": "new"}]) is None
    hint = fleet.hint(fleet.q)
    assert hint is not None and (hint.host, hint.port) == ("host-decode0", 7000)


def test_hint_names_the_store_of_another_host_while_one_of_its_servers_is_ready():
    reader = server(Kind.DECODE, 1)
    report = HostTierReport(
        store="store-1",
        num_tokens=9000,
        start_s=0.0,
        token_s=0.0,
        host="10.0.0.1",
        port=7,
        incarnation="i",
    )
    ready = server(Kind.DECODE, 0)
    lost = server(Kind.DECODE, 2, ready=False)
    other_model = server(Kind.DECODE, 3, kv_digest="other.f32")
    hint = pull_hint(reader, [(StoreLender(report, (lost, ready)), 100)])
    assert hint is not None and (hint.host, hint.port) == ("10.0.0.1", 7)
    assert (hint.engine_id, hint.incarnation) == ("store-1", "i")
    for servers in ((), (lost,), (other_model,)):
        assert pull_hint(reader, [(StoreLender(report, servers), 100)]) is None


def test_prompt_counts_as_cached_only_after_it_was_computed():
    fleet = Fleet()
    prompt = [{"role": "user", "content": "other words " * 400}]
    load_tracker = fleet.load_tracker
    prefill = {"computes": True, "generates": False}
    computed = load_tracker.start(fleet.p, profile(prompt), **prefill)
    assert fleet.hinted_engine(fleet.q, prompt) is None
    load_tracker.on_answer(computed)
    assert fleet.hinted_engine(fleet.q, prompt) == "engine prefill0"
    pulling = load_tracker.start(fleet.q, profile(prompt), **prefill)
    # The first pull to q has not ended, so a second request gets the same hint.
    assert fleet.hinted_engine(fleet.q, prompt) == "engine prefill0"
    load_tracker.on_answer(pulling)
    assert fleet.hinted_engine(fleet.q, prompt) is None
    for busy, idle in ((fleet.p, "engine prefill1"), (fleet.q, "engine prefill0")):
        long = profile([{"content": "long " * 9000}])
        assignment = load_tracker.start(busy, long, **prefill)
        assert fleet.hinted_engine(fleet.e, prompt) == idle, (
            "the hint does not name the idle lender"
        )
        load_tracker.end(assignment)
    stream = load_tracker.start(
        fleet.d, profile(prompt), computes=False, generates=True
    )
    assert fleet.hinted_engine(fleet.d, prompt) == "engine prefill0"
    load_tracker.on_answer(stream)
    assert fleet.hinted_engine(fleet.d, prompt) is None


@pytest.mark.parametrize(
    ("change", "hinted_engine"),
    [
        ({"ready": False}, "engine prefill0"),
        ({"open_until": 5.0}, "engine prefill0"),
        ({"kv_digest": "m.bf16"}, "engine prefill0"),
        ({"kv_digest": ""}, "engine prefill0"),
        ({"side_channel": None}, "engine prefill0"),
        ({}, "engine decode0"),
    ],
)
def test_hint_never_names_a_server_that_cannot_lend(change, hinted_engine):
    fleet = Fleet()
    fleet.d.health = replace(fleet.d.health, **change)
    assert fleet.hinted_engine(fleet.q) == hinted_engine


@pytest.mark.parametrize("change", [{"is_foreign": True}, {"subscribes": False}])
def test_servers_that_cannot_pull_receive_no_hint(change):
    fleet = Fleet()
    fleet.q.health = replace(fleet.q.health, **change)
    assert fleet.hinted_engine(fleet.q) is None


def test_hint_names_no_server_that_has_restarted_or_left():
    """Without a cluster secret there are no hints either."""
    fleet = Fleet()
    fleet.load_tracker.forget_cache(fleet.d)
    assert fleet.hinted_engine(fleet.q) == "engine prefill0"
    fleet.load_tracker.remove(fleet.p)
    assert fleet.hinted_engine(fleet.q) is None
    fleet = Fleet()
    fleet.load_tracker.pulls = False
    assert fleet.hinted_engine(fleet.q) is None


def test_pulled_prefix_shortens_the_estimated_wait():
    waits_s = {}
    prefill = {"computes": True, "generates": False}
    for is_lender in (True, False):
        load_tracker = LoadTracker("auto", "auto", clock=lambda: 1.0)
        load_tracker.pulls = True
        load_tracker.set_lender("a", is_lender)
        prompt = profile_prompt(b"", b"x" * 80_000, 9)
        load_tracker.on_answer(load_tracker.start("a", prompt, **prefill))
        load_tracker.start("b", prompt, **prefill)
        waits_s[is_lender] = load_tracker.wait_s("b")
    assert waits_s[True] < 0.5 * waits_s[False]


def test_decode_server_of_a_conversation_computes_the_new_tokens_itself():
    clock = Clock()
    load_tracker = LoadTracker("auto", "auto", clock=clock)
    turn_2 = profile(TURN_2)
    turn_1 = load_tracker.start("d", profile(TURN_1), computes=False, generates=True)
    clock.now += 1.0
    load_tracker.on_answer(turn_1)
    load_tracker.end(turn_1)
    assert load_tracker.reserve_decode_only(turn_2, ["p"], ["d", "e"])
    chosen = load_tracker.choose_server(
        ["e", "d"], turn_2, computes=True, generates=True
    )
    assert chosen == "d"


# -- over HTTP


def fakes(count: int, behave: Any, kind: str) -> list[Fake]:
    details = {
        "subscribes": 1,
        "incarnation": "1",
        "side_channel_host": "",
        "side_channel_port": 9,
        "kv_digest": "m.f32",
    }
    return [
        Fake(behave, details={**details, "engine_id": f"{kind}{index}"})
        for index in range(count)
    ]


def received_hint(fake: Fake) -> KVHint | None:
    params = fake.calls[-1].body.get("kv_transfer_params")
    return hint_of(params, SECRET.encode(), time.time())


async def complete_turns(rig: Rig, count: int) -> None:
    for _ in range(count):
        forged = {"hint": {"host": "evil"}}
        response = await rig.complete(
            prompt=list(range(1000)), kv_transfer_params=forged
        )
        assert response.status_code == 200


async def test_leg_that_computes_the_prompt_carries_a_signed_hint():
    options = {"routing": "round_robin", "cluster_secret": SECRET}
    async with Rig(fakes(2, prefills, "p"), fakes(2, decodes, "d"), **options) as rig:
        await complete_turns(rig, 2)
        assert received_hint(rig.prefill[0]) is None, (
            "a hint before any server has the prompt"
        )
        hint = received_hint(rig.prefill[1])
        assert hint is not None and hint.engine_id in ("p0", "d0")
        assert (hint.host, hint.port) == ("127.0.0.1", 9)
        assert rig.prefill[1].calls[0].body["kv_transfer_params"]["do_remote_decode"]
        for fake in rig.decode:
            assert received_hint(fake) is None, (
                "a hint for a server that computes no prompt"
            )
        assert rig.metric("baton_proxy_hints", leg="prefill") == 1
    options["disaggregate"] = "never"
    async with Rig(fakes(1, prefills, "p"), fakes(2, decodes, "d"), **options) as rig:
        await complete_turns(rig, 2)
        hint = received_hint(rig.decode[1])
        assert hint is not None and hint.engine_id == "d0"
        assert list(rig.decode[1].calls[0].body["kv_transfer_params"]) == ["hint"]
        assert rig.metric("baton_proxy_hints", leg="decode") == 1


@pytest.mark.parametrize(("prefix_blocks", "refused"), [(0, 0), (1000, 1)])
async def test_rejected_hint_costs_one_more_request(prefix_blocks, refused):
    error = {"code": "kv_params_rejected", "param": "kv_transfer_params.hint.signature"}
    rejects = answers(400, {"error": error})

    async def behave(call: Any) -> None:
        is_hinted = "hint" in (call.body.get("kv_transfer_params") or {})
        if is_hinted:
            await rejects(call)
        else:
            await decodes(call)

    options = {
        "routing": "round_robin",
        "disaggregate": "never",
        "cluster_secret": SECRET,
        "prefix_blocks": prefix_blocks,
    }
    async with Rig(fakes(1, prefills, "p"), fakes(2, behave, "d"), **options) as rig:
        await complete_turns(rig, 4)
        assert sum(len(fake.calls) for fake in rig.decode) == 4 + refused
