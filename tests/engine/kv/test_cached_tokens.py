"""`cached_tokens` of a request counts prompt tokens that no server computed for it.

The test records which tokens of each request the engines compute, and compares the
usage with this record.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.plan import Scheduled
from protocol.messages import MOVED, AbortRequest, Migrate, ResumedChoice
from tests.rigs.engines import Engine, Group
from tests.rigs.shadow import VOCAB, expected_output

Computed = defaultdict[str, set[int]]  # positions of computed tokens, by request
GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"p_block_size": 2, "block_size": 8},
    {"p_block_size": 8, "block_size": 2},
    {"p_block_size": 2, "block_size": 4, "dcp": 2},
]


def record_computed_tokens(engines: Sequence[Engine]) -> Computed:
    """Returns a dict in which the engines record the positions that they compute.

    Only choice 0 of each request is recorded.
    """
    computed: Computed = defaultdict(set)

    def watch(engine: Engine) -> None:
        scheduler = engine.core.scheduler
        commit = scheduler.commit

        def recording_commit(item: Scheduled) -> None:
            sequence = item.sequence
            if sequence.choice == 0:
                start = sequence.num_computed
                positions = range(start, start + item.num_tokens)
                computed[sequence.request_id].update(positions)
            commit(item)

        scheduler.commit = recording_commit  # type: ignore[method-assign]

    for engine in engines:
        watch(engine)
    return computed


def num_untouched(computed: Computed, length: int, *names: str) -> int:
    """Number of tokens of a prompt that no engine computed for these requests."""
    positions = set[int]().union(*(computed[name] for name in names))
    return len(set(range(length)) - positions)


def cached_tokens(engine: Engine, name: str) -> int:
    """Returns the cached tokens that the HTTP process would report (of choice 0)."""
    ends = [end for end in engine.out.terminals(name) if end.choice == 0]
    usage = ends[0].usage
    assert usage is not None
    return usage.cached_tokens


def prompts(rng: random.Random, length: int) -> tuple[list[int], int, int]:
    """Returns a prompt, and the lengths of the prefixes that P and D have cached."""
    prompt = [rng.randrange(VOCAB) for _ in range(length)]
    return prompt, rng.randrange(length + 1), rng.randrange(length + 1)


@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_usage_of_a_pair_counts_the_tokens_that_neither_server_computed(
    make_pair, options, seed
):
    rng = random.Random(f"{seed} {options}")
    pair = make_pair(**options)
    computed = record_computed_tokens(pair.engines)
    modes = ("reference", "offer", "redrawn", "failed pull", "local")
    for mode, num_choices in itertools.product(modes, (1, 3)):
        prompt, cached_on_p, cached_on_d = prompts(rng, rng.randrange(1, 45))
        for engine, length in ((pair.p, cached_on_p), (pair.d, cached_on_d)):
            if length:
                name = pair.begin(engine, prompt[:length], 1)
                pair.until(lambda e=engine, n=name: bool(e.out.terminals(n)))
        fields = {"num_choices": num_choices}
        if mode == "offer":
            p_name, name = pair.submit_to_both(prompt, order="dp", **fields)
        elif mode == "local":
            p_name = ""
            name = pair.begin(pair.d, prompt, 6, **fields)
        else:
            before = {end.request_id for end in pair.p.out.deltas}
            params = pair.prefill(prompt, **fields)
            (p_name,) = {end.request_id for end in pair.p.out.deltas} - before
            if mode == "failed pull":
                pair.d.movers.fail(1)
            is_redrawn = mode == "redrawn"
            name = pair.submit(prompt, params, redrawn=is_redrawn, **fields)
        answers = pair.answers(name, num_choices)
        assert answers[0] == expected_output(prompt, 6)
        expected = num_untouched(computed, len(prompt), p_name, name)
        assert cached_tokens(pair.d, name) == expected, (mode, num_choices)


@pytest.mark.parametrize("seed", range(3))
def test_usage_counts_borrowed_tokens_as_cached(make_group, seed):
    rng = random.Random(seed)
    group: Group = make_group({"block_size": 2}, {"block_size": 8})
    a, b = group.engines
    computed = record_computed_tokens(group.engines)
    for num_choices in (1, 3):
        prompt, cached_on_a, cached_on_b = prompts(rng, 44)
        for engine, length in ((a, cached_on_a), (b, cached_on_b)):
            if length:
                group.complete(engine, prompt[:length], 1)
        hint = a.hint(max(cached_on_a, 1))
        name = group.begin(b, prompt, 6, hint=hint, num_choices=num_choices)
        group.until(lambda n=name, c=num_choices: len(b.out.terminals(n)) == c)
        assert cached_tokens(b, name) == num_untouched(computed, 44, name)


@pytest.mark.parametrize("moves_kv", [False, True])
def test_usage_of_a_resumed_request_counts_what_the_engines_computed(
    make_group, moves_kv
):
    """The HTTP process reports the usage of the first server to the client."""
    group: Group = make_group({}, {})
    a, b = group.engines
    prompt = [(7 * i) % VOCAB for i in range(30)]
    group.complete(a, prompt[:13], 1)
    computed = record_computed_tokens(group.engines)
    first = group.begin(a, prompt, 25)
    group.until(lambda: len(a.out.tokens(first)) >= 3)
    a.core.round([Migrate(first)])
    end = group.end_of(a, first)
    assert end.finish_reason == MOVED
    assert cached_tokens(a, first) == num_untouched(computed, 30, first) == 12
    tokens = a.out.tokens(first)
    fields: dict[str, Any] = {"resumed_choices": [ResumedChoice(tokens)]}
    if moves_kv:
        fields["remote"] = a.reference(first)
    else:
        a.core.round([AbortRequest(first)])  # ends the lease
    second = group.begin(b, prompt, 25, **fields)
    assert tokens + group.tokens_of(b, second) == expected_output(prompt, 25)
    names = (first, second) if moves_kv else (second,)
    assert cached_tokens(b, second) == num_untouched(computed, 30, *names)
    usage = b.out.terminals(second)[0].usage
    assert usage is not None
    num_on_a = usage.prefill_recomputed + usage.prefill_skipped
    assert num_on_a + usage.prefill_transferred == (30 if moves_kv else 0)


def test_usage_of_a_preempted_prompt_counts_its_first_computation(make_group):
    """The pool is too small for two concurrent requests, so requests are preempted."""
    group: Group = make_group({"num_blocks": 20})
    (a,) = group.engines
    prompt = [(7 * i) % VOCAB for i in range(30)]
    group.complete(a, prompt[:13], 1)
    computed = record_computed_tokens(group.engines)
    names = [group.begin(a, [*prompt, extra], 30) for extra in range(3)]
    for name in names:
        group.tokens_of(a, name)
        expected = num_untouched(computed, 31, name)
        assert cached_tokens(a, name) == expected
    assert a.core.scheduler.num_preemptions > 0
