"""The core with the real scheduler, allocator and prefix index over a shadow KV cache."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.scheduler import Plan
from protocol.messages import AbortRequest, AddRequest, EngineInput, KVUsage
from tests.rigs.shadow import (
    SIZES,
    MemoryTransport,
    Sizes,
    add,
    assert_all_blocks_home,
    expected_output,
    make_core,
    play,
    run_until_idle,
)

# Whether a step may be under way while the next one is planned and launched.
pytestmark = pytest.mark.parametrize("depth", [0, 1])


def test_one_request_is_answered_with_its_own_continuation(depth: int) -> None:
    core, _, out = make_core(depth=depth)
    core.round([add("a", [1, 2, 3, 4, 5], 7)])
    run_until_idle(core)
    assert out.tokens("a") == expected_output([1, 2, 3, 4, 5], 7)
    (end,) = out.terminals("a")
    assert end.finish_reason == "length"
    assert_all_blocks_home(core)


def test_an_engine_that_nobody_asked_yet_reports_its_capacity(depth: int) -> None:
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


def test_the_books_are_checked_once_when_it_has_been_quiet(
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, _, _ = make_core(depth=depth)
    quiet = _Quiet(add("a", [1, 2, 3], 4), num_looks=30)
    core.transport = quiet
    clock = SimpleNamespace(monotonic=lambda: quiet.now_s, perf_counter=lambda: quiet.now_s)
    monkeypatch.setattr("engine.core.core.time", clock)
    checks: list[float] = []
    monkeypatch.setattr(core, "check_integrity", lambda: checks.append(quiet.now_s))
    core.run()
    assert quiet.terminals("a") and len(checks) == 1
    assert checks[0] >= 105.0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 31, 32, 33])
def test_prompts_around_block_and_chunk_borders(depth: int, length: int) -> None:
    core, _, out = make_core(depth=depth)
    prompt = [(7 * i) % 50 for i in range(length)]
    core.round([add("a", prompt, 6)])
    run_until_idle(core)
    assert out.tokens("a") == expected_output(prompt, 6)


def test_a_stop_token_ends_the_request_with_stop(depth: int) -> None:
    prompt = [1, 2, 3]
    full = expected_output(prompt, 20)
    stop = full[4]
    core, _, out = make_core(depth=depth)
    core.round([add("a", prompt, 20, stop_token_ids=[stop])])
    run_until_idle(core)
    assert out.tokens("a") == full[: full.index(stop) + 1]
    assert out.terminals("a")[0].finish_reason == "stop"


def test_the_context_ends_a_request_with_length(depth: int) -> None:
    core, _, out = make_core(depth=depth, max_model_len=10)
    core.round([add("a", [1, 2, 3, 4], 100)])
    run_until_idle(core)
    assert len(out.tokens("a")) == 6
    assert out.terminals("a")[0].finish_reason == "length"


def test_a_prompt_that_cannot_fit_is_answered_with_an_error(depth: int) -> None:
    core, _, out = make_core(depth=depth, max_model_len=10)
    core.round([add("a", list(range(10)), 1)])
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "context_length_exceeded"
    assert core.is_idle


def test_a_repeated_prompt_is_served_from_cached_blocks(depth: int) -> None:
    prompt = list(range(17))
    core, executor, out = make_core(depth=depth)
    core.round([add("a", prompt, 3)])
    run_until_idle(core)
    steps = executor.num_steps
    core.round([add("b", prompt, 3)])
    run_until_idle(core)
    assert out.tokens("b") == out.tokens("a")
    (end,) = out.terminals("b")
    assert end.usage is not None
    assert (end.usage.skipped, end.usage.recomputed, end.usage.cached_tokens) == (16, 1, 16)
    assert executor.num_steps == steps + 3


def test_a_fully_cached_prompt_still_computes_its_last_token(depth: int) -> None:
    prompt = list(range(16))
    core, _, out = make_core(depth=depth)
    for name in ("a", "b"):
        core.round([add(name, prompt, 2)])
        run_until_idle(core)
    assert out.tokens("b") == out.tokens("a")
    usage = out.terminals("b")[0].usage
    assert usage is not None and (usage.skipped, usage.recomputed) == (12, 4)


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks(depth: int) -> None:
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


def test_preemption_recomputes_and_loses_nothing(depth: int) -> None:
    core, _, out = make_core(depth=depth, num_blocks=9, max_model_len=32)
    prompts = {name: [ord(name), 1, 2, 3] for name in "abcd"}
    core.round([add(name, prompt, 20) for name, prompt in prompts.items()])
    run_until_idle(core)
    assert core.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert out.tokens(name) == expected_output(prompt, 20)
    assert_all_blocks_home(core)


def test_hits_lost_before_the_prompt_was_computed_are_not_called_cached(depth: int) -> None:
    core, _, out = make_core(depth=depth, max_num_batched_tokens=4)
    prompt = list(range(16))
    core.round([add("a", prompt[:8], 1)])
    run_until_idle(core)
    core.round([add("b", prompt, 2)])  # hits 8 tokens, computes 4
    core.finish_steps(0)
    core.scheduler._preempt(core.sequences["b"], Plan(0))
    assert core.scheduler.prefix is not None
    core.scheduler.prefix.clear()
    run_until_idle(core)
    assert out.tokens("b") == expected_output(prompt, 2)
    usage = out.terminals("b")[0].usage
    assert usage == KVUsage(recomputed=16, skipped=0, cached_tokens=0)


def test_abort_frees_waiting_and_running_requests_and_answers_each_once(depth: int) -> None:
    core, _, out = make_core(depth=depth, max_num_seqs=1)
    core.round([add("a", [1, 2], 30), add("b", [3, 4], 30)])
    core.round([AbortRequest("a"), AbortRequest("b"), AbortRequest("unknown")])
    assert core.is_idle
    assert [d.finish_reason for d in out.terminals("a")] == ["abort"]
    assert [d.finish_reason for d in out.terminals("b")] == ["abort"]
    assert not out.terminals("unknown")
    assert_all_blocks_home(core)


_PREFIXES = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [6] * 13]


@st.composite
def _workloads(draw: st.DrawFn) -> list[list[EngineInput]]:
    """Rounds of additions and aborts; prompts share prefixes."""
    rounds: list[list[EngineInput]] = []
    names = itertools.count()
    for _ in range(draw(st.integers(1, 12))):
        messages: list[EngineInput] = []
        for _ in range(draw(st.integers(0, 3))):
            tail = draw(st.lists(st.integers(0, 49), min_size=1, max_size=10))
            prompt = draw(st.sampled_from([[], *_PREFIXES])) + tail
            messages.append(add(str(next(names)), prompt, draw(st.integers(1, 12))))
        if draw(st.booleans()):
            messages.append(AbortRequest(str(draw(st.integers(0, 20)))))
        rounds.append(messages)
    return rounds


@settings(deadline=None, max_examples=150)
@given(workload=_workloads(), sizes=SIZES)
def test_any_workload_ends_with_every_answer_right_and_every_block_home(
    depth: int, workload: list[list[EngineInput]], sizes: Sizes
) -> None:
    out = play(workload, dataclasses.replace(sizes, depth=depth))
    max_len = sizes.max_model_len
    requests = [m for messages in workload for m in messages if isinstance(m, AddRequest)]
    for request in requests:
        (end,) = out.terminals(request.request_id)
        prompt, limit = request.token_ids, request.max_tokens
        tokens = out.tokens(request.request_id)
        if end.error is not None:
            assert len(prompt) >= max_len and not tokens
            continue
        expected = expected_output(prompt, min(limit, max_len - len(prompt)))
        if end.finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
