"""A sequence is handed over to another engine, with all of its KV, and goes on with its tokens."""

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
    """What the client has by then, also of those before, and where the KV is."""
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


@pytest.mark.parametrize(("ours", "theirs"), GEOMETRIES)
@pytest.mark.parametrize("num_outputs", [1, 2, 3, 9, NUM - 2])
def test_it_goes_on_with_the_same_tokens_and_computes_none_twice(
    make, ours, theirs, num_outputs
):
    a, b = (group := make(ours, theirs)).engines
    tokens, remote = _moved(group, a, _running(group, a, num_outputs))
    assert a.core.is_idle and a.stat("baton_leases_held") == 1
    name = group.begin(
        b, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    assert tokens + group.tokens_of(b, name) == expected_output(PROMPT, NUM)
    assert b.kv(name) == (len(PROMPT), 0, 0)
    assert _computed(b) == NUM - len(tokens), (
        "one token a step, and nothing of what was pulled"
    )
    assert b.stat("baton_kv_first_tokens_redrawn") == 0
    group.until(lambda: a.stat("baton_leases", event="completed") == 1)


def test_it_moves_under_its_salt(make):
    a, b = (group := make({}, {})).engines
    name = group.begin(a, PROMPT, NUM, cache_salt=b"one")
    group.until(lambda: len(a.out.tokens(name)) >= 3)
    a.core.round([Migrate(name)])
    (params,) = [end.kv_transfer_params for end in a.out.terminals(name)]
    assert params is not None
    ids = [*PROMPT, *(tokens := a.out.tokens(name))]
    assert params["prompt_digest"] == kv_params.prompt_digest(ids[:-1], b"one")
    remote = kv_params.to_remote_prefill(kv_params.parse(params))
    moved = {
        "remote": remote,
        "resumed_choices": [ResumedChoice(tokens)],
        "cache_salt": b"one",
    }
    theirs = group.begin(b, PROMPT, NUM, **moved)
    assert tokens + group.tokens_of(b, theirs) == expected_output(PROMPT, NUM)
    assert b.kv(theirs) == (len(PROMPT), 0, 0)
    assert group.complete(b, [*PROMPT, 1])[1] == (0, len(PROMPT) + 1, 0)
    assert group.complete(b, [*PROMPT, 1], cache_salt=b"one")[1][2] > 0


@pytest.mark.parametrize("ended", [None, 0, 2])
def test_choices_move_with_the_kv_of_their_prompt(make, ended):
    a, b = (group := make({"depth": 1}, {"block_size": 8})).engines
    name = group.begin(a, PROMPT, NUM, num_choices=3)
    group.until(lambda: min(len(a.out.tokens(name, at)) for at in range(3)) >= 4)
    if ended is not None:
        a.core.round([AbortRequest(name, ended)])
    a.core.round([Migrate(name)])
    group.until(lambda: len(a.out.terminals(name)) == 3)
    remote = a.reference(name)
    assert remote.num_tokens == len(PROMPT)
    known = [ResumedChoice(a.out.tokens(name, at), at == ended) for at in range(3)]
    theirs = group.begin(
        b, PROMPT, NUM, num_choices=3, remote=remote, resumed_choices=known
    )
    num = 3 - (ended is not None)
    group.until(lambda: len(b.out.terminals(theirs)) == num)
    for at in range(3):
        tokens = known[at].token_ids + b.out.tokens(theirs, at)
        assert at == ended or tokens == expected_output(PROMPT, NUM, choice=at)
    assert b.kv(theirs) == (len(PROMPT), 0, 0)


def test_it_may_come_back_and_move_again(make):
    a, b = (group := make({}, {"depth": 1})).engines
    tokens, name = list[int](), _running(group, a, 3)
    for engine, other in [(a, b), (b, a)] * 2:
        tokens, remote = _moved(group, engine, name, tokens)
        name = group.begin(
            other, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
        )
        group.until(lambda: bool(other.out.tokens(name)))  # noqa: B023
    assert tokens + group.tokens_of(a, name) == expected_output(PROMPT, NUM)
    assert _computed(a) + _computed(b) == len(PROMPT) + NUM - 1


def test_where_there_is_no_other_engine_it_goes_on_where_it_was(make):
    (a,) = (group := make({})).engines
    tokens, remote = _moved(group, a, _running(group, a, 5))
    name = group.begin(
        a, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    assert tokens + group.tokens_of(a, name) == expected_output(PROMPT, NUM)


@pytest.mark.parametrize("num_rounds", range(8))
def test_an_abort_at_any_time_leaves_nothing(make, num_rounds):
    a, b = (group := make({"depth": 1}, {})).engines
    name = group.begin(a, PROMPT, NUM)
    group.round(num_rounds)
    a.core.round([Migrate(name), AbortRequest(name)])
    a.core.round([Migrate(name), Migrate("unknown")])
    group.settle()
    name = _running(group, a, 3)
    tokens, remote = _moved(group, a, name)
    if num_rounds % 2:  # its client left before it heard of the move
        a.core.round([AbortRequest(name)])
    theirs = group.begin(
        b, PROMPT, NUM, remote=remote, resumed_choices=[ResumedChoice(tokens)]
    )
    group.round(num_rounds)
    b.core.round([AbortRequest(theirs)])
    group.end_of(b, theirs)
    so_far = tokens + b.out.tokens(theirs)
    assert so_far == expected_output(PROMPT, NUM)[: len(so_far)]
    group.settle()
    group.until(lambda: a.stat("baton_leases_held") == 0)


@pytest.mark.parametrize("fault", ["fails", "dies"])
def test_a_pull_that_fails_has_the_rest_computed(make, fault):
    a, b = (group := make({}, {})).engines
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
