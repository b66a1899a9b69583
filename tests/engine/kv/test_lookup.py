"""Prefixes that other engines hold: asked for, leased, pulled, and computed where that fails."""

import math
import random
from typing import Any

import pytest
from msgspec.structs import replace

from engine.kv.rates import Rates
from kvcache.transfer.pulls.messages import PullSettings
from protocol import kv_params
from protocol.messages import AbortRequest
from tests.rigs.engines import ANOTHER, COMPAT, Engine, Group
from tests.rigs.shadow import VOCAB, expected_output

PROMPT = [(7 * i) % VOCAB for i in range(30)]
SALTS = [b"", b"other", b"one"]  # the matching one last, as it fills the reader's cache


CONVERTS: dict[str, Any] = {"convert": True}
LATENTS = {"compat": replace(COMPAT, num_components=1, total_kv_heads=1)}
BFLOAT16 = {"compat": replace(COMPAT, kv_dtype="bfloat16")}
GEOMETRIES = [
    ({}, {}),
    ({"block_size": 2, "order": "LBCNHD"}, {"block_size": 8, "depth": 1}),
    ({"block_size": 4}, {"block_size": 4, "dcp": 2}),
    ({"block_size": 2, "dcp": 2}, {"block_size": 4, "dcp": 2, "depth": 1}),
    ({"block_size": 2, "dcp": 3, "order": "LBCNHD"}, {"block_size": 8}),
    ({"block_size": 8, "depth": 1}, {"block_size": 2, "order": "NLBHCD"}),
    ({**LATENTS, "block_size": 2}, {**LATENTS, "dcp": 2}),
    ({**BFLOAT16, **CONVERTS}, {"block_size": 8, **CONVERTS}),
    ({**BFLOAT16, "dcp": 2, **CONVERTS}, CONVERTS),
]


@pytest.mark.parametrize(("ours", "theirs"), GEOMETRIES)
def test_a_conversation_goes_on_anywhere_with_what_others_have_of_it(
    make, ours, theirs
):
    """Turn 1 at A, turn 2 at B with A's KV, turn 3 at A, which lacks what B computed and may be
    unable to cut its ranks' shares from."""
    a, b = (group := make(ours, theirs)).engines
    said, kv = group.complete(a, PROMPT, 6)
    assert kv == (0, 30, 0)
    second = [*PROMPT, *said, 1, 2, 3]
    size = a.config.tokens_per_block
    held = (len(PROMPT) + len(said) - 1) // size * size
    said, kv = group.complete(b, second, 6, hint=a.hint(9999))
    assert kv == (held, len(second) - held, 0)
    assert b.stat("baton_kv_lookups", outcome="found") == 1
    third = [*second, *said, 4]
    _, (pulled, computed, skipped) = group.complete(a, third, 3, hint=b.hint(9999))
    assert a.stat("baton_kv_lookups_answered", outcome="found") == 1
    lends = a.config.dcp == 1 or a.config.block_size % b.config.block_size == 0
    assert (
        skipped == held
        and (pulled > 0) is lends
        and pulled + computed + skipped == len(third)
    )


def test_what_is_here_is_not_pulled(make):
    a, b = (group := make({}, {})).engines
    group.complete(a, PROMPT)
    group.complete(b, PROMPT[:13])
    assert group.complete(b, PROMPT, hint=a.hint(30))[1] == (16, 2, 12)
    assert group.complete(b, PROMPT, hint=a.hint(28))[1] == (0, 2, 28)
    assert b.stat("baton_kv_lookups", outcome="computed") == 1


@pytest.mark.parametrize("theirs", [BFLOAT16, {"compat": ANOTHER}])
def test_what_cannot_be_read_is_computed(make, theirs):
    a, b = (group := make(theirs, {})).engines
    group.complete(a, PROMPT)
    assert group.complete(b, PROMPT, hint=a.hint(30))[1] == (0, 30, 0)
    assert a.stat("baton_leases", event="granted") == 0


def test_kv_is_found_and_borrowed_by_requests_of_its_salt_only(make):
    a, b = (group := make({}, {})).engines
    group.complete(a, PROMPT, cache_salt=b"one")
    for salt in (b"", b"other"):
        hint = a.hint(30)
        assert group.complete(b, PROMPT, hint=hint, cache_salt=salt)[1] == (0, 30, 0)
        assert group.complete(a, PROMPT, cache_salt=salt)[1] == (0, 30, 0)
    assert b.stat("baton_kv_lookups", outcome="found") == 0
    assert group.complete(b, PROMPT, hint=a.hint(30), cache_salt=b"one")[1] == (
        28,
        2,
        0,
    )
    assert group.complete(a, PROMPT, cache_salt=b"one")[1] == (0, 2, 28)


def test_a_subscription_of_another_salt_gets_no_kv(make):
    """The reader computes the prompt itself, as for an offer of another prompt."""
    a, b = (group := make({}, {})).engines
    digest = kv_params.prompt_digest(PROMPT, b"one")
    offers = {
        salt: replace(a.offer(f"t{salt!r}", PROMPT), prompt_digest=digest)
        for salt in SALTS
    }
    for salt, offer in offers.items():
        reader = group.begin(b, PROMPT, remote=offer, cache_salt=b"one")
        writer = group.begin(
            a, PROMPT, 1, cache_salt=salt, retain_kv=True, transfer_id=offer.transfer_id
        )
        group.tokens_of(a, writer)
        assert group.tokens_of(b, reader) == expected_output(PROMPT, 3)
        assert (b.kv(reader)[0] > 0) is (salt == b"one")


def test_little_is_not_asked_for(make):
    a, b = (group := make({}, {"mode": "auto"})).engines
    group.complete(a, PROMPT)
    b.rates.record_compute(1000, 1e-6)  # to compute costs nothing here
    assert group.complete(b, PROMPT, hint=a.hint(30))[1] == (0, 30, 0)
    assert b.stat("baton_kv_lookups", outcome="computed") == 1
    b.rates.record_compute(1000, 1e9)
    group.complete(a, PROMPT[::-1])
    assert group.complete(b, PROMPT[::-1], hint=a.hint(30))[1] == (28, 2, 0)
    assert group.complete(b, PROMPT, hint=a.hint(28))[1] == (0, 2, 28)
    assert b.stat("baton_kv_lookups", outcome="computed") == 2


def test_a_pull_is_chosen_by_what_pulls_and_prompts_took():
    now = 0.0
    rates, peer = Rates("auto", 1000, 1e6, lambda: now), ("e", "i")
    assert rates.min_pull_tokens(peer) == 1, "nothing is known yet"
    rates.record_compute(100, 0.3)  # 3 ms a token, of which a pull takes one
    assert rates.min_pull_tokens(peer) == pytest.approx(2.5)  # 5 ms for the question
    rates.record_pull(peer, 1 << 24, 1.0)  # 60 us a token
    assert 1.5 < rates.min_pull_tokens(peer) < 1.8
    for _ in range(20):
        rates.record_pull(peer, 1 << 20, 100.0)
        rates.record_pull(peer, 1 << 19, 0.0001)  # says nothing
    assert rates.min_pull_tokens(peer) == math.inf
    now = 61.0
    assert rates.min_pull_tokens(peer) == pytest.approx(2.5), (
        "it may have become better"
    )
    rates.record_lookup(peer, 0.5)
    assert rates.min_pull_tokens(peer) > 50
    assert Rates("never", 1000, 1e6).min_pull_tokens(peer) == math.inf


LIES = [
    {"engine_id": "another"},
    {"incarnation": "of an earlier start"},
    {"port": 1},
    {"num_tokens": 1 << 24},
]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_hint_that_lies_costs_a_question_and_no_answer(make, lie, policy):
    settings = PullSettings(lookup_timeout_s=0.2)
    a, b = (group := make({}, {"policy": policy, "settings": settings})).engines
    group.complete(a, [3, *PROMPT])
    assert group.complete(b, PROMPT, hint=a.hint(**{"num_tokens": 30, **lie}))[1] == (
        0,
        30,
        0,
    )
    group.settle()
    assert a.stat("baton_leases", event="granted") == 0


def test_another_secret_learns_nothing(make):
    a, b = (group := make({}, {"secret": b"another"})).engines
    group.complete(a, PROMPT)
    for prompt in (PROMPT, PROMPT[::-1]):
        assert group.complete(b, prompt, hint=a.hint(30))[1][0] == 0
    answered = [
        a.stat("baton_kv_lookups_answered", outcome=o)
        for o in ("found", "none", "full")
    ]
    assert answered == [0, 0, 0]


def test_lookups_keep_half_of_a_pool_at_most(make):
    a, b = (group := make({"num_blocks": 18}, {})).engines  # 17, and so 8 at most
    prompts = [PROMPT, PROMPT[::-1], [9] * 5]
    for prompt in prompts:
        group.complete(a, prompt)
    b.movers.stall()
    names = [group.begin(b, [*prompt, 1], hint=a.hint(30)) for prompt in prompts]
    group.until(lambda: len(b.core.scheduler.receiving) == 2)
    group.until(lambda: a.stat("baton_kv_lookups_answered", outcome="full") == 1)
    b.movers.resume()
    for name, prompt in zip(names, prompts, strict=True):
        assert group.tokens_of(b, name) == expected_output([*prompt, 1], 3)
    assert [b.kv(name)[0] for name in names] == [28, 4, 0]


def test_lookups_keep_no_blocks_from_who_waits_for_most_of_the_pool(make):
    a, b = (group := make({"num_blocks": 18}, {})).engines
    group.complete(a, PROMPT)
    b.movers.stall()
    first = group.begin(b, [*PROMPT, 1], hint=a.hint(30))
    group.until(lambda: len(b.core.scheduler.receiving) == 1)
    waits = group.begin(a, long := [*range(40), 1, 2, 3])
    later = group.begin(b, [*PROMPT, 2], hint=a.hint(30))
    assert group.tokens_of(b, later) == expected_output([*PROMPT, 2], 3)
    assert a.stat("baton_kv_lookups_answered", outcome="full") == 1
    b.movers.resume()
    assert group.tokens_of(a, waits) == expected_output(long, 3)
    assert group.tokens_of(b, first) == expected_output([*PROMPT, 1], 3)


@pytest.mark.parametrize("at", ["lookup", "pull"])
def test_a_lender_that_dies_costs_no_answer(make, at):
    settings = PullSettings(
        lookup_timeout_s=0.3, side_channel_timeout_s=0.2, drain_grace_s=0.01
    )
    a, b = (group := make({}, {"settings": settings, "policy": "fail"})).engines
    group.complete(a, PROMPT)
    if at == "pull":
        b.movers.stall()
    name = group.begin(b, [*PROMPT, 1], hint=a.hint(30))
    if at == "pull":
        group.until(lambda: b.movers.active > 0)
    group.engines.remove(a)
    a.end()
    group.until(
        lambda: bool(b.core.scheduler.running or b.out.terminals(name)) or at == "pull"
    )
    b.movers.resume()
    assert group.tokens_of(b, name) == expected_output([*PROMPT, 1], 3)


@pytest.mark.parametrize("seed", range(4))
def test_any_workload_under_any_fault(make, seed):
    """Shared beginnings, hints that are right or wrong, pools that evict, READs that fail."""
    rng = random.Random(seed)
    options = [
        {
            "block_size": rng.choice([2, 4, 8]),
            "num_blocks": 24,
            "depth": rng.randint(0, 1),
        }
        for _ in range(3)
    ]
    settings = PullSettings(drain_grace_s=0.01, lookup_timeout_s=0.5)
    group: Group = make(*({**each, "settings": settings} for each in options))
    prompts = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(3)]
    asked: list[tuple[Engine, str, list[int]]] = []
    for _ in range(60):
        borrower, lender = rng.sample(group.engines, 2)
        prompt = [
            *rng.choice(prompts)[: rng.randint(1, 20)],
            *([1] * rng.randint(0, 6)),
        ]
        hint = lender.hint(rng.randint(1, 40)) if rng.random() < 0.8 else None
        name = group.begin(borrower, prompt, 3, hint=hint)
        asked.append((borrower, name, prompt))
        match rng.randrange(8):
            case 0:
                borrower.movers.stall()
            case 1:
                borrower.movers.fail()
            case 2:
                borrower.core.round([AbortRequest(name)])
            case 3 | 4:
                borrower.movers.resume()
        group.round()
    for engine in group.engines:
        engine.movers.resume()
        engine.movers.fail(0)
    for engine, name, prompt in asked:
        tokens = group.tokens_of(engine, name)
        assert tokens == expected_output(prompt, 3)[: len(tokens)]
