"""The store of an engine as a second tier of its KV cache: reports for proxies,
lookups, mapping of the region, and demotions.
"""

import math

from msgspec.structs import replace

from protocol.messages import AbortRequest
from tests.engine.store.test_region import evict_all
from tests.rigs.engines import Engine, Group
from tests.rigs.shadow import VOCAB
from tests.rigs.stores import FixedLink, Store, TieredGroup

PROMPT = [(7 * i) % VOCAB for i in range(30)]
OTHER = [(11 * i + 3) % VOCAB for i in range(30)]


def test_engines_of_one_store_report_it_with_what_pulls_from_it_cost():
    store = Store()
    reader = Engine(store_link=store.link())
    other_reader = Engine(block_size=2, store_link=store.link())
    without_pulls = Engine(mode="never", store_link=store.link())
    with TieredGroup(store, reader, other_reader, without_pulls) as group:
        for engine in (reader, other_reader):
            group.until_readable(engine)
            report = engine.core.connector.host_tier_report()
            assert report.store == store.region.engine_id
            assert report.num_tokens == store.region.num_tokens
            assert report.start_s > 0 and report.token_s > 0
        assert without_pulls.core.connector.host_tier_report() is None
        reader.store_link.region = None
        assert reader.core.connector.host_tier_report() is None


def test_cached_prefix_is_the_last_to_be_evicted_during_its_lookup():
    """Blocks that the engine evicts before the store answers must be recomputed."""
    store = Store()
    engine = Engine(store_link=store.link())
    with TieredGroup(store, engine) as group:
        for prompt in (PROMPT, OTHER):
            group.complete(engine, prompt, 1)
            group.settle()
        store.is_suspended = True
        name = group.begin(engine, [*PROMPT[:28], *range(16)], 3)
        group.round()
        allocator = engine.core.scheduler.allocator
        num_others = allocator.num_available - 28 // engine.config.tokens_per_block
        allocator.release(allocator.allocate(num_others))
        store.is_suspended = False
        group.tokens_of(engine, name)
        assert engine.stat("baton_host_kv_lookups", outcome="none") == 3
        assert engine.kv(name) == (0, 16, 28)


def test_requests_are_computed_while_the_region_is_being_mapped():
    """Locking the memory of a large region for a GPU takes seconds."""
    store = Store()
    link = FixedLink()
    engine = Engine(store_link=link, launch_bytes=1 << 20)
    (placer,) = engine.movers.placers
    placer.may_open.clear()
    with TieredGroup(store, engine) as group:
        region = store.link().region
        link.region = region
        group._connected.add((engine, region))  # requests do not wait for the region
        group.until(lambda: engine.coordinator.handshake_counts()["ok"] == 1)
        for prompt in (PROMPT, OTHER):
            assert group.complete(engine, prompt, 1)[1] == (0, 30, 0)
            group.until_stored(prompt, 28)
        assert engine.stat("baton_host_kv_lookups", outcome="late") == 0
        assert engine.core.connector.host_tier_report() is None
        assert not placer.mapped
        placer.may_open.set()
        group.until(lambda: engine.core.connector.host_tier_report() is not None)
        evict_all(engine)
        assert group.complete(engine, PROMPT, 1)[1] == (28, 2, 0)


def test_pull_that_begins_during_mapping_waits_for_it_or_ends_when_it_is_given_up():
    lender = Engine()
    reader = Engine(launch_bytes=1 << 20)
    (placer,) = reader.movers.placers
    placer.may_open.clear()
    with Group(lender, reader) as group:
        group.complete(lender, PROMPT, 1)
        names = [group.begin(reader, PROMPT, 1, hint=lender.hint(30)) for _ in range(2)]
        group.until(lambda: len(reader.core.scheduler.receiving) == 2)
        reader.core.round([AbortRequest(names[0])])
        group.until(lambda: len(reader.core.scheduler.receiving) == 1)
        placer.may_open.set()
        group.tokens_of(reader, names[1])
        assert reader.kv(names[1]) == (28, 2, 0)


def test_drain_can_see_when_the_store_has_all_that_was_offered():
    store = Store()
    engine = Engine(store_link=store.link())
    with TieredGroup(store, engine) as group:
        store.is_suspended = True
        for prompt in (PROMPT, OTHER):
            group.complete(engine, prompt, 1)
        assert engine.stat("baton_host_kv_demotions_pending") == 2
        store.is_suspended = False
        group.until(lambda: engine.stat("baton_host_kv_demotions_pending") == 0)
        # The engine has confirmed the last offers, and offers nothing more. The store
        # may still have to read the confirmation.
        for prompt in (PROMPT, OTHER):
            group.until_stored(prompt, 28)


def test_lookup_ends_when_a_pull_can_save_no_more_time():
    """The next request queries the store again, because the lookup was shorter than
    MIN_STALL_S."""
    store = Store()
    engine = Engine(mode="auto", store_link=store.link())
    with TieredGroup(store, engine) as group:
        group.complete(engine, PROMPT, 1)
        group.until_stored(PROMPT, 28)
        group.settle()
        evict_all(engine)
        engine.rates.seconds_per_token = 0.002
        store.is_suspended = True
        name = group.begin(engine, PROMPT, 1)
        group.until(lambda: bool(engine.coordinator._lookups._open))
        engine.clock.skip(0.07)
        group.tokens_of(engine, name)
        assert engine.kv(name) == (0, 30, 0)
        assert engine.stat("baton_host_kv_lookups", outcome="late") == 1
        store.is_suspended = False
        group.settle()
        evict_all(engine)
        engine.rates.seconds_per_token = 1.0
        assert group.complete(engine, PROMPT, 1)[1] == (28, 2, 0)


def test_store_that_was_paused_meanwhile_is_not_queried_after_another_engine():
    """The engine of the hint does not have the prompt, but the store has it."""
    store = Store()
    a, b = Engine(), Engine(store_link=store.link())
    with TieredGroup(store, a, b) as group:
        group.complete(b, PROMPT, 1)
        group.until_stored(PROMPT, 28)
        for is_paused, kv in [(False, (28, 2, 0)), (True, (0, 30, 0))]:
            group.settle()
            evict_all(b)
            name = group.begin(b, PROMPT, 1, hint=a.hint(28))
            group.until(lambda: bool(b.coordinator._lookups._open))
            if is_paused:
                b.core.connector._borrower._lookups._store_paused_until_s = math.inf
            group.tokens_of(b, name)
            assert b.kv(name) == kv


def test_next_piece_of_a_prompt_waits_for_the_pull_of_the_one_before():
    """The engine offers the next piece before the region has processed the end of the
    first pull."""
    store = Store()
    engine = Engine(store_link=store.link())
    store_demotions = store.region.demotions
    with TieredGroup(store, engine) as group:
        group.until_readable(engine)
        store.stall()
        name = group.begin(engine, PROMPT, 1)
        group.until(lambda: len(store_demotions._active) == 1)
        (active,) = store_demotions._active.values()
        remote = replace(active.offer.remote, lease_id="ab" * 16)
        store_demotions.add(replace(active.offer, remote=remote, first_token=4), 0.0)
        store_demotions.begin_pulls(0.0)
        assert store_demotions.outcomes["evicted"] == 0
        assert store_demotions.num_waiting == 1
        store.resume()
        group.tokens_of(engine, name)
