"""A sequence migrates to another engine with all of its KV, and continues there."""

from collections.abc import Sequence

import pytest

from protocol import kv_params
from protocol.messages import MOVED, AbortRequest, Migrate, RemotePrefill, ResumedChoice
from tests.rigs.engines import SECRET, Engine, Group
from tests.rigs.shadow import VOCAB, expected_output

PROMPT = [(7 * i) % VOCAB for i in range(30)]
MAX_TOKENS = 25


def _migrate(
    group: Group, engine: Engine, name: str, before: Sequence[int] = ()
) -> tuple[list[int], RemotePrefill]:
    """Migrates a sequence. Returns the tokens that the client has received, including
    `before`, and the reference to the KV.
    """
    engine.core.round([Migrate(name)])
    end = group.end_of(engine, name)
    assert end.finish_reason == MOVED and end.kv_transfer_params is not None
    params = kv_params.parse(end.kv_transfer_params)
    params.verify(SECRET)
    tokens = [*before, *engine.out.tokens(name)]
    ids = [*PROMPT, *tokens]
    assert params.remote_num_tokens == len(ids) - 1
    assert params.prompt_digest == kv_params.prompt_digest(ids[:-1])
    return tokens, kv_params.to_remote_prefill(params)


def _begin_and_wait(group: Group, engine: Engine, num_outputs: int) -> str:
    name = group.begin(engine, PROMPT, MAX_TOKENS)
    group.until(lambda: len(engine.out.tokens(name)) >= num_outputs)
    return name


def _num_computed_tokens(engine: Engine) -> float:
    return engine.core.stats()["baton_engine_step_tokens"]


GEOMETRIES = [
    ({}, {}),
    ({"depth": 1}, {"depth": 1, "block_size": 8}),
    ({"block_size": 2, "order": "LBCNHD", "depth": 1}, {"block_size": 4, "dcp": 2}),
    ({"block_size": 4, "dcp": 2}, {"block_size": 8, "depth": 1}),
    ({"block_size": 2, "dcp": 3}, {"block_size": 4, "dcp": 2}),
]


@pytest.mark.parametrize(("source", "target"), GEOMETRIES)
@pytest.mark.parametrize("num_outputs", [1, 2, 3, 9, MAX_TOKENS - 2])
def test_migrated_sequence_continues_with_the_same_tokens_and_computes_none_twice(
    make_group, source, target, num_outputs
):
    group = make_group(source, target)
    a, b = group.engines
    tokens, remote = _migrate(group, a, _begin_and_wait(group, a, num_outputs))
    assert a.core.is_idle and a.stat("baton_leases_held") == 1
    name = group.begin(
        b, PROMPT, MAX_TOKENS, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    assert tokens + group.tokens_of(b, name) == expected_output(PROMPT, MAX_TOKENS)
    assert b.kv(name) == (len(PROMPT), 0, 0)
    assert _num_computed_tokens(b) == MAX_TOKENS - len(tokens), (
        "each step computes one token, and no pulled token is computed again"
    )
    assert b.stat("baton_kv_first_tokens_redrawn") == 0
    group.until(lambda: a.stat("baton_leases", event="completed") == 1)


def test_sequence_with_a_salt_migrates_under_its_salt(make_group):
    group = make_group({}, {})
    a, b = group.engines
    name = group.begin(a, PROMPT, MAX_TOKENS, cache_salt=b"one")
    group.until(lambda: len(a.out.tokens(name)) >= 3)
    a.core.round([Migrate(name)])
    (params,) = [end.kv_transfer_params for end in a.out.terminals(name)]
    assert params is not None
    tokens = a.out.tokens(name)
    ids = [*PROMPT, *tokens]
    assert params["prompt_digest"] == kv_params.prompt_digest(ids[:-1], b"one")
    remote = kv_params.to_remote_prefill(kv_params.parse(params))
    migrated_fields = {
        "remote": remote,
        "resumed_choices": [ResumedChoice(tokens)],
        "cache_salt": b"one",
    }
    moved_name = group.begin(b, PROMPT, MAX_TOKENS, **migrated_fields)
    assert tokens + group.tokens_of(b, moved_name) == expected_output(
        PROMPT, MAX_TOKENS
    )
    assert b.kv(moved_name) == (len(PROMPT), 0, 0)
    assert group.complete(b, [*PROMPT, 1])[1] == (0, len(PROMPT) + 1, 0)
    assert group.complete(b, [*PROMPT, 1], cache_salt=b"one")[1][2] > 0


@pytest.mark.parametrize("aborted_choice", [None, 0, 2])
def test_choices_move_with_the_kv_of_their_prompt(make_group, aborted_choice):
    group = make_group({"depth": 1}, {"block_size": 8})
    a, b = group.engines
    name = group.begin(a, PROMPT, MAX_TOKENS, num_choices=3)
    group.until(
        lambda: min(len(a.out.tokens(name, choice)) for choice in range(3)) >= 4
    )
    if aborted_choice is not None:
        a.core.round([AbortRequest(name, aborted_choice)])
    a.core.round([Migrate(name)])
    group.until(lambda: len(a.out.terminals(name)) == 3)
    remote = a.reference(name)
    assert remote.num_tokens == len(PROMPT)
    resumed = [
        ResumedChoice(a.out.tokens(name, choice), choice == aborted_choice)
        for choice in range(3)
    ]
    moved_name = group.begin(
        b, PROMPT, MAX_TOKENS, num_choices=3, remote=remote, resumed_choices=resumed
    )
    num_remaining = 3 - (aborted_choice is not None)
    group.until(lambda: len(b.out.terminals(moved_name)) == num_remaining)
    for choice in range(3):
        tokens = resumed[choice].token_ids + b.out.tokens(moved_name, choice)
        assert choice == aborted_choice or tokens == expected_output(
            PROMPT, MAX_TOKENS, choice=choice
        )
    assert b.kv(moved_name) == (len(PROMPT), 0, 0)


def test_migrated_sequence_may_return_and_migrate_again(make_group):
    group = make_group({}, {"depth": 1})
    a, b = group.engines
    tokens = list[int]()
    name = _begin_and_wait(group, a, 3)
    for engine, other in [(a, b), (b, a)] * 2:
        tokens, remote = _migrate(group, engine, name, tokens)
        name = group.begin(
            other,
            PROMPT,
            MAX_TOKENS,
            remote=remote,
            resumed_choices=[ResumedChoice(tokens)],
        )
        group.until(lambda: bool(other.out.tokens(name)))  # noqa: B023
    assert tokens + group.tokens_of(a, name) == expected_output(PROMPT, MAX_TOKENS)
    assert (
        _num_computed_tokens(a) + _num_computed_tokens(b)
        == len(PROMPT) + MAX_TOKENS - 1
    )


def test_sequence_may_continue_on_the_engine_that_it_left(make_group):
    group = make_group({})
    (a,) = group.engines
    tokens, remote = _migrate(group, a, _begin_and_wait(group, a, 5))
    name = group.begin(
        a, PROMPT, MAX_TOKENS, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    assert tokens + group.tokens_of(a, name) == expected_output(PROMPT, MAX_TOKENS)


@pytest.mark.parametrize("num_rounds", range(8))
def test_abort_at_any_time_leaves_no_lease_and_no_used_block(make_group, num_rounds):
    group = make_group({"depth": 1}, {})
    a, b = group.engines
    name = group.begin(a, PROMPT, MAX_TOKENS)
    group.round(num_rounds)
    a.core.round([Migrate(name), AbortRequest(name)])
    a.core.round([Migrate(name), Migrate("unknown")])
    group.settle()
    name = _begin_and_wait(group, a, 3)
    tokens, remote = _migrate(group, a, name)
    if num_rounds % 2:  # the client disconnects before it learns of the migration
        a.core.round([AbortRequest(name)])
    moved_name = group.begin(
        b, PROMPT, MAX_TOKENS, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    group.round(num_rounds)
    b.core.round([AbortRequest(moved_name)])
    group.end_of(b, moved_name)
    so_far = tokens + b.out.tokens(moved_name)
    assert so_far == expected_output(PROMPT, MAX_TOKENS)[: len(so_far)]
    group.settle()
    group.until(lambda: a.stat("baton_leases_held") == 0)


@pytest.mark.parametrize("fault", ["fails", "dies"])
def test_missing_tokens_are_computed_when_the_pull_of_a_migration_fails(
    make_group, fault
):
    group = make_group({}, {})
    a, b = group.engines
    tokens, remote = _migrate(group, a, _begin_and_wait(group, a, 9))
    if fault == "dies":
        group.engines.remove(a)
        a.end()
    else:
        b.movers.fail()
    name = group.begin(
        b, PROMPT, MAX_TOKENS, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    assert tokens + group.tokens_of(b, name) == expected_output(PROMPT, MAX_TOKENS)
