"""The KV store of a host, and prompts that requests mark for retention."""

from protocol.messages import Retention
from tests.engine.store.test_region import evict_all
from tests.rigs.engines import Engine
from tests.rigs.shadow import VOCAB
from tests.rigs.stores import Store, TieredGroup


def test_store_evicts_retained_prompts_last():
    store = Store(num_blocks=20)
    engine = Engine(store_link=store.link())
    prompts = [[(seed * i + seed) % VOCAB for i in range(30)] for seed in range(5, 9)]
    retained = {"retention": [Retention(30, 60.0)], "share": "a key"}
    with TieredGroup(store, engine) as group:
        for number, prompt in enumerate(prompts):
            group.complete(engine, prompt, 1, **({} if number else retained))
            group.settle()
            evict_all(engine)
        num_stored = [store.num_stored(prompt) for prompt in prompts]
    assert num_stored[0] == num_stored[-1] == 28
    assert num_stored[1] < 28
