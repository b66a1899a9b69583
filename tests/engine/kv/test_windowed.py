"""Engines of a model with windows that lend each other what they can: prompts, prefixes, whole
sequences. A slot stands for all that is before it, so that a block too few, or of another text,
changes the tokens. A pull that is refused, as a block is missing, is a fault as well."""

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache.groups import KVGroups
from kvcache.transfer.pulls.messages import PullSettings
from protocol.messages import MOVED, Migrate, ResumedChoice
from tests.rigs.engines import Group, WindowedEngine, smallest
from tests.rigs.shadow import windowed_output

pytestmark = pytest.mark.usefixtures("small_blocks")
GROUPS = [
    KVGroups((None, 6, 6)),
    KVGroups((None, 3)),
    KVGroups((7,)),
    KVGroups((None, 2, 9)),
]
KINDS = ["lend", "redraw", "resume", "hint", "move"]
PROMPT = [(7 * i) % 50 for i in range(40)]
NUM = 8


def answered(
    group: Group, engine: WindowedEngine, name: str, choices: int = 1
) -> list[list[int]]:
    group.until(lambda: len(engine.out.terminals(name)) == choices)
    assert all(end.error is None for end in engine.out.terminals(name))
    return [engine.out.tokens(name, choice) for choice in range(choices)]


def moved(
    group: Group, engine: WindowedEngine, prompt: list[int], num_outputs: int
) -> dict[str, Any]:
    """What another engine is asked with, to go on."""
    name = group.begin(engine, prompt, NUM)
    group.until(lambda: len(engine.out.tokens(name)) >= num_outputs)
    engine.core.round([Migrate(name)])
    (tokens,) = answered(group, engine, name)
    assert engine.out.terminals(name)[0].finish_reason == MOVED
    return {
        "remote": engine.reference(name),
        "resumed_choices": [ResumedChoice(tokens)],
    }


def went_on(
    group: Group, engine: WindowedEngine, prompt: list[int], asked: dict[str, Any]
) -> str:
    num, groups = asked.get("num_choices", 1), engine.groups
    found = answered(
        group, engine, name := group.begin(engine, prompt, NUM, **asked), num
    )
    known = [one.token_ids for one in asked.get("resumed_choices", [])] or [[]] * num
    for choice, tokens in enumerate(found):
        assert known[choice] + tokens == windowed_output(prompt, NUM, groups, choice)
    assert engine.stat("baton_kv_transfers", outcome="failed", path="none") == 0
    return name


@pytest.mark.parametrize("sizes", [(4, 4), (2, 8), (8, 2), (3, 5)])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_a_sequence_moves_with_its_windows_and_none_of_its_prompt_is_computed_anew(
    groups, sizes
):
    with Group(*(WindowedEngine(groups, block_size=n) for n in sizes)) as group:
        a, b = group.engines
        for num_outputs in (1, 2, NUM - 2):
            asked = moved(group, a, PROMPT, num_outputs)
            assert b.kv(went_on(group, b, PROMPT, asked))[1] == 0


def test_what_has_other_windows_is_computed():
    with Group(*map(WindowedEngine, GROUPS[:2])) as group:
        a, b = group.engines
        answered(group, a, group.begin(a, PROMPT, 1))
        assert b.kv(went_on(group, b, PROMPT, {"hint": a.hint(40)})) == (
            0,
            len(PROMPT),
            0,
        )


def test_who_lends_less_than_choices_need_is_trusted_all_the_same():
    """As where a router asks its prefill leg for one choice: nothing is read, so nothing hangs."""
    how = {"settings": PullSettings(backoff_min_s=60.0)}
    with Group(
        *(WindowedEngine(GROUPS[0], block_size=n, **how) for n in (2, 8))
    ) as group:
        a, b = group.engines
        for at in range(4):
            name = group.begin(a, prompt := [at, *PROMPT[1:]], 1, retain_kv=True)
            answered(group, a, name)
            (remote := a.reference(name)).first_tokens.clear()
            name = group.begin(
                b, prompt, 2, remote=remote, num_choices=3 if at < 3 else 1
            )
            answered(group, b, name, 3 if at < 3 else 1)
            assert (b.kv(name)[0] > 0) is (at == 3)


def test_what_is_found_here_before_a_shorter_prefix_can_be_pulled_needs_no_block():
    with Group(*(WindowedEngine(GROUPS[0], block_size=n) for n in (2, 4))) as group:
        a, b = group.engines
        answered(group, a, group.begin(a, PROMPT[:26], 1))
        name = group.begin(b, PROMPT, NUM, hint=a.hint(99), num_choices=3)
        own = group.begin(b, PROMPT, NUM)
        while not b.out.terminals(own):  # before `a` looks for the prefix
            b.core.round([])
        answered(group, b, name, 3)
        assert b.kv(name) == (0, 4, 36)


@given(st.integers(0, 1 << 30))
@settings(max_examples=10, deadline=None)
@example(
    5
)  # a pull began in the middle of a block, which was a hit of another prompt later
@example(
    0
)  # choices went on from before the window of a prefix that was found elsewhere
def test_what_is_lent_is_what_its_borrower_needs(seed: int) -> None:
    """In the smallest pools that engines take such sequences with."""
    pick, noise = (dice := random.Random(seed)).choice, dice.randrange
    groups, sizes = pick(GROUPS), [pick([1, 2, 3, 4, 8]) for _ in range(2)]
    how = {"max_num_batched_tokens": (step := pick([4, 16])), "max_model_len": 50}
    least = [smallest(groups, step, n, 50) + 1 for n in sizes]
    pools = [
        {"block_size": n, "num_blocks": m} for n, m in zip(sizes, least, strict=True)
    ]
    engines = (WindowedEngine(groups, **how, **of, depth=noise(2)) for of in pools)
    with Group(*engines) as group:
        stem = [noise(9) for _ in range(40)]
        for _ in range(8):
            a, b = dice.sample(group.engines, 2)
            prompt, num = [*stem[: 1 + noise(40)], *[5] * noise(3)], pick([1, 1, 3])
            asked: dict[str, Any] = {"num_choices": num}
            match kind := pick(KINDS):
                case "move":
                    asked = moved(group, a, prompt, 1 + noise(3))
                case "hint":
                    answered(group, a, group.begin(a, prompt, 1))
                    asked["hint"] = a.hint(99)
                case _:
                    name = group.begin(a, prompt, 1, retain_kv=True, num_choices=num)
                    answered(group, a, name, num)
                    asked["remote"] = a.reference(name)
                    if kind != "lend":
                        asked["remote"].first_tokens.clear()
                    if kind == "resume":  # clients have some tokens, not of all choices
                        said = (
                            windowed_output(prompt, noise(3), groups, at)
                            for at in range(num)
                        )
                        asked["resumed_choices"] = [*map(ResumedChoice, said)]
            name = went_on(group, b, prompt, asked)
            assert kind == "hint" or b.kv(name)[1] <= 1
