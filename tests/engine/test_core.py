"""The core with the real scheduler, allocator and prefix index over a shadow KV cache, which runs
each step as late as it may. Any workload at all is tests/engine/kv/test_role_mixture.py's."""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from engine.core.connector import KVConnector
from engine.core.scheduler import Plan
from engine.core.sequence import Phase, Sequence
from engine.core.waiting import MAX_OVERTAKEN
from kvcache.groups import ONE_GROUP, KVGroups
from protocol.kv_params import parse, to_remote_prefill
from protocol.messages import (
    AbortRequest,
    EngineInput,
    FirstToken,
    KVUsage,
    RemotePrefill,
    ResumedChoice,
    SamplingParams,
)
from tests.rigs.offers import offer
from tests.rigs.shadow import (
    MemoryTransport,
    ShadowExecutor,
    add,
    assert_all_blocks_free,
    expected_output,
    expected_scores,
    make_core,
    run_until_idle,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_an_engine_that_nobody_asked_yet_reports_its_capacity(depth):
    core, _, out = make_core(depth=depth, num_blocks=32)
    core.run()  # the transport ends it at once
    assert out.stats["baton_kv_blocks_capacity"] == 31


class _Quiet(MemoryTransport):
    """One message, then nothing: a second passes by the clock at each look."""

    def __init__(self, first: EngineInput, num_looks: int) -> None:
        super().__init__()
        self.now_s = 100.0
        self._looks = iter([[first], *([] for _ in range(num_looks))])

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        if timeout_s:
            self.now_s += 1.0
        messages = next(self._looks, None)
        return messages or [], messages is None


def test_the_books_are_checked_once_when_it_has_been_quiet(depth, monkeypatch):
    core, _, _ = make_core(depth=depth)
    quiet = _Quiet(add("a", [1, 2, 3], 4), num_looks=30)
    core.transport = quiet
    clock = SimpleNamespace(
        monotonic=lambda: quiet.now_s, perf_counter=lambda: quiet.now_s
    )
    monkeypatch.setattr("engine.core.core.time", clock)
    checks: list[float] = []
    monkeypatch.setattr(
        core.scheduler, "check_integrity", lambda: checks.append(quiet.now_s)
    )
    core.run()
    assert quiet.terminals("a") and len(checks) == 1
    assert checks[0] >= 105.0


def test_a_stop_token_ends_a_request_with_stop_and_the_context_with_length(depth):
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
    ids=["", "its last token"],
)
def test_a_repeated_prompt_is_served_from_cached_blocks(
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
        # The first is overtaken so many times, and then by none of those that come.
        ([5, *[-1] * (MAX_OVERTAKEN + 2)], [*range(1, MAX_OVERTAKEN + 1), 0, 65, 66]),
    ],
)
def test_the_urgent_are_served_first_and_nobody_is_overtaken_for_ever(
    priorities, order
):
    core, _, out = make_core(max_num_seqs=1)
    asked = [
        add(str(i), [i, 1], 1, priority=priority)
        for i, priority in enumerate(priorities)
    ]
    run_until_idle(core, *asked)
    assert [int(delta.request_id) for delta in out.deltas] == order


@pytest.mark.parametrize("gone", [None, "abort", "preempt"])
def test_prompts_that_come_together_compute_what_they_share_once(depth, gone):
    """Also where the one that computes it ends, or loses its blocks, halfway."""
    core, _, out = make_core(depth=depth, num_blocks=64)
    shared, names = list(range(40)), "abcdef"
    prompts = {name: [*shared, index, 7, 7] for index, name in enumerate(names)}
    core.round([add(name, prompt, 3) for name, prompt in prompts.items()])
    core.round([])
    assert len(core.scheduler.running) == 1
    core.finish_steps(0)
    if gone == "abort":
        core.round([AbortRequest("a")])
    elif gone == "preempt":
        core.scheduler._preempt(core.sequences["a"], Plan(0))
    run_until_idle(core)
    for name in names[gone == "abort" :]:
        assert out.tokens(name) == expected_output(prompts[name], 3)
    usages = [end.usage for name in names for end in out.terminals(name)]
    computed = sum(usage.recomputed for usage in usages if usage)
    assert computed <= 43 + 5 * 3, "the prefix once, and of each what is its own"
    assert_all_blocks_free(core)


def test_prompts_of_different_salts_do_not_wait_for_what_they_have_in_common(depth):
    """A wait would show by its time what a request of another salt has sent."""
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


class _Read(list[int]):
    """Tokens, and how many blocks of them were looked up."""

    num = 0

    def __getitem__(self, key):
        self.num += isinstance(key, slice)
        return super().__getitem__(key)


def test_a_block_of_tokens_is_looked_up_once_however_long_it_waits_and_decodes():
    """Behind a prompt that is computed for many rounds, beside a stream, in a pool that is full."""
    core, executor, out = make_core(
        num_blocks=31, max_num_batched_tokens=6, max_model_len=100
    )
    prompt = list(range(60))
    run_until_idle(core, add("a", prompt, 1))
    core.round([add("s", prompt[:8], 20), add("p", range(60, 110), 1)])
    core.round([add("b", [*prompt, 7, 8], 30)])
    waits, num_steps = core.sequences["b"], executor.num_steps
    waits.token_ids = read = _Read(waits.token_ids)
    while waits.phase is Phase.WAITING:
        core.round([])
    assert executor.num_steps > num_steps + 5
    run_until_idle(core)
    assert out.tokens("b") == expected_output([*prompt, 7, 8], 30)
    assert read.num <= 3 * len(read) // 4  # and one of each round, which it lacks
    assert_all_blocks_free(core)


def test_prompts_that_share_little_are_computed_side_by_side():
    core, _, _ = make_core(num_blocks=64, max_num_batched_tokens=64)
    core.round(
        [add(name, [1, 2, 3, 4, *[first] * 20], 3) for first, name in enumerate("ab")]
    )
    assert len(core.scheduler.running) == 2


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks(depth):
    core, executor, out = make_core(depth=depth, max_num_batched_tokens=8)
    core.round([add("a", [1, 2, 3], 20)])
    core.round([add("b", list(range(30)), 2)])
    before = len(out.tokens("a"))
    for _ in range(3):
        core.round([])
    assert len(out.tokens("a")) == before + 3, "each chunk's step also decodes"
    assert not out.tokens("b")
    run_until_idle(core)
    assert out.tokens("b") == expected_output(list(range(30)), 2)
    assert executor.max_tokens_in_step <= 8


@pytest.mark.parametrize("known", [0, 5])
def test_hits_lost_before_the_prompt_was_computed_are_not_called_cached(depth, known):
    """Nor is a prompt called computed that was all hits, as its stream had begun elsewhere."""
    core, _, out = make_core(depth=depth, max_num_batched_tokens=16 if known else 4)
    prompt = list(range(16))
    run_until_idle(core, add("a", prompt[: 16 if known else 8], 8))
    outputs = expected_output(prompt, 8)
    core.round(
        [
            add(
                "b",
                prompt,
                8,
                resumed_choices=[ResumedChoice(outputs[:known])] * bool(known),
            )
        ]
    )
    core.finish_steps(0)  # it hits 8 tokens and computes 4, or hits them all
    core.scheduler._preempt(core.sequences["b"], Plan(0))
    assert core.scheduler.prefix is not None
    prefix = core.scheduler.prefix
    prefix._remove_descendants(prefix._root)
    run_until_idle(core)
    assert out.tokens("b") == outputs[known:]
    usage = KVUsage(skipped=16, cached_tokens=16) if known else KVUsage(recomputed=16)
    assert out.terminals("b")[0].usage == usage


@pytest.mark.parametrize("groups", [ONE_GROUP, KVGroups((None, 6))], ids=str)
@pytest.mark.parametrize(
    ("length", "num"), [(30, 1), (9, 30)], ids=["prompt", "outputs"]
)
def test_what_the_whole_pool_cannot_hold_ends_with_an_error(depth, groups, length, num):
    """No engine takes it, by what it says of its pool: else it would preempt itself for ever."""
    core, _, out = make_core(depth=depth, groups=groups, num_blocks=6 * groups.count)
    run_until_idle(core, add("a", range(length), num), add("b", [1, 2], 2))
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "overloaded"
    assert len(out.tokens("b")) == 2 and out.terminals("b")[0].error is None
    assert_all_blocks_free(core)


# -- choices -------------------------------------------------------------------------------------


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
        "of the last block its own"
    )
    assert_all_blocks_free(core)


def test_a_prompt_is_held_once_for_all_choices_that_wait():
    first = Sequence.from_request(add("a", PROMPT, 20, num_choices=8))
    assert sum(len(choice.token_ids) for choice in first.choices) == len(PROMPT)


def test_first_tokens_come_in_the_order_of_the_choices():
    core, _, out = make_core()
    run_until_idle(core, add("a", PROMPT, 2, num_choices=3, num_prompt_logprobs=1))
    assert [bool(d.prompt_logprobs) for d in out.deltas[:2]] == [True, False]
    assert [d.choice for d in out.deltas[1:4]] == [0, 1, 2]


# -- logprobs of the prompt ----------------------------------------------------------------------


def test_a_prompt_to_be_scored_takes_no_cached_blocks_and_leaves_some():
    core, _, out = make_core()
    for name, top in (("a", None), ("b", 0), ("c", None)):
        run_until_idle(core, add(name, PROMPT, 0, num_prompt_logprobs=top))
    skipped = [out.terminals(name)[0].usage.skipped for name in "abc"]  # type: ignore[union-attr]
    assert skipped == [0, 0, 8]
    assert out.prompt_logprobs("b") == expected_scores(PROMPT, 0)


def test_a_prompt_may_fill_the_context_when_nothing_is_drawn():
    core, _, out = make_core(max_model_len=10)
    run_until_idle(core, add("a", PROMPT, 0, num_prompt_logprobs=0))
    assert out.prompt_logprobs("a") == expected_scores(PROMPT, 0)


# -- steps ahead ----------------------------------------------------------------------------------


_RESTRICTED = SamplingParams(
    temperature=1.0,
    top_k=9,
    top_p=0.5,
    min_p=0.1,
    presence_penalty=0.5,
    logit_bias={3: 1.0},
)


@pytest.mark.parametrize(
    ("asked", "num_steps"),
    [
        pytest.param(add("a", PROMPT[:5], 12), 12, id="decode steps"),
        pytest.param(
            add("a", PROMPT[:5], 9, _RESTRICTED, stop_token_ids=[3]), 9, id="any draw"
        ),
        pytest.param(
            add("a", range(20, 40), 0, num_prompt_logprobs=1), 4, id="scores alone"
        ),
    ],
)
def test_steps_are_launched_before_the_last_ones_tokens_are_known(asked, num_steps):
    core, executor, out = make_core(depth=1, max_num_batched_tokens=6)
    run_until_idle(core, asked)
    assert out.tokens("a") == expected_output(asked.token_ids, asked.max_tokens)
    if asked.num_prompt_logprobs:
        assert out.prompt_logprobs("a") == expected_scores(asked.token_ids, 1)
    assert executor.num_steps == num_steps, (
        "the length is known beforehand: no step too many"
    )
    assert executor.num_steps_ahead == num_steps - 1
    assert_all_blocks_free(core)


def test_choices_that_fork_off_hold_up_only_themselves():
    core, executor, out = make_core(depth=1)
    core.round([add("a", PROMPT, 20)])
    while len(out.tokens("a")) < 4:
        core.round([])
    prompt = list(range(20, 30))
    run_until_idle(core, add("b", prompt, 6, num_choices=3))
    assert out.tokens("a") == expected_output(PROMPT, 20)
    for choice in range(3):
        assert out.tokens("b", choice) == expected_output(prompt, 6, choice=choice)
    assert (executor.num_steps, executor.num_steps_ahead) == (20, 19)
    assert_all_blocks_free(core)


class _Slow(ShadowExecutor):
    """The step that is waited for ends at the third look."""

    num_looks = 0

    def has_ended(self) -> bool:
        self.num_looks += 1
        return self.num_looks % 3 == 0


class _Pulls(KVConnector):
    """Pulls end at the next look."""

    def __init__(self, executor: ShadowExecutor, out: MemoryTransport) -> None:
        self.executor, self.out = executor, out
        self.pulled: list[Sequence] = []
        self.told: list[list[int]] = []  # when they ended

    def on_receive(self, sequence: Sequence) -> None:
        self.pulled.append(sequence)

    def poll(self) -> None:
        while self.pulled:
            sequence = self.pulled.pop()
            self.told.append(self.out.tokens(sequence.request_id))
            tokens = self.executor.pool[sequence.block_ids].reshape(-1)
            tokens[: sequence.num_prompt_tokens] = sequence.request.token_ids
            self.executor.pool[sequence.block_ids] = tokens.reshape(
                -1, self.executor.block_size
            )
            self.core.scheduler.finish_pull(sequence)


def _remote(prompt: list[int]) -> RemotePrefill:
    first = FirstToken(expected_output(prompt, 1)[0])
    return to_remote_prefill(parse(offer(b"secret", prompt, first_tokens=[first])))


def test_who_comes_while_a_step_is_waited_for_is_pulled_and_answered_before_it_ends():
    executor = _Slow(32, 4, depth=1)
    core, _, out = make_core(executor=executor)
    core.connector = role = _Pulls(executor, out)
    role.bind(core)
    core.round([add("a", PROMPT, 20)])
    for _ in range(3):
        core.round([])
    prompt, before = list(range(20, 36)), len(out.tokens("a"))
    coming: list[list[EngineInput]] = [[add("b", prompt, 4, remote=_remote(prompt))]]
    out.receive = lambda timeout_s: (coming.pop() if coming else [], False)  # type: ignore[method-assign]
    core.round([])
    assert role.told == [expected_output(prompt, 1)], (
        "its first token went out, its KV is there"
    )
    assert len(out.tokens("a")) == before + 1
    core.round([])  # launches the step that it joins at once
    core.round([])
    assert out.tokens("b") == expected_output(prompt, 2)
    run_until_idle(core)
    assert out.tokens("b") == expected_output(prompt, 4)
    assert out.tokens("a") == expected_output(PROMPT, 20)
    assert_all_blocks_free(core)


class _Looked(list[Sequence]):
    num = 0

    def __iter__(self) -> Iterator[Sequence]:
        self.num += 1
        return super().__iter__()


def test_who_waits_for_room_to_be_pulled_costs_no_look_at_who_runs(monkeypatch):
    core, _, _ = make_core(num_blocks=17, max_num_seqs=32)
    monkeypatch.setattr(
        core.connector, "on_receive", lambda sequence: None
    )  # it takes long
    core.round([add("s", PROMPT, 20)])
    looks, names = list[int](), count()
    for num in (6, 60):
        core.round(
            [
                add(f"{next(names)}", PROMPT, 9, remote=_remote(PROMPT))
                for _ in range(num)
            ]
        )
        core.scheduler.running = looked = _Looked(core.scheduler.running)
        core.round([])
        looks.append(looked.num)
    assert len(core.scheduler.waiting) > 50 and looks[0] == looks[1] > 0


def test_the_order_to_end_is_heard_while_a_step_is_waited_for():
    core, _, out = make_core(executor=_Slow(32, 4, depth=1))
    looks = iter(range(40))  # else it goes on for ever
    coming: list[EngineInput] = [add("b", PROMPT, 20)]
    out.receive = lambda timeout_s: ([coming.pop()] if coming else [], next(looks) > 8)  # type: ignore[method-assign]
    core.run()
    assert not out.terminals("b")


def test_nothing_is_planned_behind_a_long_step(monkeypatch):
    monkeypatch.setattr("engine.core.step_runner._PROPORTIONAL_TOKENS", 8)
    monkeypatch.setattr("engine.core.step_runner._LONG_STEP_S", 0.0)
    core, executor, out = make_core(depth=1, max_num_batched_tokens=8)
    prompts = list(range(30)), PROMPT
    core.round([add("a", prompts[0], 4)])
    core.round([])
    assert executor.num_steps_ahead == 1, "nothing is known yet"
    core.round([add("b", prompts[1], 4)])
    while not executor.num_steps_ahead > 1:
        assert len(executor.in_flight) == 1
        core.round([])
    run_until_idle(core)
    for name, prompt in zip("ab", prompts, strict=True):
        assert out.tokens(name) == expected_output(prompt, 4)
    assert_all_blocks_free(core)
