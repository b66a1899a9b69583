"""Engines demote KV to a region. The KV is promoted from the region after its engine
has evicted it or has ended.

The KV of the shadow model holds token ids, so wrong KV changes the output. Every
`complete` checks the output.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from engine.kv import demoter
from engine.store import demotions
from kvcache.blocks import BlockState
from kvcache.groups import KVGroups
from kvcache.transfer.pulls.messages import PullSettings
from protocol.messages import AbortRequest, ResumedChoice
from tests.rigs.engines import COMPAT, OTHER_COMPAT, Engine, WindowedEngine
from tests.rigs.memory_pair import run_round
from tests.rigs.shadow import VOCAB, add, expected_output, windowed_output
from tests.rigs.stores import Store, TieredGroup

PROMPT = [(7 * i) % VOCAB for i in range(30)]
OTHER = [(11 * i + 3) % VOCAB for i in range(30)]
LATENTS = replace(COMPAT, num_components=1, total_kv_heads=1)
MakeTiers = Callable[..., TieredGroup]
# Options of the first engine, of the second engine, and of the store.
GEOMETRIES: list[Any] = [
    ({}, {}, {}),
    ({"block_size": 2, "order": "LBCNHD"}, {"block_size": 8, "depth": 1}, {}),
    ({"block_size": 8, "order": "NLBHCD"}, {"block_size": 2}, {"block_size": 8}),
    ({"block_size": 4}, {"block_size": 4, "dcp": 2}, {"block_size": 2}),
    ({"block_size": 2, "dcp": 2}, {"block_size": 4, "dcp": 2}, {"block_size": 2}),
    ({"block_size": 3, "dcp": 3}, {"block_size": 8}, {"block_size": 3}),
    ({"depth": 1, "launch_bytes": 64}, {"launch_bytes": 64}, {"transfer": "mapped"}),
    (
        {"compat": LATENTS, "block_size": 2},
        {"compat": LATENTS, "dcp": 2},
        {"compat": LATENTS},
    ),
]
WINDOWS = [KVGroups((None, 6, 6)), KVGroups((7,)), KVGroups((None, 2, 9))]


@pytest.fixture
def make_tiers() -> Iterator[MakeTiers]:
    with ExitStack() as stack:

        def make(*options: dict[str, Any], **store_options: Any) -> TieredGroup:
            store = Store(**store_options)
            engines = [Engine(store_link=store.link(), **each) for each in options]
            return stack.enter_context(TieredGroup(store, *engines))

        yield make


def evict_all(engine: Engine) -> None:
    """Evict all cached blocks of an engine."""
    allocator = engine.core.scheduler.allocator
    allocator.release(allocator.allocate(allocator.num_available))


def demoted(engine: Engine, outcome: str) -> float:
    return engine.stat("baton_host_kv_demotions", outcome=outcome)


@pytest.mark.parametrize(("options_a", "options_b", "store_options"), GEOMETRIES)
def test_evicted_and_foreign_prompts_are_promoted_in_any_geometry(
    make_tiers, options_a, options_b, store_options
):
    group = make_tiers(options_a, options_b, **store_options)
    a, b = group.engines
    answer, kv = group.complete(a, PROMPT, 6)
    assert kv == (0, 30, 0)
    text = [*PROMPT, *answer]
    size = a.config.tokens_per_block
    store_size = group.store.region.prefix.block_size
    num_full = (len(text) - 1) // size * size
    num_stored = num_full // store_size * store_size
    group.until_stored(text, num_stored)
    group.settle()
    evict_all(a)
    second = [*text, 1, 2, 3]
    _, kv = group.complete(a, second, 3)
    assert kv == (num_stored, len(second) - num_stored, 0)
    group.settle()
    _, (pulled, _, cached) = group.complete(b, second, 3)
    assert pulled >= num_stored and cached == 0
    for engine in (a, b):
        assert engine.stat("baton_host_kv_lookups", outcome="found") == 1
        num_promoted = engine.stat("baton_kv_pulled_tokens", source="host")
        assert num_promoted >= num_stored


@pytest.mark.parametrize(
    "store_size",
    [
        4,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("groups", WINDOWS, ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_windows_of_evicted_prompts_are_promoted(groups, store_size):
    record = replace(COMPAT, num_layers=2 * groups.count, kv_windows=groups.to_wire())
    store = Store(compat=record, group_layers=2, block_size=store_size, num_blocks=900)
    engines = [
        WindowedEngine(groups, block_size=size, store_link=store.link())
        for size in (4, 2)
    ]
    with TieredGroup(store, *engines) as group:
        text = list(PROMPT)
        for turn in range(3):
            for engine in engines:
                expected = windowed_output(text, 8, groups)
                name = group.begin(engine, text, 8)
                assert group.tokens_of(engine, name) == expected
                pulled, _, cached = engine.kv(name)
                assert turn == 0 or pulled + cached > 0
                group.settle()
                evict_all(engine)
            text = [*text, *expected, turn]
        assert engines[0].stat("baton_kv_pulled_tokens", source="host") > 0
        for engine in engines:
            failed = engine.stat("baton_kv_transfers", outcome="failed", path="none")
            assert failed == 0


def test_successor_of_a_killed_engine_continues_with_its_kv(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    group.complete(engine, PROMPT)
    group.until_stored(PROMPT, 28)
    successor = Engine(store_link=group.store.link())
    group.replace(engine, successor)
    assert group.complete(successor, PROMPT)[1] == (28, 2, 0)


def test_resumed_stream_computes_only_what_was_not_demoted(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    name = group.begin(engine, PROMPT, 30)
    group.until(lambda: len(engine.out.tokens(name)) >= 12)
    sent = engine.out.tokens(name)
    text = [*PROMPT, *sent]
    num_stored = (len(text) - 2) // 4 * 4
    group.until_stored(text, num_stored)
    successor = Engine(store_link=group.store.link())
    group.replace(engine, successor)
    num_before = successor.executor.num_tokens
    resumed = group.begin(successor, PROMPT, 30, resumed_choices=[ResumedChoice(sent)])
    rest = group.tokens_of(successor, resumed)
    assert [*sent, *rest] == expected_output(PROMPT, 30)
    num_promoted = successor.stat("baton_kv_pulled_tokens", source="host")
    assert num_promoted >= num_stored
    num_computed = successor.executor.num_tokens - num_before
    assert num_computed == len(PROMPT) + 29 - num_promoted


def test_resumed_stream_prefers_the_store_to_a_reference_of_its_prompt(make_tiers):
    """The prefill server offers KV of the prompt, but the store has outputs, too."""
    group = make_tiers({}, {"lease_s": 60.0})
    engine, p = group.engines
    name = group.begin(engine, PROMPT, 30)
    group.until(lambda: len(engine.out.tokens(name)) >= 12)
    sent = engine.out.tokens(name)
    group.until_stored([*PROMPT, *sent], 40)
    successor = Engine(store_link=group.store.link())
    group.replace(engine, successor)
    p_name = group.begin(p, PROMPT, 1, retain_kv=True)
    group.tokens_of(p, p_name)
    resumed = group.begin(
        successor,
        PROMPT,
        30,
        resumed_choices=[ResumedChoice(sent)],
        remote=p.reference(p_name),
    )
    rest = group.tokens_of(successor, resumed)
    assert [*sent, *rest] == expected_output(PROMPT, 30)
    assert successor.stat("baton_kv_pulled_tokens", source="host") >= 40
    assert successor.stat("baton_kv_pulled_tokens", source="prefill") == 0
    group.until(lambda: p.has_all_blocks_free())
    assert p.stat("baton_leases", event="expired") == 0


@pytest.mark.parametrize("is_aborted", [False, True])
def test_resumed_stream_uses_its_reference_if_the_store_has_no_more(
    make_tiers, is_aborted
):
    group = make_tiers({"lease_s": 60.0}, {})
    p, d = group.engines
    sent = expected_output(PROMPT, 5)
    p_name = group.begin(p, PROMPT, 1, retain_kv=True)
    group.tokens_of(p, p_name)
    request = add(
        "resumed",
        PROMPT,
        30,
        resumed_choices=[ResumedChoice(sent)],
        remote=p.reference(p_name),
    )
    d.core.round([request, AbortRequest("resumed")] if is_aborted else [request])
    if not is_aborted:
        rest = group.tokens_of(d, "resumed")
        assert [*sent, *rest] == expected_output(PROMPT, 30)
        assert d.stat("baton_kv_pulled_tokens", source="prefill") == 30
    group.until(lambda: p.has_all_blocks_free())
    assert p.stat("baton_leases", event="expired") == 0


def test_kv_is_promoted_only_to_requests_with_its_salt(make_tiers):
    group = make_tiers({}, {})
    a, b = group.engines
    group.complete(a, PROMPT, cache_salt=b"one")
    group.until_stored(PROMPT, 28, salt=b"one")
    for salt in (b"", b"other"):
        assert group.complete(b, PROMPT, cache_salt=salt)[1] == (0, 30, 0)
    group.settle()
    evict_all(b)
    assert group.complete(b, PROMPT, cache_salt=b"one")[1] == (28, 2, 0)


def test_hint_comes_before_the_store_and_the_store_after_a_useless_hint(make_tiers):
    group = make_tiers({}, {})
    a, b = group.engines
    group.complete(a, PROMPT)
    group.until_stored(PROMPT, 28)
    assert group.complete(b, PROMPT, hint=a.hint(30))[1] == (28, 2, 0)
    assert b.stat("baton_kv_pulled_tokens", source="peer") == 28
    group.settle()
    evict_all(a)
    evict_all(b)
    assert group.complete(b, PROMPT, hint=a.hint(30))[1] == (28, 2, 0)
    assert b.stat("baton_kv_lookups", outcome="none") == 1
    assert b.stat("baton_kv_pulled_tokens", source="host") == 28


def test_scoring_requests_are_not_demoted(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    group.end_of(engine, group.begin(engine, PROMPT, 1, num_prompt_logprobs=0))
    group.settle()
    assert demoted(engine, "stored") == 0 and group.store.num_stored(PROMPT) == 0


def test_prompt_without_an_answer_is_kept_for_the_next_request(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    group.end_of(engine, group.begin(engine, PROMPT, 0))
    group.until_stored(PROMPT, 28)
    group.settle()
    evict_all(engine)
    assert group.complete(engine, PROMPT)[1] == (28, 2, 0)


def test_aborted_request_leaves_its_kv_in_the_store(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    name = group.begin(engine, PROMPT, 30)
    group.until(lambda: len(engine.out.tokens(name)) >= 3)
    engine.core.round([AbortRequest(name)])
    group.until_stored(PROMPT, 28)
    group.settle()
    evict_all(engine)
    assert group.complete(engine, PROMPT)[1] == (28, 2, 0)


def test_full_region_evicts_what_was_used_least_recently(make_tiers):
    group = make_tiers({}, num_blocks=20)
    (engine,) = group.engines
    prompts = [[(seed * i + seed) % VOCAB for i in range(30)] for seed in range(5, 9)]
    for prompt in prompts:
        group.complete(engine, prompt, 1)
        group.settle()
        evict_all(engine)
        first = group.store.num_stored(prompts[0])
        if prompt is not prompts[-1]:
            # A promotion counts as a use.
            assert first == 28
            assert group.complete(engine, prompts[0], 1)[1] == (28, 2, 0)
            group.settle()
            evict_all(engine)
    assert group.store.num_stored(prompts[0]) == 28
    assert group.store.num_stored(prompts[-1]) == 28
    assert group.store.num_stored(prompts[1]) < 28
    assert group.store.region.stats()["baton_host_kv_evicted_blocks"] > 0


def test_long_prompt_is_demoted_piece_by_piece(make_tiers):
    """At any time, at most an eighth of the pool's blocks is leased for demotions."""
    group = make_tiers({"max_num_batched_tokens": 64})
    (engine,) = group.engines
    num_leased = []
    lease = engine.core.scheduler.allocator.lease

    def record_lease(blocks: list[int]) -> None:
        num_leased.append(len(blocks))
        lease(blocks)

    engine.core.scheduler.allocator.lease = record_lease
    long = [(13 * i + 5) % VOCAB for i in range(60)]
    group.complete(engine, long)
    group.until_stored(long, 60)
    group.settle()
    assert max(num_leased) <= 39 * demoter.MAX_LEASED_SHARE
    assert demoted(engine, "stored") == len(num_leased) >= 3


def test_only_new_blocks_are_offered_again(make_tiers):
    group = make_tiers({"num_blocks": 200})
    (engine,) = group.engines
    answer, _ = group.complete(engine, PROMPT, 10)
    group.until_stored([*PROMPT, *answer], 36)
    group.settle()
    assert demoted(engine, "stored") >= 2
    counts = group.store.region.stats()
    block_bytes = group.store.region.memory.pool.layout.block_bytes
    assert counts["baton_host_kv_demoted_bytes"] == 9 * block_bytes


def test_two_engines_do_not_store_a_prompt_twice(make_tiers):
    group = make_tiers({}, {})
    a, b = group.engines
    names = [group.begin(engine, PROMPT, 3) for engine in (a, b)]
    for engine, name in zip((a, b), names, strict=True):
        assert group.tokens_of(engine, name) == expected_output(PROMPT, 3)
    group.until_stored(PROMPT, 28)
    group.settle()
    assert demoted(a, "stored") >= 1 and demoted(b, "stored") >= 1
    layout = group.store.region.memory.pool.layout
    stats = group.store.region.stats()
    num_stored = group.store.num_stored([*PROMPT, *expected_output(PROMPT, 3)])
    assert stats["baton_host_kv_demoted_bytes"] == num_stored * layout.token_bytes


def test_beginning_that_the_store_has_evicted_is_offered_again(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    name = group.begin(engine, PROMPT, 34)
    group.until_stored(PROMPT, 28)
    region = group.store.region
    group.until(lambda: region.is_idle)
    region.allocator.release(region.allocator.allocate(region.allocator.num_available))
    assert group.store.num_stored(PROMPT) == 0
    tokens = group.tokens_of(engine, name)
    group.until_stored([*PROMPT, *tokens], 60)
    assert region.stats()["baton_host_kv_offers{outcome=evicted}"] >= 1


# -- faults


def test_engine_continues_without_a_store_that_ends(make_tiers):
    """Leases of offers to a dead store expire, and a later store is used."""
    now_s = 1000.0
    group = make_tiers({"lease_clock": lambda: now_s})
    (engine,) = group.engines
    link = engine.store_link
    group.complete(engine, PROMPT)
    group.until_stored(PROMPT, 28)
    group.store.stall()
    name = group.begin(engine, OTHER, 3)
    assert group.tokens_of(engine, name) == expected_output(OTHER, 3)
    leased = engine.core.scheduler.allocator.counts()[BlockState.LEASED]
    assert leased <= 39 * demoter.MAX_LEASED_SHARE
    link.region = None
    group.store.resume()
    group.store.close()
    group.store = Store()
    now_s += 60.0
    group.until(engine.has_all_blocks_free)
    evict_all(engine)
    assert group.complete(engine, PROMPT)[1] == (0, 30, 0)
    group.settle()
    evict_all(engine)
    link.region = group.store.link().region
    group.complete(engine, OTHER)
    group.until_stored(OTHER, 28)


def test_suspended_store_delays_one_request_and_no_other(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    group.complete(engine, PROMPT)
    group.until_stored(PROMPT, 28)
    group.settle()
    evict_all(engine)
    group.store.is_suspended = True
    name = group.begin(engine, PROMPT, 3)
    run_round(engine.coordinator)
    engine.clock.skip(PullSettings().lookup_timeout_s)
    assert group.tokens_of(engine, name) == expected_output(PROMPT, 3)
    assert engine.stat("baton_host_kv_lookups", outcome="late") == 1
    assert group.complete(engine, OTHER)[1] == (0, 30, 0)
    assert (
        sum(
            engine.stat("baton_host_kv_lookups", outcome=outcome)
            for outcome in ("found", "none", "late")
        )
        == 2
    )  # the first prompt was not in the store
    group.store.is_suspended = False
    group.settle()


def test_failed_reads_of_the_store_lose_only_the_demotion(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    for agent in group.store.agents:
        agent.fail(1)
    group.complete(engine, PROMPT)
    group.until(lambda: demoted(engine, "dropped") >= 1)
    group.settle()
    assert group.store.region.demotions.outcomes["failed"] == 1
    assert group.complete(engine, OTHER)[1] == (0, 30, 0)
    group.until_stored(OTHER, 28)


def test_hanging_reads_of_the_store_are_quarantined(make_tiers):
    settings = PullSettings(pull_timeout_s=0.05, drain_grace_s=0.01)
    group = make_tiers({}, settings=settings)
    (engine,) = group.engines
    group.store.stall()
    group.complete(engine, PROMPT)
    region = group.store.region
    group.until(lambda: region.allocator.num_quarantined > 0)
    group.store.resume()
    group.until(lambda: region.allocator.num_quarantined == 0)
    assert group.store.num_stored(PROMPT) == 0
    group.settle()
    evict_all(engine)
    assert group.complete(engine, PROMPT)[1] == (0, 30, 0)


def test_spoiled_bytes_reach_neither_the_store_nor_an_engine(make_tiers):
    group = make_tiers({"verify": "all"}, kv_verify="all")
    (engine,) = group.engines
    for agent in group.store.agents:
        agent.spoil(1)
    group.complete(engine, PROMPT)
    group.until(lambda: demoted(engine, "dropped") >= 1)
    group.settle()
    assert group.store.num_stored(PROMPT) < 28
    group.complete(engine, OTHER)
    group.until_stored(OTHER, 28)
    group.settle()
    evict_all(engine)
    engine.movers.agents[0].spoil(1)
    assert group.complete(engine, OTHER)[1] == (0, 30, 0)
    assert engine.stat("baton_kv_verify_failures") == 1


def test_store_of_another_model_is_not_used(make_tiers):
    group = make_tiers({"compat": OTHER_COMPAT})
    (engine,) = group.engines
    group.complete(engine, PROMPT)
    group.until(lambda: demoted(engine, "dropped") >= 1)
    evict_all(engine)
    assert group.complete(engine, PROMPT)[1] == (0, 30, 0)
    assert group.store.num_stored(PROMPT) == 0


def test_full_queues_drop_the_oldest_offers(make_tiers, monkeypatch):
    monkeypatch.setattr(demoter, "MAX_QUEUED", 2)
    monkeypatch.setattr(demotions, "MAX_WAITING", 1)
    group = make_tiers({"num_blocks": 200})
    (engine,) = group.engines
    group.store.stall()
    prompts = [[(seed * i + seed) % VOCAB for i in range(30)] for seed in range(5, 17)]
    for prompt in prompts:
        group.complete(engine, prompt, 1)
    assert demoted(engine, "dropped") > 0
    group.store.resume()
    group.settle()
    group.complete(engine, OTHER, 1)
    group.until_stored(OTHER, 28)


def test_hung_store_keeps_no_blocks_from_waiting_requests(make_tiers):
    """Each request needs all blocks, including blocks that are leased to the store."""
    group = make_tiers({"num_blocks": 17, "max_model_len": 64})
    (engine,) = group.engines
    group.store.stall()
    for prompt in (PROMPT, OTHER):
        name = group.begin(engine, prompt, 34)
        assert group.tokens_of(engine, name) == expected_output(prompt, 34)
    assert demoted(engine, "dropped") >= 1
    group.store.resume()
