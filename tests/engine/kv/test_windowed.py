"""Engines of a model with attention windows lease prompts, prefixes and whole sequences
to each other.

In the shadow KV cache, the content of a slot depends on all tokens before it. A missing
block, or a block of a different text, therefore changes the tokens. A test fails if a
pull is refused because a block is missing.
"""

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache.groups import KVGroups
from kvcache.transfer.pulls.messages import PullSettings
from protocol.messages import MOVED, Migrate, ResumedChoice
from tests.rigs.engines import Group, WindowedEngine, min_num_blocks
from tests.rigs.shadow import windowed_output

pytestmark = pytest.mark.usefixtures("small_blocks")
GROUPS = [
    KVGroups((None, 6, 6)),
    KVGroups((None, 3)),
    KVGroups((7,)),
    KVGroups((None, 2, 9)),
]
KINDS = ["lend", "redraw", "resume", "hint", "migrate"]
PROMPT = [(7 * i) % 50 for i in range(40)]
MAX_TOKENS = 8


def wait_for_answers(
    group: Group, engine: WindowedEngine, name: str, num_choices: int = 1
) -> list[list[int]]:
    """Waits until all choices have ended. Returns the tokens of each choice."""
    group.until(lambda: len(engine.out.terminals(name)) == num_choices)
    assert all(end.error is None for end in engine.out.terminals(name))
    return [engine.out.tokens(name, choice) for choice in range(num_choices)]


def migrate(
    group: Group, engine: WindowedEngine, prompt: list[int], num_outputs: int
) -> dict[str, Any]:
    """Migrates a request after `num_outputs` tokens. Returns the options with which
    another engine can continue the request."""
    name = group.begin(engine, prompt, MAX_TOKENS)
    group.until(lambda: len(engine.out.tokens(name)) >= num_outputs)
    engine.core.round([Migrate(name)])
    (tokens,) = wait_for_answers(group, engine, name)
    assert engine.out.terminals(name)[0].finish_reason == MOVED
    return {
        "remote": engine.reference(name),
        "resumed_choices": [ResumedChoice(tokens)],
    }


def check_request(
    group: Group, engine: WindowedEngine, prompt: list[int], options: dict[str, Any]
) -> str:
    """Runs a request, and checks its tokens and that no pull has failed. Returns the
    request's name."""
    num_choices = options.get("num_choices", 1)
    name = group.begin(engine, prompt, MAX_TOKENS, **options)
    answers = wait_for_answers(group, engine, name, num_choices)
    resumed: list[list[int]] = [[] for _ in range(num_choices)]
    if options.get("resumed_choices"):
        resumed = [choice.token_ids for choice in options["resumed_choices"]]
    for choice, tokens in enumerate(answers):
        expected = windowed_output(prompt, MAX_TOKENS, engine.groups, choice)
        assert resumed[choice] + tokens == expected
    assert engine.stat("baton_kv_transfers", outcome="failed", path="none") == 0
    return name


@pytest.mark.parametrize("sizes", [(4, 4), (2, 8), (8, 2), (3, 5)])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_migrated_sequence_recomputes_no_prompt_token(groups, sizes):
    with Group(*(WindowedEngine(groups, block_size=n) for n in sizes)) as group:
        a, b = group.engines
        for num_outputs in (1, 2, MAX_TOKENS - 2):
            options = migrate(group, a, PROMPT, num_outputs)
            assert b.kv(check_request(group, b, PROMPT, options))[1] == 0


def test_prefix_of_a_model_with_other_windows_is_computed_locally():
    with Group(*map(WindowedEngine, GROUPS[:2])) as group:
        a, b = group.engines
        wait_for_answers(group, a, group.begin(a, PROMPT, 1))
        name = check_request(group, b, PROMPT, {"hint": a.hint(40)})
        assert b.kv(name) == (0, len(PROMPT), 0)


def test_lease_with_too_few_blocks_for_all_choices_does_not_open_the_circuit():
    """A router may request one choice of the prefill leg, but three of the decode leg.
    D then computes the prompt. Later pulls from the lender must still be allowed.
    """
    limits = {"settings": PullSettings(backoff_min_s=60.0)}
    with Group(
        *(WindowedEngine(GROUPS[0], block_size=size, **limits) for size in (2, 8))
    ) as group:
        a, b = group.engines
        for index, num_choices in enumerate((3, 3, 3, 1)):
            prompt = [index, *PROMPT[1:]]
            name = group.begin(a, prompt, 1, retain_kv=True)
            wait_for_answers(group, a, name)
            remote = a.reference(name)
            remote.first_tokens.clear()
            name = group.begin(b, prompt, 2, remote=remote, num_choices=num_choices)
            wait_for_answers(group, b, name, num_choices)
            assert (b.kv(name)[0] > 0) is (num_choices == 1)


def test_longer_prefix_that_is_cached_during_a_lookup_is_used_without_a_pull():
    with Group(
        *(WindowedEngine(GROUPS[0], block_size=size) for size in (2, 4))
    ) as group:
        a, b = group.engines
        wait_for_answers(group, a, group.begin(a, PROMPT[:26], 1))
        name = group.begin(b, PROMPT, MAX_TOKENS, hint=a.hint(99), num_choices=3)
        local = group.begin(b, PROMPT, MAX_TOKENS)
        while not b.out.terminals(local):  # engine `a` does not answer the lookup
            b.core.round([])
        wait_for_answers(group, b, name, 3)
        assert b.kv(name) == (0, 4, 36)


@given(st.integers(0, 1 << 30))
@settings(max_examples=10, deadline=None)
# This seed failed once: a pull began in the middle of a block, and a different prompt
# later found that block in the prefix cache.
@example(5)
# This seed failed once: choices continued before the window of a prefix that was on the
# other engine.
@example(0)
def test_leases_contain_all_blocks_that_the_borrower_needs(seed: int) -> None:
    """Runs random requests in the smallest pools that an engine accepts."""
    rng = random.Random(seed)
    groups = rng.choice(GROUPS)
    sizes = [rng.choice([1, 2, 3, 4, 8]) for _ in range(2)]
    step_tokens = rng.choice([4, 16])
    engines = [
        WindowedEngine(
            groups,
            max_num_batched_tokens=step_tokens,
            max_model_len=50,
            block_size=size,
            num_blocks=min_num_blocks(groups, step_tokens, size, 50) + 1,
            depth=rng.randrange(2),
        )
        for size in sizes
    ]
    with Group(*engines) as group:
        shared = [rng.randrange(9) for _ in range(40)]
        for _ in range(8):
            a, b = rng.sample(group.engines, 2)
            prompt = [*shared[: 1 + rng.randrange(40)], *[5] * rng.randrange(3)]
            num_choices = rng.choice([1, 1, 3])
            options: dict[str, Any] = {"num_choices": num_choices}
            kind = rng.choice(KINDS)
            match kind:
                case "migrate":
                    options = migrate(group, a, prompt, 1 + rng.randrange(3))
                case "hint":
                    wait_for_answers(group, a, group.begin(a, prompt, 1))
                    options["hint"] = a.hint(99)
                case _:
                    name = group.begin(
                        a, prompt, 1, retain_kv=True, num_choices=num_choices
                    )
                    wait_for_answers(group, a, name, num_choices)
                    options["remote"] = a.reference(name)
                    if kind != "lend":
                        options["remote"].first_tokens.clear()
                    if kind == "resume":  # the client has some tokens already
                        options["resumed_choices"] = [
                            ResumedChoice(
                                windowed_output(
                                    prompt, rng.randrange(3), groups, choice
                                )
                            )
                            for choice in range(num_choices)
                        ]
            name = check_request(group, b, prompt, options)
            assert kind == "hint" or b.kv(name)[1] <= 1
