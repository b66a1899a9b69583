"""The core with the real scheduler, allocator and prefix index over a shadow KV cache. Any workload
at all is tests/decode_server/test_role_mixture.py's."""

from types import SimpleNamespace

import pytest

from engine.core.scheduler import Plan
from protocol.messages import AbortRequest, EngineInput, KVUsage
from tests.rigs.shadow import (
    MemoryTransport,
    add,
    assert_all_blocks_home,
    expected_output,
    make_core,
    run_until_idle,
)

# Whether a step may be under way while the next one is planned and launched.
pytestmark = pytest.mark.parametrize("depth", [0, 1])


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
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _, _ = make_core(depth=depth)
    quiet = _Quiet(add("a", [1, 2, 3], 4), num_looks=30)
    core.transport = quiet
    clock = SimpleNamespace(monotonic=lambda: quiet.now_s, perf_counter=lambda: quiet.now_s)
    monkeypatch.setattr("engine.core.core.time", clock)
    checks: list[float] = []
    monkeypatch.setattr(core.scheduler, "check_integrity", lambda: checks.append(quiet.now_s))
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
    assert [end.finish_reason for end in out.terminals("a")] == ["length"]
    assert_all_blocks_home(core)


def test_a_stop_token_ends_a_request_with_stop_and_the_context_with_length(depth: int) -> None:
    prompt = [1, 2, 3, 4]
    full = expected_output(prompt, 20)
    core, _, out = make_core(depth=depth, max_model_len=10)
    core.round([add("a", prompt, 20, stop_token_ids=[full[3]]), add("b", prompt, 100)])
    run_until_idle(core)
    assert out.tokens("a") == full[: full.index(full[3]) + 1] and out.tokens("b") == full[:6]
    assert [out.terminals(name)[0].finish_reason for name in "ab"] == ["stop", "length"]


@pytest.mark.parametrize(
    ("length", "skipped", "recomputed"), [(17, 16, 1), (16, 12, 4)], ids=["", "its last token"]
)
def test_a_repeated_prompt_is_served_from_cached_blocks(
    depth: int, length: int, skipped: int, recomputed: int
) -> None:
    core, executor, out = make_core(depth=depth)
    for name in "ab":
        num_steps = executor.num_steps
        core.round([add(name, list(range(length)), 3)])
        run_until_idle(core)
    assert out.tokens("b") == out.tokens("a") and executor.num_steps == num_steps + 3
    usage = KVUsage(recomputed=recomputed, skipped=skipped, cached_tokens=skipped)
    assert out.terminals("b")[0].usage == usage


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
    assert out.terminals("b")[0].usage == KVUsage(recomputed=16)


def test_abort_frees_waiting_and_running_requests_and_answers_each_once(depth: int) -> None:
    core, _, out = make_core(depth=depth, max_num_seqs=1)
    core.round([add("a", [1, 2], 30), add("b", [3, 4], 30)])
    core.round([AbortRequest("a"), AbortRequest("b"), AbortRequest("unknown")])
    assert core.is_idle
    for name, reasons in (("a", ["abort"]), ("b", ["abort"]), ("unknown", [])):
        assert [end.finish_reason for end in out.terminals(name)] == reasons
    assert_all_blocks_home(core)
