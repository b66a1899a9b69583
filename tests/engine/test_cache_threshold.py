"""cache_hit_threshold: requests with too few cached tokens end and are not computed."""

import pytest

from engine.core.plan import Plan
from protocol.messages import CACHE_MISS, KVUsage, ResumedChoice
from tests.rigs.http_server import serving, text_script
from tests.rigs.metric import metric
from tests.rigs.shadow import (
    add,
    assert_all_blocks_free,
    expected_output,
    make_core,
    run_until_idle,
)

PROMPT = list(range(17))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_request_below_its_threshold_ends_without_a_step(depth, num_choices):
    core, executor, out = make_core(depth=depth)
    request = add("a", PROMPT, 5, num_choices=num_choices, cache_hit_threshold=0.01)
    run_until_idle(core, request)
    ends = out.terminals("a")
    assert [end.finish_reason for end in ends] == [CACHE_MISS] * num_choices
    assert ends[0].usage == KVUsage() and executor.num_steps == 0
    assert_all_blocks_free(core)


@pytest.mark.parametrize(("threshold", "is_served"), [(0.94, True), (0.95, False)])
def test_cached_tokens_count_towards_the_threshold(threshold, is_served):
    core, _, out = make_core()
    run_until_idle(core, add("a", PROMPT, 3))
    # 16 of the 17 tokens are in cached blocks.
    run_until_idle(core, add("b", PROMPT, 3, cache_hit_threshold=threshold))
    (end,) = out.terminals("b")
    assert end.finish_reason == ("length" if is_served else CACHE_MISS)
    assert out.tokens("b") == (expected_output(PROMPT, 3) if is_served else [])
    assert_all_blocks_free(core)


def test_other_requests_run_in_the_step_that_the_request_leaves():
    core, _, out = make_core()
    run_until_idle(
        core, add("a", PROMPT, 3, cache_hit_threshold=1.0), add("b", PROMPT, 3)
    )
    assert out.terminals("a")[0].finish_reason == CACHE_MISS
    assert out.tokens("b") == expected_output(PROMPT, 3)


def test_preempted_request_ends_instead_of_being_computed_again():
    core, _, out = make_core(prefix_caching=True)
    run_until_idle(core, add("a", PROMPT, 3))
    core.round([add("b", PROMPT, 20, cache_hit_threshold=0.5)])
    core.round([])
    core.finish_steps(0)
    core.scheduler._preempt(core.sequences["b"], Plan(0))
    assert core.scheduler.prefix is not None
    core.scheduler.prefix._remove_descendants(core.scheduler.prefix._root)
    run_until_idle(core)
    assert out.terminals("b")[0].finish_reason == CACHE_MISS
    assert out.tokens("b") == expected_output(PROMPT, 20)[: len(out.tokens("b"))]
    assert out.tokens("b"), "the client keeps the tokens that it has received"
    assert_all_blocks_free(core)


def test_no_choice_is_computed_in_the_step_in_which_another_one_misses_the_cache():
    """In that step, the other choice is planned first."""
    core, executor, out = make_core(prefix_caching=True)
    run_until_idle(core, add("a", PROMPT, 3))
    core.round([add("b", PROMPT, 20, num_choices=2, cache_hit_threshold=0.5)])
    while not all(out.tokens("b", choice) for choice in (0, 1)):
        core.round([])
    core.finish_steps(0)
    num_steps = executor.num_steps
    _, second = core.sequences["b"].choices
    core.scheduler._preempt(second, Plan(0))
    assert core.scheduler.prefix is not None
    core.scheduler.prefix._remove_descendants(core.scheduler.prefix._root)
    core.round([])
    assert executor.num_steps == num_steps
    assert [end.finish_reason for end in out.terminals("b")] == [CACHE_MISS] * 2
    assert_all_blocks_free(core)


def test_next_round_follows_at_once_if_the_only_planned_request_has_ended():
    """The ended request had used up the token budget, so request b was not admitted."""
    core, _, out = make_core(max_num_batched_tokens=len(PROMPT))
    requests = [add("a", PROMPT, 3, cache_hit_threshold=1.0), add("b", PROMPT, 3)]
    assert core.round(requests)
    assert out.terminals("a") and core.sequences.keys() == {"b"}


@pytest.mark.parametrize(
    "fields",
    [{"retain_kv": True}, {"resumed_choices": [ResumedChoice([5])]}],
    ids=["prefill leg", "failover"],
)
def test_prefill_legs_and_failovers_have_no_threshold(fields):
    core, _, out = make_core()
    run_until_idle(core, add("a", PROMPT, 2, cache_hit_threshold=1.0, **fields))
    assert out.terminals("a")[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_answer_is_empty_with_the_finish_reason_of_llm_d(tokenizer, path, stream):
    script = text_script(tokenizer, "", finish_reason=CACHE_MISS)
    async with serving(tokenizer, script) as server:
        fields = {"cache_hit_threshold": 0.8, "stream": stream}
        if "chat" in path:
            fields["messages"] = [{"role": "user", "content": "Hi"}]
        answer = await server.post(path, **fields)
        assert answer.status_code == 200
        assert answer.text.count(f'"finish_reason":"{CACHE_MISS}"') == 1
        assert server.engine.added[0].cache_hit_threshold == 0.8
        endpoint = "chat" if "chat" in path else "completions"
        labels = {"endpoint": endpoint, "outcome": CACHE_MISS}
        assert metric(server.metrics, "baton_requests", **labels) == 1


@pytest.mark.parametrize("value", [-0.1, 1.1, "x"])
async def test_threshold_that_is_no_share_is_refused(tokenizer, value):
    async with serving(tokenizer) as server:
        answer = await server.post(cache_hit_threshold=value)
        assert answer.status_code == 400
        assert "cache_hit_threshold" in answer.json()["error"]["message"]
