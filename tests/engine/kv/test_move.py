"""A sequence migrates to another engine with all of its KV, and continues there."""

from collections.abc import Sequence

import pytest

from protocol import kv_params
from protocol.messages import MOVED, AbortRequest, Migrate, RemotePrefill, ResumedChoice
from tests.rigs.engines import SECRET, Engine, Group
from tests.rigs.shadow import VOCAB, expected_output

PROMPT = [(7 * i) % VOCAB for i in range(30)]
NUM = 25


def _moved(
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


def _running(group: Group, engine: Engine, num_outputs: int) -> str:
    name = group.begin(engine, PROMPT, NUM)
    group.until(lambda: len(engine.out.tokens(name)) >= num_outputs)
    return name


def _computed(engine: Engine) -> float:
    return engine.core.stats()["baton_engine_step_tokens"]


GEOMETRIES = [
    ({}, {}),
    ({"depth": 1}, {"depth": 1, "block_size": 8}),
    ({"block_size": 2, "order": "LBCNHD", "depth": 1}, {"block_size": 4, "dcp": 2}),
    ({"block_size": 4, "dcp": 2}, {"block_size": 8, "depth": 1}),
    ({"block_size": 2, "dcp": 3}, {"block_size": 4, "dcp": 2}),
]


@pytest.mark.parametrize(("source", "target"), GEOMETRIES)
@pytest.mark.parametrize("num_outputs", [1, 2, 3, 9, NUM - 2])
def test_migrated_sequence_continues_with_the_same_tokens_and_computes_none_twice(
    make, source, target, num_outputs
):
    group = make(source, target)
    a, b = group.engines
    tokens, remote = _moved(group, a, _running(group, a, num_outputs))
    assert a.core.is_idle and a.stat("baton_leases_held") == 1
    name = group.begin(
        b, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    assert tokens + group.tokens_of(b, name) == expected_output(PROMPT, NUM)
    assert b.kv(name) == (len(PROMPT), 0, 0)
    assert _computed(b) == NUM - len(tokens), (
        "each step computes one token, and no pulled token is computed again"
    )
    assert b.stat("baton_kv_first_tokens_redrawn") == 0
    group.until(lambda: a.stat("baton_leases", event="completed") == 1)


def test_sequence_with_a_salt_migrates_under_its_salt(make):
    group = make({}, {})
    a, b = group.engines
    name = group.begin(a, PROMPT, NUM, cache_salt=b"one")
    group.until(lambda: len(a.out.tokens(name)) >= 3)
    a.core.round([Migrate(name)])
    (params,) = [end.kv_transfer_params for end in a.out.terminals(name)]
    assert params is not None
    tokens = a.out.tokens(name)
    ids = [*PROMPT, *tokens]
    assert params["prompt_digest"] == kv_params.prompt_digest(ids[:-1], b"one")
    remote = kv_params.to_remote_prefill(kv_params.parse(params))
    moved = {
        "remote": remote,
        "resumed_choices": [ResumedChoice(tokens)],
        "cache_salt": b"one",
    }
    moved_name = group.begin(b, PROMPT, NUM, **moved)
    assert tokens + group.tokens_of(b, moved_name) == expected_output(PROMPT, NUM)
    assert b.kv(moved_name) == (len(PROMPT), 0, 0)
    assert group.complete(b, [*PROMPT, 1])[1] == (0, len(PROMPT) + 1, 0)
    assert group.complete(b, [*PROMPT, 1], cache_salt=b"one")[1][2] > 0


@pytest.mark.parametrize("ended", [None, 0, 2])
def test_choices_move_with_the_kv_of_their_prompt(make, ended):
    group = make({"depth": 1}, {"block_size": 8})
    a, b = group.engines
    name = group.begin(a, PROMPT, NUM, num_choices=3)
    group.until(lambda: min(len(a.out.tokens(name, at)) for at in range(3)) >= 4)
    if ended is not None:
        a.core.round([AbortRequest(name, ended)])
    a.core.round([Migrate(name)])
    group.until(lambda: len(a.out.terminals(name)) == 3)
    remote = a.reference(name)
    assert remote.num_tokens == len(PROMPT)
    resumed = [ResumedChoice(a.out.tokens(name, at), at == ended) for at in range(3)]
    moved_name = group.begin(
        b, PROMPT, NUM, num_choices=3, remote=remote, resumed_choices=resumed
    )
    num = 3 - (ended is not None)
    group.until(lambda: len(b.out.terminals(moved_name)) == num)
    for at in range(3):
        tokens = resumed[at].token_ids + b.out.tokens(moved_name, at)
        assert at == ended or tokens == expected_output(PROMPT, NUM, choice=at)
    assert b.kv(moved_name) == (len(PROMPT), 0, 0)


def test_migrated_sequence_may_return_and_migrate_again(make):
    group = make({}, {"depth": 1})
    a, b = group.engines
    tokens = list[int]()
    name = _running(group, a, 3)
    for engine, other in [(a, b), (b, a)] * 2:
        tokens, remote = _moved(group, engine, name, tokens)
        name = group.begin(
            other, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
        )
        group.until(lambda: bool(other.out.tokens(name)))  # noqa: B023
    assert tokens + group.tokens_of(a, name) == expected_output(PROMPT, NUM)
    assert _computed(a) + _computed(b) == len(PROMPT) + NUM - 1


def test_sequence_may_continue_on_the_engine_that_it_left(make):
    group = make({})
    (a,) = group.engines
    tokens, remote = _moved(group, a, _running(group, a, 5))
    name = group.begin(
        a, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    assert tokens + group.tokens_of(a, name) == expected_output(PROMPT, NUM)


@pytest.mark.parametrize("num_rounds", range(8))
def test_an_abort_at_any_time_leaves_nothing(make, num_rounds):
    group = make({"depth": 1}, {})
    a, b = group.engines
    name = group.begin(a, PROMPT, NUM)
    group.round(num_rounds)
    a.core.round([Migrate(name), AbortRequest(name)])
    a.core.round([Migrate(name), Migrate("unknown")])
    group.settle()
    name = _running(group, a, 3)
    tokens, remote = _moved(group, a, name)
    if num_rounds % 2:  # the client disconnects before it receives the move
        a.core.round([AbortRequest(name)])
    moved_name = group.begin(
        b, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    group.round(num_rounds)
    b.core.round([AbortRequest(moved_name)])
    group.end_of(b, moved_name)
    so_far = tokens + b.out.tokens(moved_name)
    assert so_far == expected_output(PROMPT, NUM)[: len(so_far)]
    group.settle()
    group.until(lambda: a.stat("baton_leases_held") == 0)


@pytest.mark.parametrize("fault", ["fails", "dies"])
def test_missing_tokens_are_computed_when_the_pull_of_a_migration_fails(make, fault):
    group = make({}, {})
    a, b = group.engines
    tokens, remote = _moved(group, a, _running(group, a, 9))
    if fault == "dies":
        group.engines.remove(a)
        a.end()
    else:
        b.movers.fail()
    name = group.begin(
        b, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    assert tokens + group.tokens_of(b, name) == expected_output(PROMPT, NUM)
