"""KV of engines is demoted to a region, and promoted from it after it was evicted, or
after its engine has ended.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.rigs.engines import Engine
from tests.rigs.shadow import VOCAB
from tests.rigs.stores import Store, TieredGroup

PROMPT = [(7 * i) % VOCAB for i in range(30)]
OTHER = [(11 * i + 3) % VOCAB for i in range(30)]
MakeTiers = Callable[..., TieredGroup]


@pytest.fixture
def make_tiers() -> Iterator[MakeTiers]:
    with ExitStack() as stack:

        def make(*options: dict[str, Any], **store_options: Any) -> TieredGroup:
            store = Store(**store_options)
            engines = [Engine(store_link=store.link(), **each) for each in options]
            return stack.enter_context(TieredGroup(store, *engines))

        yield make


def evict_all(group: TieredGroup, engine: Engine) -> None:
    """Evict all cached blocks of an engine."""
    allocator = engine.core.scheduler.allocator
    allocator.release(allocator.allocate(allocator.num_available))


def test_evicted_prompt_is_promoted_and_not_computed_again(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    answer, kv = group.complete(engine, PROMPT, 6)
    assert kv == (0, 30, 0)
    num_tokens = (len(PROMPT) + len(answer) - 1) // 4 * 4
    group.until_stored([*PROMPT, *answer], num_tokens)
    group.settle()
    evict_all(group, engine)
    second = [*PROMPT, *answer, 1, 2, 3]
    _, kv = group.complete(engine, second)
    assert kv == (num_tokens, len(second) - num_tokens, 0)
    assert engine.stat("baton_host_kv_lookups", outcome="found") == 1
    assert engine.stat("baton_kv_pulled_tokens", source="host") == num_tokens


def test_successor_of_a_killed_engine_continues_with_its_kv(make_tiers):
    group = make_tiers({})
    (engine,) = group.engines
    group.complete(engine, PROMPT)
    group.until_stored(PROMPT, 28)
    successor = Engine(store_link=group.store.link())
    group.replace(engine, successor)
    assert group.complete(successor, PROMPT)[1] == (28, 2, 0)
