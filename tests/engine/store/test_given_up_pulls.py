"""A pull from another engine is given up before it begins. The tokens that the store
has are then pulled from the store instead of being computed.
"""

import threading
from typing import Any

from msgspec.structs import replace

from engine.text.grammar import _NUM_COMPILING_THREADS
from protocol.messages import AbortRequest, Grammar, RemotePrefill, SamplingParams
from tests.engine.conftest import compiling
from tests.engine.store.test_region import evict_all
from tests.rigs.engines import Engine
from tests.rigs.shadow import VOCAB, expected_output
from tests.rigs.stores import Store, TieredGroup

PROMPT = [(7 * i) % VOCAB for i in range(30)]


def lend(
    group: TieredGroup, engine: Engine, prompt: list[int], num_stored: int
) -> RemotePrefill:
    """Compute a prompt, and return the reference to its KV when the store has it."""
    group.until_readable(engine)
    name = group.begin(engine, prompt, 1, retain_kv=True)
    group.end_of(engine, name)
    group.until_stored(prompt, num_stored)
    return engine.reference(name)


def test_pools_that_wait_for_each_other_go_on_with_the_kv_of_the_store(monkeypatch):
    """Each engine waits for blocks that are leased to a request of the other engine."""
    monkeypatch.setattr("engine.kv.stalls._DEADLOCK_S", 0.05)
    store = Store(block_size=16, max_model_len=200, num_blocks=40)
    size: dict[str, Any] = {"num_blocks": 17, "block_size": 16, "max_model_len": 200}
    a, b = (Engine(**size, store_link=store.link()) for _ in range(2))
    # Each prompt needs more than half of a pool.
    prompts = {a: [7] * 140, b: [8] * 140}
    with TieredGroup(store, a, b) as group:
        references = {
            a: lend(group, b, prompts[a], 128),
            b: lend(group, a, prompts[b], 128),
        }
        names = {
            engine: group.begin(engine, prompts[engine], remote=references[engine])
            for engine in (a, b)
        }
        for engine in (a, b):
            group.tokens_of(engine, names[engine])
        # Both engines may give up their pulls at the same time.
        assert all(engine.kv(names[engine])[0] >= 128 for engine in (a, b))
        pulled = [e.stat("baton_kv_pulled_tokens", source="host") for e in (a, b)]
        assert set(pulled) in ({0, 128}, {128})


def test_prompt_of_a_server_that_was_restarted_comes_from_the_store():
    store = Store()
    lender, reader = (Engine(store_link=store.link()) for _ in range(2))
    with TieredGroup(store, lender, reader) as group:
        reference = lend(group, lender, PROMPT, 28)
        stale = replace(reference, incarnation=reference.incarnation[::-1])
        assert group.complete(reader, PROMPT, remote=stale)[1] == (28, 2, 0)
        group.complete(reader, PROMPT, remote=reference)  # ends the lease


def test_grammar_that_is_compiled_during_the_lookup_admits_its_request_only_once():
    store = Store()
    lender, reader = (Engine(store_link=store.link()) for _ in range(2))
    unblock = threading.Event()
    anything = Grammar("any")
    sampling = SamplingParams(temperature=0.0, grammar=anything)
    with compiling() as compiler, TieredGroup(store, lender, reader) as group:
        reader.core.grammars.compiler = compiler
        reference = lend(group, lender, PROMPT, 28)
        group.complete(reader, PROMPT, remote=reference)  # ends the lease
        group.settle()
        evict_all(reader)
        for _ in range(_NUM_COMPILING_THREADS):
            compiler._compiling.submit(unblock.wait)
        store.is_suspended = True
        name = group.begin(reader, PROMPT, 6, remote=reference, sampling=sampling)
        group.until(lambda: bool(reader.coordinator._lookups._open))
        unblock.set()
        compiler.compile(anything).exception()
        group.round(3)
        store.is_suspended = False
        assert group.tokens_of(reader, name) == expected_output(PROMPT, 6)
        assert reader.kv(name) == (28, 2, 0)


def test_store_is_not_asked_if_its_kv_has_become_slower_than_computing():
    """The engine of the hint is queried first, and does not have the prompt."""
    store = Store()
    other, reader = (Engine(store_link=store.link(), mode="auto") for _ in range(2))
    with TieredGroup(store, other, reader) as group:
        group.complete(other, PROMPT[::-1])  # connects to the store
        name = group.begin(reader, PROMPT, hint=other.hint(30))
        reader.rates.record_compute(1000, 1e-6)  # computing takes almost no time
        group.tokens_of(reader, name)
        assert reader.stat("baton_kv_lookups", outcome="none") == 1
        assert reader.stat("baton_host_kv_lookups", outcome="none") == 0


def test_request_is_aborted_while_it_is_looked_up_in_the_store():
    store = Store()
    lender, reader = (Engine(store_link=store.link()) for _ in range(2))
    with TieredGroup(store, lender, reader) as group:
        reference = lend(group, lender, PROMPT, 28)
        stale = replace(reference, incarnation=reference.incarnation[::-1])
        store.is_suspended = True
        name = group.begin(reader, PROMPT, remote=stale)
        group.until(lambda: bool(reader.coordinator._lookups._open))
        reader.core.round([AbortRequest(name)])
        store.is_suspended = False
        assert group.complete(reader, PROMPT, remote=reference)[1] == (30, 0, 0)
