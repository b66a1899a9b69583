"""Placement: any load estimates lead to usable servers, and sensible estimates lead to
the cheapest servers.
"""

import math
import random
from collections import OrderedDict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.placement.placement import CachedPrefixes, choose, emptiest_server
from proxy.placement.prefix_index import PrefixIndex
from proxy.placement.request_profile import RequestProfile
from proxy.placement.server_load import HostTier, ServerLoad

numbers = st.floats(0) | st.sampled_from([0.0, 1e-320, 1e9, math.nan])
loads = st.builds(
    ServerLoad,
    index=st.just(0),
    num_prompts=st.integers(0, 10**9),
    free_at=numbers | numbers.map(lambda seconds: -seconds),
    skippable_s=st.lists(numbers, min_size=12, max_size=12),
    streams=st.integers(0, 10**9),
    incoming_streams=st.integers(0, 10**9),
    kv_tokens=st.integers(0, 10**9),
    kv_capacity=st.none() | st.integers(-5, 10**7),
    token_s=numbers,
    base_step_s=numbers,
    target_step_s=numbers.filter(bool),
    host_tier=st.none() | st.builds(HostTier, st.integers(0, 1), numbers, numbers),
)


def number_servers(servers: list[ServerLoad], first: int) -> None:
    for index, server in enumerate(servers, first):
        server.index = index


@given(
    st.lists(loads, max_size=4),
    st.lists(loads, min_size=1, max_size=4),
    st.integers(1, 10**6),
    st.dictionaries(st.integers(0, 9), st.integers(0, 3000)),
    st.tuples(numbers, numbers, numbers),
    st.dictionaries(st.integers(0, 1), numbers),
)
# Here peers can lend more blocks than the prompt has.
@example([], [ServerLoad(0, token_s=2e16)], 1, {}, (0.0, 1.5e135, 0.0), {})
def test_any_load_estimates_lead_to_an_allowed_server(
    prefills, decodes, tokens, depths, times, stored_tokens
):
    number_servers(prefills, 0)
    number_servers(decodes, len(prefills))
    now, lendable_blocks, lender_wait_s = times
    profile = RequestProfile(tokens, range(tokens // 512))
    cached = CachedPrefixes(depths, lendable_blocks, lender_wait_s, stored_tokens)
    placement = choose(profile, prefills, decodes, cached, now)
    assert placement.decode in [server.index for server in decodes]
    assert placement.prefill in [None, *(server.index for server in prefills)]


IDLE = ServerLoad(1)
BUSY = ServerLoad(2, streams=32, kv_tokens=32_000)


def queued(tokens: int) -> ServerLoad:
    """A prefill server with this many prompt tokens in its queue."""
    return ServerLoad(0, free_at=tokens * 25e-6)


def decoding(streams: int, step_s: float = 0.005, index: int = 1) -> ServerLoad:
    """A decode server with this many streams of 1,000 tokens."""
    return ServerLoad(
        index, streams=streams, kv_tokens=1000 * streams, base_step_s=step_s
    )


@pytest.mark.parametrize(
    ("tokens", "prefills", "decodes", "cached", "expected"),
    [
        # The server with the shorter queue computes, unless the other one has a cached
        # prefix that saves more time than its queue costs.
        (4096, [queued(100_000), IDLE], [BUSY], {}, (1, 2)),
        (8192, [queued(4000), IDLE], [BUSY], {0: 12}, (0, 2)),
        (8192, [queued(30_000), IDLE], [BUSY], {0: 12}, (1, 2)),
        # A prompt that is nearly all cached goes to the decode server alone.
        (8192, [ServerLoad(0)], [decoding(8)], {1: 16}, (None, 1)),
        # Decode servers compute prompts too, but only while prefill servers are the
        # bottleneck.
        (4096, [queued(0)], [decoding(16)], {}, (0, 1)),
        (4096, [queued(200_000)], [decoding(16)], {}, (None, 1)),
        # Of two decode servers, the one with the shorter steps computes the prompt.
        (
            2048,
            [queued(60_000)],
            [decoding(64, step_s=0.024), decoding(64, index=2)],
            {},
            (None, 2),
        ),
        # A decode server gets prompts only while its streams leave it time for prompts.
        (128, [queued(24_000)], [decoding(64, step_s=0.004)], {}, (None, 1)),
        (128, [queued(24_000)], [decoding(64, step_s=0.024)], {}, (0, 1)),
    ],
)
def test_cheapest_servers_are_chosen(tokens, prefills, decodes, cached, expected):
    placement = choose(
        RequestProfile(tokens), prefills, decodes, CachedPrefixes(cached)
    )
    assert (placement.prefill, placement.decode) == expected


@pytest.mark.parametrize(("lendable_blocks", "prefill"), [(0, 0), (15, 1)])
def test_prompt_is_not_queued_for_a_prefix_that_can_be_pulled(lendable_blocks, prefill):
    cached = CachedPrefixes({0: 15}, lendable_blocks)
    servers = [queued(12_000), IDLE]
    placement = choose(RequestProfile(8192), servers, [BUSY], cached)
    assert placement == (prefill, 2)


def test_short_prompt_does_not_wait_for_long_prompts_that_have_not_started():
    prefill = ServerLoad(0, free_at=0.8)
    decode = decoding(32)
    for _ in range(4):
        prefill.add_queued(RequestProfile(8192).size_class, 0.2)
    for tokens, expected in ((128, 0), (2048, None), (8192, None)):
        placement = choose(RequestProfile(tokens), [prefill], [decode])
        assert placement.prefill == expected, tokens
    for _ in range(4):
        prefill.add_queued(RequestProfile(8192).size_class, -0.2)
    assert prefill.skippable_s == ServerLoad(1).skippable_s


@pytest.mark.parametrize(
    ("num_streams", "num_queued", "expected"),
    [(200, 0, 0), (40, 0, 0), (16, 0, None), (0, 0, None), (200, 8, None)],
)
def test_idle_prefill_server_computes_a_prefix_that_only_busy_decode_servers_have(
    num_streams, num_queued, expected
):
    """A decode server has most of the prompt cached and would compute 700 tokens.

    With few streams, the decode server computes these tokens in one step of 18 ms,
    within the limit of 25 ms for a step. The prefill server would need 325 ms for the
    whole prompt: the client would wait longer, and the streams would gain little. With
    many streams, the delay of all streams together costs more than the prefill, and
    later prompts can use the prefix that the prefill server then has. A prefill server
    with a queue has no time to compute prefixes that are cached elsewhere.
    """
    prefill = ServerLoad(0, num_prompts=num_queued, free_at=0.05 * num_queued)
    decode = decoding(num_streams)
    profile = RequestProfile(12_988, range(25))
    placement = choose(profile, [prefill], [decode], CachedPrefixes({1: 24}))
    assert placement.prefill == expected


@pytest.mark.parametrize(("num_prompts", "prefill"), [(0, 0), (1, None)])
def test_prefill_counts_twice_on_a_server_with_other_prompts(num_prompts, prefill):
    """The prefill server is about to finish its prompts, so a new prompt need not wait.

    On a prefill server with other prompts, the new prompt would delay prompts that
    arrive later. That costs more than delaying two streams of the decode server.
    """
    server = ServerLoad(0, num_prompts=num_prompts, free_at=0.0)
    placement = choose(RequestProfile(8192), [server], [decoding(2)])
    assert placement.prefill == prefill


def test_idle_prefill_server_copies_no_prefix_of_another_prefill_server():
    """The prompt waits for the server with its prefix, although the wait takes 8 ms
    longer than computing the prompt on the idle server.
    """
    idle = ServerLoad(0)
    cached = ServerLoad(1, num_prompts=1, free_at=0.2)
    profile = RequestProfile(8192)
    placement = choose(
        profile, [idle, cached], [decoding(64, index=2)], CachedPrefixes({1: 15})
    )
    assert placement.prefill == 1


def test_server_without_enough_kv_is_the_last_choice():
    full = ServerLoad(1, streams=4, kv_tokens=9000, kv_capacity=10_000)
    free = ServerLoad(2, streams=40, kv_tokens=90_000)
    assert emptiest_server(RequestProfile(2048), [full, free]) == 1


class BoundedCaches:
    """A simple reference for PrefixIndex: the blocks of each server, least recently
    used first.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, OrderedDict[int, None]] = {}

    def add(self, server: int, hashes: list[int], max_blocks: int) -> None:
        cache = self.blocks.setdefault(server, OrderedDict())
        for block in reversed(hashes):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > max_blocks:
            cache.popitem(last=False)

    def depths(self, hashes: list[int]) -> dict[int, int]:
        depths = {}
        for server, cache in self.blocks.items():
            missing = (i for i, block in enumerate(hashes) if block not in cache)
            depth = next(missing, len(hashes))
            if depth:
                depths[server] = depth
        return depths


@given(st.integers(0, 2**32))
def test_index_equals_bounded_caches(seed):
    rng = random.Random(seed)
    index = PrefixIndex()
    caches = BoundedCaches()
    prompts = [[1, 2, 3, 4], [1, 2, 5], [6], [6, 7, 8, 9, 10], []]
    for _ in range(30):
        server = rng.randrange(3)
        prompt = rng.choice(prompts)
        if rng.random() < 0.1:
            index.remove_server(server)
            caches.blocks.pop(server, None)
        else:
            index.add(server, prompt, 6)
            caches.add(server, prompt, 6)
        query = rng.choice(prompts)
        assert index.depths(query) == caches.depths(query)
    index.add(0, [])  # also deletes the blocks of removed servers
    assert len(index) == sum(map(len, caches.blocks.values()))


def test_blocks_of_removed_server_are_hidden_at_once_and_deleted_step_by_step():
    index = PrefixIndex()
    prompt = range(10_000)
    index.add(0, prompt)
    index.remove_server(0)
    num_additions = 0
    while not index.depths(prompt):
        num_before = len(index)
        index.add(0, prompt)
        num_additions += 1
        assert num_before - len(index) < 2_000
    assert num_additions > 5 and index.depths(prompt) == {0: 10_000}
    assert len(index) == 10_000


def test_bounded_index_evicts_from_the_server_with_the_largest_cache():
    index = PrefixIndex(max_blocks=10)
    index.add(0, [1, 2])
    index.add(1, range(100, 140))
    assert len(index) == 10
    assert index.depths([1, 2]) == {0: 2} and index.depths(range(100, 140)) == {1: 8}
