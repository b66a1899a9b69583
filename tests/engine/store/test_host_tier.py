"""What an engine knows of its store: the report for proxies, and lookups whose answer
is that the store has no more than the engine.
"""

from tests.rigs.engines import Engine
from tests.rigs.shadow import VOCAB
from tests.rigs.stores import Store, TieredGroup

PROMPT = [(7 * i) % VOCAB for i in range(30)]
OTHER = [(11 * i + 3) % VOCAB for i in range(30)]


def test_engines_of_one_store_report_it_with_what_pulls_from_it_cost():
    store = Store()
    reader = Engine(store_link=store.link())
    other_reader = Engine(block_size=2, store_link=store.link())
    without_pulls = Engine(mode="never", store_link=store.link())
    with TieredGroup(store, reader, other_reader, without_pulls):
        for engine in (reader, other_reader):
            report = engine.core.connector.host_tier_report()
            assert report.store == store.region.engine_id
            assert report.num_tokens == store.region.num_tokens
            assert report.start_s > 0 and report.token_s > 0
        assert without_pulls.core.connector.host_tier_report() is None
        reader.store_link.region = None
        assert reader.core.connector.host_tier_report() is None


def test_cached_prefix_is_the_last_to_be_evicted_during_its_lookup():
    """The engine computes what it has evicted when the answer arrives."""
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
