"""Prefixes that another engine has cached are looked up, leased and pulled. If that
fails, the prompt is computed locally.
"""

import math
import random
from typing import Any

import pytest
from msgspec.structs import replace

from engine.kv.rates import Rates
from kvcache.transfer.pulls.messages import PullSettings
from protocol import kv_params
from protocol.messages import AbortRequest
from tests.engine.store.test_region import evict_all
from tests.rigs.engines import COMPAT, OTHER_COMPAT, Engine, Group
from tests.rigs.shadow import VOCAB, expected_output

PROMPT = [(7 * i) % VOCAB for i in range(30)]
# The matching salt comes last, because its request fills the reader's cache.
SALTS = [b"", b"other", b"one"]
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


@pytest.mark.parametrize(("options_a", "options_b"), GEOMETRIES)
def test_conversation_continues_on_either_engine_with_the_other_engines_kv(
    make_group, options_a, options_b
):
    """Turn 1 runs on A, turn 2 on B with A's KV, and turn 3 on A.

    In turn 3, A lacks the KV that B computed. A can pull this KV only if A's ranks can
    cut their shares from B's blocks.
    """
    group = make_group(options_a, options_b)
    a, b = group.engines
    answer, kv = group.complete(a, PROMPT, 6)
    assert kv == (0, 30, 0)
    second = [*PROMPT, *answer, 1, 2, 3]
    size = a.config.tokens_per_block
    num_cached = (len(PROMPT) + len(answer) - 1) // size * size
    answer, kv = group.complete(b, second, 6, hint=a.hint(9999))
    assert kv == (num_cached, len(second) - num_cached, 0)
    assert b.stat("baton_kv_lookups", outcome="found") == 1
    third = [*second, *answer, 4]
    _, (pulled, computed, skipped) = group.complete(a, third, 3, hint=b.hint(9999))
    assert a.stat("baton_kv_lookups_answered", outcome="found") == 1
    can_pull = a.config.dcp == 1 or a.config.block_size % b.config.block_size == 0
    assert skipped == num_cached
    assert (pulled > 0) is can_pull
    assert pulled + computed + skipped == len(third)


def test_locally_cached_blocks_are_not_pulled(make_group):
    a, b = (group := make_group({}, {})).engines
    group.complete(a, PROMPT)
    group.complete(b, PROMPT[:13])
    assert group.complete(b, PROMPT, hint=a.hint(30))[1] == (16, 2, 12)
    assert group.complete(b, PROMPT, hint=a.hint(28))[1] == (0, 2, 28)
    assert b.stat("baton_kv_lookups", outcome="computed") == 1


@pytest.mark.parametrize("lender_options", [BFLOAT16, {"compat": OTHER_COMPAT}])
def test_prefix_on_an_incompatible_engine_is_computed_locally(
    make_group, lender_options
):
    a, b = (group := make_group(lender_options, {})).engines
    group.complete(a, PROMPT)
    assert group.complete(b, PROMPT, hint=a.hint(30))[1] == (0, 30, 0)
    assert a.stat("baton_leases", event="granted") == 0


def test_only_requests_with_its_salt_match_and_pull_cached_kv(make_group):
    a, b = (group := make_group({}, {})).engines
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


def test_subscription_with_a_different_salt_gets_no_kv(make_group):
    """The reader computes the prompt itself, as if the offer were for a different
    prompt. The leases that nothing pulls expire at the end of the test."""
    a, b = (group := make_group({"lease_s": 5.0}, {})).engines
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


def test_prefix_that_is_quicker_to_compute_is_not_looked_up(make_group):
    a, b = (group := make_group({}, {"mode": "auto"})).engines
    group.complete(a, PROMPT)
    b.rates.record_compute(1000, 1e-6)  # computing takes almost no time
    assert group.complete(b, PROMPT, hint=a.hint(30))[1] == (0, 30, 0)
    assert b.stat("baton_kv_lookups", outcome="computed") == 1
    b.rates.record_compute(1000, 1e9)
    group.complete(a, PROMPT[::-1])
    assert group.complete(b, PROMPT[::-1], hint=a.hint(30))[1] == (28, 2, 0)
    assert group.complete(b, PROMPT, hint=a.hint(28))[1] == (0, 2, 28)
    assert b.stat("baton_kv_lookups", outcome="computed") == 2


def test_pull_threshold_follows_from_measured_pulls_and_prompts():
    now = 0.0
    rates = Rates("auto", 1000, 1e6, lambda: now)
    peer = ("e", "i")
    assert rates.min_pull_tokens(peer) == 1, "nothing has been measured yet"
    # Computing takes 3 ms per token. A pull takes 1 ms per token and 5 ms of latency.
    rates.record_compute(100, 0.3)
    assert rates.min_pull_tokens(peer) == pytest.approx(2.5)
    rates.record_pull(peer, 1 << 24, 1.0)  # 60 us per token
    assert 1.5 < rates.min_pull_tokens(peer) < 1.8
    assert rates.pull_cost(peer) == pytest.approx((0.005, 60e-6), rel=0.01)
    for _ in range(20):
        rates.record_pull(peer, 1 << 20, 100.0)
        rates.record_pull(peer, 1 << 19, 0.0001)  # too small to be a measurement
    assert rates.min_pull_tokens(peer) == math.inf
    now = 61.0
    assert rates.min_pull_tokens(peer) == pytest.approx(2.5), (
        "old estimates expire, because the link may have become faster"
    )
    rates.record_lookup(peer, 0.5)
    assert rates.min_pull_tokens(peer) > 50
    never = Rates("never", 1000, 1e6)
    assert never.min_pull_tokens(peer) == math.inf and never.pull_cost(peer) is None


def test_draft_kv_is_pulled_unless_it_is_quicker_to_compute():
    rates = Rates("never", 1000, 1e6, draft_bytes_per_token=500)  # 0.5 ms per token
    peer = ("e", "i")
    assert rates.is_draft_pull_quicker(peer, 0.0), "nothing has been measured yet"
    assert rates.is_draft_pull_quicker(peer, 0.6e-3)
    assert not rates.is_draft_pull_quicker(peer, 0.4e-3)
    assert rates.is_draft_pull_quicker(peer, math.inf)
    rates.record_pull(peer, 1 << 24, 1.0)
    assert rates.is_draft_pull_quicker(peer, 0.4e-3)


def test_failed_pull_of_a_found_prefix_is_computed_whatever_the_policy(make_group):
    """The request refers to KV of its own engine. The engine has evicted this KV."""
    a, b = (group := make_group({}, {"policy": "fail"})).engines
    group.complete(a, PROMPT)
    name = group.begin(b, PROMPT, 1, retain_kv=True)
    group.end_of(b, name)
    reference = b.reference(name)
    b.leases.abort(reference.lease_id)
    group.settle()
    evict_all(b)
    b.movers.fail(1)
    name = group.begin(b, PROMPT, 3, remote=reference, hint=a.hint(30))
    assert group.tokens_of(b, name) == expected_output(PROMPT, 3)
    assert a.stat("baton_leases", event="granted") == 1


def test_wait_after_a_failed_pull_does_not_count_as_time_to_compute(make_group):
    a, b = (group := make_group({}, {})).engines
    name = group.begin(a, PROMPT, 1, retain_kv=True)
    group.end_of(a, name)
    reference = a.reference(name)
    a.leases.abort(reference.lease_id)
    allocator = b.core.scheduler.allocator
    held = allocator.allocate(allocator.num_available)
    name = group.begin(b, PROMPT, 3, remote=reference)
    times = b.core.sequences[name].times
    group.until(lambda: times.pulled is not None)
    times.pulled -= 1000.0  # as if the request had waited for blocks since then
    allocator.release(held)
    assert group.tokens_of(b, name) == expected_output(PROMPT, 3)
    assert 0 < b.rates.seconds_per_token < 10


WRONG_HINTS = [
    {"engine_id": "another"},
    {"incarnation": "of an earlier start"},
    {"port": 1},
    {"num_tokens": 1 << 24},
]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("wrong_fields", WRONG_HINTS, ids=str)
def test_wrong_hint_fails_no_request(make_group, wrong_fields, policy):
    settings = PullSettings(lookup_timeout_s=0.2)
    a, b = (group := make_group({}, {"policy": policy, "settings": settings})).engines
    group.complete(a, [3, *PROMPT])
    hint = a.hint(**{"num_tokens": 30, **wrong_fields})
    assert group.complete(b, PROMPT, hint=hint)[1] == (0, 30, 0)
    group.settle()
    assert a.stat("baton_leases", event="granted") == 0


def test_lookups_of_an_engine_with_another_secret_are_not_answered(make_group):
    a, b = (group := make_group({}, {"secret": b"another"})).engines
    group.complete(a, PROMPT)
    for prompt in (PROMPT, PROMPT[::-1]):
        assert group.complete(b, prompt, hint=a.hint(30))[1][0] == 0
    num_answered = [
        a.stat("baton_kv_lookups_answered", outcome=outcome)
        for outcome in ("found", "none", "full")
    ]
    assert num_answered == [0, 0, 0]


def test_leases_of_lookups_are_limited_to_half_of_the_pool(make_group):
    # The pool has 17 blocks without the null block, so 8 may be leased.
    a, b = (group := make_group({"num_blocks": 18}, {})).engines
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


def test_lookups_take_no_blocks_that_the_first_waiting_request_needs(make_group):
    a, b = (group := make_group({"num_blocks": 18}, {})).engines
    group.complete(a, PROMPT)
    b.movers.stall()
    first = group.begin(b, [*PROMPT, 1], hint=a.hint(30))
    group.until(lambda: len(b.core.scheduler.receiving) == 1)
    large_prompt = [*range(40), 1, 2, 3]
    waiting = group.begin(a, large_prompt)
    later = group.begin(b, [*PROMPT, 2], hint=a.hint(30))
    assert group.tokens_of(b, later) == expected_output([*PROMPT, 2], 3)
    assert a.stat("baton_kv_lookups_answered", outcome="full") == 1
    b.movers.resume()
    assert group.tokens_of(a, waiting) == expected_output(large_prompt, 3)
    assert group.tokens_of(b, first) == expected_output([*PROMPT, 1], 3)


@pytest.mark.parametrize("moment", ["lookup", "pull"])
def test_death_of_a_lender_fails_no_request(make_group, moment):
    settings = PullSettings(
        lookup_timeout_s=0.3, side_channel_timeout_s=0.2, drain_grace_s=0.01
    )
    a, b = (group := make_group({}, {"settings": settings, "policy": "fail"})).engines
    group.complete(a, PROMPT)
    if moment == "pull":
        b.movers.stall()
    name = group.begin(b, [*PROMPT, 1], hint=a.hint(30))
    if moment == "pull":
        group.until(lambda: b.movers.active > 0)
    group.engines.remove(a)
    a.end()
    group.until(
        lambda: (
            moment == "pull" or bool(b.core.scheduler.running or b.out.terminals(name))
        )
    )
    b.movers.resume()
    assert group.tokens_of(b, name) == expected_output([*PROMPT, 1], 3)


@pytest.mark.parametrize("seed", range(4))
def test_random_workloads_with_random_faults_give_correct_tokens(make_group, seed):
    """Prompts share prefixes, hints are right or wrong, pools evict blocks, and READs
    fail or hang."""
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
    group: Group = make_group(*({**each, "settings": settings} for each in options))
    prompts = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(3)]
    requests: list[tuple[Engine, str, list[int]]] = []
    for _ in range(60):
        borrower, lender = rng.sample(group.engines, 2)
        prompt = [
            *rng.choice(prompts)[: rng.randint(1, 20)],
            *([1] * rng.randint(0, 6)),
        ]
        hint = lender.hint(rng.randint(1, 40)) if rng.random() < 0.8 else None
        name = group.begin(borrower, prompt, 3, hint=hint)
        requests.append((borrower, name, prompt))
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
    for engine, name, prompt in requests:
        tokens = group.tokens_of(engine, name)
        assert tokens == expected_output(prompt, 3)[: len(tokens)]
