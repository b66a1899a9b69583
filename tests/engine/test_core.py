"""The engine core with the real scheduler, allocator and prefix index.

The executor is a shadow of the KV cache (tests/rigs/shadow.py), which computes each
step as late as allowed. tests/engine/kv/test_role_mixture.py has random workloads.
"""

from types import SimpleNamespace

import pytest

from engine.core.scheduler import Plan
from engine.core.sequence import Phase, Sequence
from engine.core.waiting import MAX_OVERTAKEN
from kvcache.groups import ONE_GROUP, KVGroups
from protocol.messages import (
    AbortRequest,
    EngineInput,
    EngineOutput,
    KVUsage,
    ResumedChoice,
)
from tests.rigs.shadow import (
    MemoryTransport,
    add,
    assert_all_blocks_free,
    expected_output,
    expected_scores,
    make_core,
    run_until_idle,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_engine_reports_its_capacity_before_the_first_request(depth):
    core, _, out = make_core(depth=depth, num_blocks=32)
    core.run()  # returns immediately, because the transport is closed
    assert out.stats["baton_kv_blocks_capacity"] == 31


class _StatsAtEnd(MemoryTransport):
    """Keeps the latest stats that were sent before the end of request a."""

    def __init__(self) -> None:
        super().__init__()
        self.stats_at_end: dict[str, float] = {}

    def send(self, message: EngineOutput) -> None:
        super().send(message)
        if not self.stats_at_end and self.terminals("a"):
            self.stats_at_end = self.stats


def test_metrics_read_after_the_last_answer_include_that_answer(depth):
    core, _, _ = make_core(depth=depth)
    transport = _StatsAtEnd()
    core.transport = transport
    core.run()  # sends a report, so that the next periodic report is not due soon
    run_until_idle(core, add("a", PROMPT, 4))
    stats = transport.stats_at_end
    assert stats["baton_prefix_cache_query_tokens"] == len(PROMPT)
    assert stats["baton_engine_steps"] >= 4
    assert stats["baton_requests_running"] == 0


class _IdleTransport(MemoryTransport):
    """Delivers one message, then none. Each wait for messages advances `now_s` by a
    second."""

    def __init__(self, first: EngineInput, num_receives: int) -> None:
        super().__init__()
        self.now_s = 100.0
        self._batches = iter([[first], *([] for _ in range(num_receives))])

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        if timeout_s:
            self.now_s += 1.0
        messages = next(self._batches, None)
        return messages or [], messages is None


def test_block_accounting_is_checked_once_when_the_engine_has_been_idle(
    depth, monkeypatch
):
    core, _, _ = make_core(depth=depth)
    transport = _IdleTransport(add("a", [1, 2, 3], 4), num_receives=30)
    core.transport = transport
    clock = SimpleNamespace(
        monotonic=lambda: transport.now_s, perf_counter=lambda: transport.now_s
    )
    monkeypatch.setattr("engine.core.core.time", clock)
    checks: list[float] = []
    monkeypatch.setattr(
        core.scheduler, "check_integrity", lambda: checks.append(transport.now_s)
    )
    core.run()
    assert transport.terminals("a") and len(checks) == 1
    assert checks[0] >= 105.0


def test_stop_token_ends_a_request_with_stop_and_the_context_limit_with_length(depth):
    prompt = [1, 2, 3, 4]
    full = expected_output(prompt, 20)
    core, _, out = make_core(depth=depth, max_model_len=10)
    run_until_idle(
        core, add("a", prompt, 20, stop_token_ids=[full[3]]), add("b", prompt, 100)
    )
    assert (
        out.tokens("a") == full[: full.index(full[3]) + 1]
        and out.tokens("b") == full[:6]
    )
    assert [out.terminals(name)[0].finish_reason for name in "ab"] == ["stop", "length"]


@pytest.mark.parametrize(
    ("length", "skipped", "recomputed"),
    [(17, 16, 1), (16, 12, 4)],
    ids=["partial last block", "full last block"],
)
def test_repeated_prompt_is_served_from_cached_blocks(
    depth, length, skipped, recomputed
):
    core, executor, out = make_core(depth=depth)
    for name in "ab":
        num_steps = executor.num_steps
        run_until_idle(core, add(name, list(range(length)), 3))
    assert out.tokens("b") == out.tokens("a") and executor.num_steps == num_steps + 3
    usage = KVUsage(recomputed=recomputed, skipped=skipped, cached_tokens=skipped)
    assert out.terminals("b")[0].usage == usage


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([1, 0, -1, 0, 1], [2, 1, 3, 0, 4]),
        # Only the first MAX_OVERTAKEN urgent requests overtake the first request.
        ([5, *[-1] * (MAX_OVERTAKEN + 2)], [*range(1, MAX_OVERTAKEN + 1), 0, 65, 66]),
    ],
)
def test_urgent_requests_are_served_first_and_overtaking_is_limited(priorities, order):
    core, _, out = make_core(max_num_seqs=1)
    requests = [
        add(str(i), [i, 1], 1, priority=priority)
        for i, priority in enumerate(priorities)
    ]
    run_until_idle(core, *requests)
    assert [int(delta.request_id) for delta in out.deltas] == order


@pytest.mark.parametrize("interruption", [None, "abort", "preempt"])
def test_concurrent_prompts_compute_their_shared_prefix_once(depth, interruption):
    """The first request computes the prefix, and may end or lose its blocks before the
    prefix is complete."""
    core, _, out = make_core(depth=depth, num_blocks=64)
    shared = list(range(40))
    names = "abcdef"
    prompts = {name: [*shared, index, 7, 7] for index, name in enumerate(names)}
    core.round([add(name, prompt, 3) for name, prompt in prompts.items()])
    core.round([])
    assert len(core.scheduler.running) == 1
    core.finish_steps(0)
    if interruption == "abort":
        core.round([AbortRequest("a")])
    elif interruption == "preempt":
        core.scheduler._preempt(core.sequences["a"], Plan(0))
    run_until_idle(core)
    for name in names[1:] if interruption == "abort" else names:
        assert out.tokens(name) == expected_output(prompts[name], 3)
    usages = [end.usage for name in names for end in out.terminals(name)]
    computed = sum(usage.recomputed for usage in usages if usage)
    assert computed <= 43 + 5 * 3, "the prefix once, and the last 3 tokens of each"
    assert_all_blocks_free(core)


def test_prompts_with_different_salts_do_not_wait_for_a_shared_prefix(depth):
    """The duration of a wait would reveal the prompts of other salts."""
    core, _, out = make_core(depth=depth, num_blocks=64)
    prompts = {name: [*range(40), index] for index, name in enumerate("abc")}
    salts = {"a": b"one", "b": b"one", "c": b"other"}
    run_until_idle(
        core, *(add(name, prompts[name], 3, cache_salt=salts[name]) for name in prompts)
    )
    skipped = {}
    for name, prompt in prompts.items():
        assert out.tokens(name) == expected_output(prompt, 3)
        usage = out.terminals(name)[0].usage
        assert usage is not None
        skipped[name] = usage.skipped
    assert skipped["a"] == skipped["c"] == 0 < skipped["b"]
    ends = [delta.request_id for delta in out.deltas if delta.finish_reason]
    assert ends.index("c") < ends.index("b"), (
        "only b waits for the prefix that a computes"
    )
    assert_all_blocks_free(core)


class _CountingTokens(list[int]):
    """A list of token ids that counts its slices: a lookup of a block takes a slice."""

    num_lookups = 0

    def __getitem__(self, key):
        if isinstance(key, slice):
            self.num_lookups += 1
        return super().__getitem__(key)


def test_each_block_of_tokens_is_looked_up_once_while_a_request_waits_and_decodes():
    """In a full pool, the request waits behind a prompt that takes many rounds, while a
    stream decodes."""
    core, executor, out = make_core(
        num_blocks=31, max_num_batched_tokens=6, max_model_len=100
    )
    prompt = list(range(60))
    run_until_idle(core, add("a", prompt, 1))
    core.round([add("s", prompt[:8], 20), add("p", range(60, 110), 1)])
    core.round([add("b", [*prompt, 7, 8], 30)])
    waiting = core.sequences["b"]
    num_steps = executor.num_steps
    tokens = _CountingTokens(waiting.token_ids)
    waiting.token_ids = tokens
    while waiting.phase is Phase.WAITING:
        core.round([])
    assert executor.num_steps > num_steps + 5
    run_until_idle(core)
    assert out.tokens("b") == expected_output([*prompt, 7, 8], 30)
    # The limit also allows one lookup per round, of the first block that is not cached.
    assert tokens.num_lookups <= 3 * len(tokens) // 4
    assert_all_blocks_free(core)


def test_prompts_that_share_little_are_computed_concurrently():
    core, _, _ = make_core(num_blocks=64, max_num_batched_tokens=64)
    core.round(
        [add(name, [1, 2, 3, 4, *[first] * 20], 3) for first, name in enumerate("ab")]
    )
    assert len(core.scheduler.running) == 2


def test_decoding_continues_while_a_long_prompt_is_prefilled_in_chunks(depth):
    core, executor, out = make_core(depth=depth, max_num_batched_tokens=8)
    core.round([add("a", [1, 2, 3], 20)])
    core.round([add("b", list(range(30)), 2)])
    num_before = len(out.tokens("a"))
    for _ in range(3):
        core.round([])
    assert len(out.tokens("a")) == num_before + 3, "each chunk's step also decodes"
    assert not out.tokens("b")
    run_until_idle(core)
    assert out.tokens("b") == expected_output(list(range(30)), 2)
    assert executor.max_tokens_in_step <= 8


@pytest.mark.parametrize("num_resumed", [0, 5])
def test_usage_counts_hits_lost_before_the_prompt_was_complete_as_recomputed(
    depth, num_resumed
):
    """A resumed request finds its complete prompt in the cache; if the hits are lost
    later, the prompt still counts as skipped."""
    core, _, out = make_core(
        depth=depth, max_num_batched_tokens=16 if num_resumed else 4
    )
    prompt = list(range(16))
    run_until_idle(core, add("a", prompt[: 16 if num_resumed else 8], 8))
    outputs = expected_output(prompt, 8)
    resumed_choices = []
    if num_resumed:
        resumed_choices.append(ResumedChoice(outputs[:num_resumed]))
    core.round([add("b", prompt, 8, resumed_choices=resumed_choices)])
    # Request b now has 8 cached and 4 computed tokens, or all its tokens are cached.
    core.finish_steps(0)
    core.scheduler._preempt(core.sequences["b"], Plan(0))
    assert core.scheduler.prefix is not None
    prefix = core.scheduler.prefix
    prefix._remove_descendants(prefix._root)
    run_until_idle(core)
    assert out.tokens("b") == outputs[num_resumed:]
    usage = KVUsage(recomputed=16)
    if num_resumed:
        usage = KVUsage(skipped=16, cached_tokens=16)
    assert out.terminals("b")[0].usage == usage


@pytest.mark.parametrize("groups", [ONE_GROUP, KVGroups((None, 6))], ids=str)
@pytest.mark.parametrize(
    ("length", "max_tokens"), [(30, 1), (9, 30)], ids=["prompt", "outputs"]
)
def test_request_larger_than_the_pool_ends_with_an_error(
    depth, groups, length, max_tokens
):
    """The HTTP process of a server refuses such requests. Without the core's error, the
    request would preempt itself forever."""
    core, _, out = make_core(depth=depth, groups=groups, num_blocks=6 * groups.count)
    run_until_idle(core, add("a", range(length), max_tokens), add("b", [1, 2], 2))
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "overloaded"
    assert len(out.tokens("b")) == 2 and out.terminals("b")[0].error is None
    assert_all_blocks_free(core)


# -- choices ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 10])
def test_choices_differ_and_their_prompt_is_computed_once(depth, length):
    prompt = PROMPT[:length]
    core, executor, out = make_core(depth=depth)
    run_until_idle(core, add("a", prompt, 5, num_choices=3))
    for choice in range(3):
        assert out.tokens("a", choice) == expected_output(prompt, 5, choice=choice)
    assert [d.choice for d in out.terminals("a")] == [0, 1, 2]
    assert {d.usage for d in out.terminals("a")} == {KVUsage(recomputed=length)}
    assert executor.num_tokens == length + 3 * 4 + 2 * (length % 4), (
        "each choice computes the last, partial block itself"
    )
    assert_all_blocks_free(core)


def test_waiting_choices_have_one_copy_of_their_prompt():
    parent = Sequence.from_request(add("a", PROMPT, 20, num_choices=8))
    assert sum(len(choice.token_ids) for choice in parent.choices) == len(PROMPT)


def test_first_tokens_are_sent_in_the_order_of_the_choices():
    core, _, out = make_core()
    run_until_idle(core, add("a", PROMPT, 2, num_choices=3, num_prompt_logprobs=1))
    assert [bool(d.prompt_logprobs) for d in out.deltas[:2]] == [True, False]
    assert [d.choice for d in out.deltas[1:4]] == [0, 1, 2]


# -- logprobs of the prompt ------------------------------------------------------------


def test_scored_prompt_uses_no_cached_blocks_but_its_blocks_are_cached():
    core, _, out = make_core()
    for name, top in (("a", None), ("b", 0), ("c", None)):
        run_until_idle(core, add(name, PROMPT, 0, num_prompt_logprobs=top))
    usages = [out.terminals(name)[0].usage for name in "abc"]
    assert [usage and usage.skipped for usage in usages] == [0, 0, 8]
    assert out.prompt_logprobs("b") == expected_scores(PROMPT, 0)


def test_prompt_may_fill_the_context_if_no_token_is_drawn():
    core, _, out = make_core(max_model_len=10)
    run_until_idle(core, add("a", PROMPT, 0, num_prompt_logprobs=0))
    assert out.prompt_logprobs("a") == expected_scores(PROMPT, 0)
