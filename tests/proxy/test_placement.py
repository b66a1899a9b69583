"""Placement: always a usable answer, whatever is known; the cheaper server by what is known."""

import math
import random
from collections import OrderedDict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.placement import Ask, Load, PrefixIndex, cheapest_decode, place

numbers = st.floats(0) | st.sampled_from([0.0, 1e-320, 1e9, math.nan])
loads = st.builds(
    Load, index=st.just(0), prompts=st.integers(0, 10**9),
    free_at=numbers | numbers.map(lambda seconds: -seconds),
    passed_s=st.lists(numbers, min_size=12, max_size=12), running=st.integers(0, 10**9),
    held=st.integers(0, 10**9), capacity=st.none() | st.integers(-5, 10**7), token_s=numbers,
    step_s=numbers, target_s=numbers.filter(bool),
)  # fmt: skip


def servers(found: list[Load], first: int) -> list[Load]:
    for index, load in enumerate(found, first):
        load.index = index
    return found


@given(
    st.lists(loads, max_size=4),
    st.lists(loads, min_size=1, max_size=4),
    st.integers(1, 10**6),
    st.dictionaries(st.integers(0, 9), st.integers(0, 3000)),
    st.tuples(numbers, numbers, numbers),
)
@example(
    [], [Load(0, token_s=2e16)], 1, {}, (0.0, 1.5e135, 0.0)
)  # more lent than there is
def test_any_knowledge_leads_to_a_server_that_may_be_used(
    prefills, decodes, tokens, depths, ask
):
    servers(decodes, len(servers(prefills, 0)))
    now, lent, lent_s = ask
    asked = Ask(tokens, range(tokens // 512), now=now, lent=lent, lent_s=lent_s)
    found = place(asked, prefills, decodes, depths)
    assert found.decode in [each.index for each in decodes]
    assert found.prefill in [None, *(each.index for each in prefills)]


IDLE, BUSY = Load(1), Load(2, running=32, held=32_000)


def queued(tokens: int) -> Load:
    return Load(0, free_at=tokens * 25e-6)


@pytest.mark.parametrize(
    ("ask", "prefills", "decodes", "depths", "expected"),
    [
        # the shorter queue computes, unless a cached prefix is worth the longer one
        (Ask(4096), [queued(100_000), IDLE], [BUSY], {}, (1, 2)),
        (Ask(8192), [queued(4000), IDLE], [BUSY], {0: 12}, (0, 2)),
        (Ask(8192), [queued(30_000), IDLE], [BUSY], {0: 12}, (1, 2)),
        # what can be pulled need not be queued for
        (Ask(8192, lent=0), [queued(12_000), IDLE], [BUSY], {0: 15}, (0, 2)),
        (Ask(8192, lent=15), [queued(12_000), IDLE], [BUSY], {0: 15}, (1, 2)),
        # what is nearly all cached goes to the decode server alone
        (Ask(8192), [Load(0)], [Load(1, running=8, held=8000)], {1: 16}, (None, 1)),
        # decode servers help while prefill servers are the bottleneck
        (Ask(4096), [queued(0)], [Load(1, running=16, held=16_000)], {}, (0, 1)),
        (Ask(4096), [queued(200_000)], [Load(1, running=16, held=16_000)], {}, (None, 1)),
        # but not those whose streams are near their limit, or take all their time
        (Ask(2048), [queued(60_000)],
         [Load(1, running=64, held=60_000, step_s=0.024), Load(2, running=64, held=64_000)], {},
         (None, 2)),
        (Ask(128), [queued(24000)], [Load(1, running=64, held=60000, step_s=0.004)], {}, (None, 1)),
        (Ask(128), [queued(24000)], [Load(1, running=64, held=60000, step_s=0.024)], {}, (0, 1)),
    ],
)  # fmt: skip
def test_the_cheaper_servers_are_chosen(ask, prefills, decodes, depths, expected):
    found = place(ask, prefills, decodes, depths)
    assert (found.prefill, found.decode) == expected


def test_a_short_prompt_waits_for_no_long_one_that_is_not_under_way():
    prefill, decode = Load(0, free_at=0.8), Load(1, running=32, held=32_000)
    for _ in range(4):
        prefill.queue(Ask(8192).size, 0.2)
    for tokens, expected in ((128, 0), (2048, None), (8192, None)):
        found = place(Ask(tokens), [prefill], [decode], {})
        assert found.prefill == expected, tokens
    for _ in range(4):
        prefill.queue(Ask(8192).size, -0.2)
    assert prefill.passed_s == Load(1).passed_s


@pytest.mark.parametrize(
    ("running", "waits", "buys"), [(16, 0, 1), (0, 0, 0), (16, 2, 0)]
)
def test_an_idle_prefill_server_computes_in_time_what_only_busy_decodes_have(
    running, waits, buys
):
    """Each prompt alone would go to the decode server, and so would all that follow."""
    prefill = Load(0, prompts=waits, free_at=0.05 * waits)
    decode = Load(1, running=running, held=4000 * running)
    asks = [Ask(12_988, [*range(24), 1000 + n]) for n in range(60)]
    found = [place(ask, [prefill], [decode], {1: 24}) for ask in asks]
    bought = sum(each.prefill == 0 for each in found)
    assert 1 < bought < 20 if buys else bought == 0


def test_a_server_without_room_for_the_kv_is_the_last_choice():
    full, free = (
        Load(1, running=4, held=9000, capacity=10_000),
        Load(2, running=40, held=90_000),
    )
    assert cheapest_decode(Ask(2048), [full, free]) == 1


class Caches:
    """What PrefixIndex stands for: each server's blocks, the one used longest ago first."""

    def __init__(self) -> None:
        self.blocks: dict[int, OrderedDict[int, None]] = {}

    def add(self, server: int, hashes: list[int], most: int) -> None:
        kept = self.blocks.setdefault(server, OrderedDict())
        for each in reversed(hashes):
            kept[each] = None
            kept.move_to_end(each)
        while len(kept) > most:
            kept.popitem(last=False)

    def depths(self, hashes: list[int]) -> dict[int, int]:
        found = {}
        for server, kept in self.blocks.items():
            depth = next(
                (i for i, each in enumerate(hashes) if each not in kept), len(hashes)
            )
            if depth:
                found[server] = depth
        return found


@given(st.integers(0, 2**32))
def test_the_index_is_what_bounded_caches_hold(seed):
    rng = random.Random(seed)
    index, caches = PrefixIndex(), Caches()
    prompts = [[1, 2, 3, 4], [1, 2, 5], [6], [6, 7, 8, 9, 10], []]
    for _ in range(30):
        server, prompt = rng.randrange(3), rng.choice(prompts)
        if rng.random() < 0.1:
            index.forget(server)
            caches.blocks.pop(server, None)
        else:
            index.add(server, prompt, 6)
            caches.add(server, prompt, 6)
        asked = rng.choice(prompts)
        assert index.depths(asked) == caches.depths(asked)
    index.add(0, [])  # which lets go of what was forgotten
    assert len(index) == sum(map(len, caches.blocks.values()))


def test_what_a_server_had_is_hidden_at_once_and_goes_a_little_with_each_addition():
    index, prompt = PrefixIndex(), range(10_000)
    index.add(0, prompt)
    index.forget(0)
    num_additions = 0
    while not index.depths(prompt):
        before = len(index)
        index.add(0, prompt)
        num_additions += 1
        assert before - len(index) < 2_000
    assert num_additions > 5 and index.depths(prompt) == {0: 10_000}
    assert len(index) == 10_000


def test_the_index_is_bounded_and_takes_from_the_server_with_the_most():
    index = PrefixIndex(max_blocks=10)
    index.add(0, [1, 2])
    index.add(1, range(100, 140))
    assert len(index) == 10
    assert index.depths([1, 2]) == {0: 2} and index.depths(range(100, 140)) == {1: 8}
