"""The core with sequences under a grammar: they wait, draw what may be drawn, and end."""

import json
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

import engine.text.grammar
from engine.core.core import EngineCore
from engine.text.grammar import _NUM_COMPILING, GrammarCompiler, GrammarState, Int32s
from engine.text.tokenizer import Tokenizer
from protocol.errors import LeaseGone
from protocol.messages import AbortRequest, AddRequest, Grammar, SamplingParams
from tests.make_models import ensure_model
from tests.rigs.shadow import (
    VOCAB,
    MemoryTransport,
    add,
    assert_all_blocks_home,
    expected_output,
    make_core,
    run_until_idle,
)

CHOICES = ["Anna found a red ball", "Ben lost a blue kite", "Anna found a key"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ensure_model("gqa"))


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(ensure_model("gqa"), 512, lambda: None)
    yield compiler
    compiler.close()


@pytest.fixture(params=[0, 1])
def depth(request: pytest.FixtureRequest) -> int:
    """Whether a step may be under way while the next one is planned and launched."""
    return int(request.param)


def core_with(
    compiler: GrammarCompiler, depth: int, **limits: int
) -> tuple[EngineCore, MemoryTransport]:
    core, _, out = make_core(depth=depth, **limits)  # type: ignore[arg-type]
    core.grammars.compiler = compiler
    return core, out


def constrained(
    request_id: str, grammar: Grammar, max_tokens: int = 40, prompt: tuple[int, ...] = (1, 2, 3)
) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, grammar=grammar)
    free = add(request_id, prompt, max_tokens, stop_token_ids=[2])
    return AddRequest(
        request_id=request_id,
        token_ids=free.token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=[2],
    )


def choice(*texts: str) -> Grammar:
    return Grammar("choice", json.dumps(texts))


def compiled(compiler: GrammarCompiler, *grammars: Grammar) -> None:
    for grammar in grammars:
        compiler.compiled(grammar).exception()


def keep_busy(compiler: GrammarCompiler, go_on: threading.Event) -> None:
    for _ in range(_NUM_COMPILING):
        compiler._compiling.submit(go_on.wait)


def test_a_constrained_and_a_free_sequence_share_steps(
    depth: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    core, out = core_with(compiler, depth)
    compiled(compiler, choice(*CHOICES))
    core.round([constrained("a", choice(*CHOICES)), add("b", [4, 5, 6], 9)])
    run_until_idle(core)
    assert tokenizer.decode(out.tokens("a")) in CHOICES
    assert [end.finish_reason for end in out.terminals("a")] == ["stop"]
    assert out.tokens("b") == expected_output([4, 5, 6], 9)
    assert_all_blocks_home(core)


def test_a_sequence_waits_for_its_grammar_and_holds_up_nobody(
    depth: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    go_on = threading.Event()
    core, out = core_with(compiler, depth)
    keep_busy(compiler, go_on)
    core.round([constrained("a", choice(*CHOICES)), add("b", [4, 5, 6], 9)])
    run_until_idle(core)
    assert out.tokens("b") == expected_output([4, 5, 6], 9) and out.tokens("a") == []
    go_on.set()
    compiled(compiler, choice(*CHOICES))
    run_until_idle(core)
    assert tokenizer.decode(out.tokens("a")) in CHOICES


def test_an_abort_while_the_grammar_is_compiled(depth: int, compiler: GrammarCompiler) -> None:
    go_on = threading.Event()
    core, out = core_with(compiler, depth)
    keep_busy(compiler, go_on)
    core.round([constrained("a", choice(*CHOICES))])
    core.round([AbortRequest("a")])
    go_on.set()
    compiled(compiler, choice(*CHOICES))
    run_until_idle(core)
    assert [end.finish_reason for end in out.terminals("a")] == ["abort"]
    assert core.is_idle and out.tokens("a") == []


def test_a_failure_while_the_grammar_is_compiled_is_the_only_one(
    depth: int, compiler: GrammarCompiler
) -> None:
    go_on = threading.Event()
    core, out = core_with(compiler, depth)
    keep_busy(compiler, go_on)
    mistaken = Grammar("regex", "[a")
    core.round([constrained("a", mistaken)])
    core.fail(core.sequences["a"], LeaseGone("the lease is gone"))
    go_on.set()
    compiled(compiler, mistaken)
    run_until_idle(core)
    assert [end.error and end.error.code for end in out.terminals("a")] == ["lease_gone"]
    assert core.is_idle


def test_preemption_does_not_lose_the_place(
    depth: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    pattern = Grammar("regex", "([a-z]{3} ){12}")
    compiled(compiler, pattern)
    tight, out = core_with(compiler, depth, num_blocks=11, prefix_caching=False)
    prompts = [(7, 8, 9), (10, 11), (12,)]
    for i, prompt in enumerate(prompts):
        tight.round([constrained(f"s{i}", pattern, 60, prompt)])
    run_until_idle(tight)
    assert tight.scheduler.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        alone, expected = core_with(compiler, depth)
        alone.round([constrained("x", pattern, 60, prompt)])
        run_until_idle(alone)
        assert out.tokens(f"s{i}") == expected.tokens("x")
        assert out.terminals(f"s{i}")[0].finish_reason == "stop"
    assert_all_blocks_home(tight)


def test_max_tokens_before_the_grammar_is_satisfied_is_length(
    depth: int, compiler: GrammarCompiler
) -> None:
    core, out = core_with(compiler, depth)
    compiled(compiler, Grammar("regex", "[a-z]{1000}"))
    core.round([constrained("a", Grammar("regex", "[a-z]{1000}"), 5)])
    run_until_idle(core)
    assert len(out.tokens("a")) == 5
    assert out.terminals("a")[0].finish_reason == "length"


def test_the_last_allowed_token_that_completes_the_grammar_is_stop(
    depth: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    (token,) = tokenizer.encode("a")
    core, out = core_with(compiler, depth)
    compiled(compiler, choice("a"))
    core.round([constrained("a", choice("a"), 1)])
    run_until_idle(core)
    assert out.tokens("a") == [token]
    assert out.terminals("a")[0].finish_reason == "stop"


def test_a_dead_end_is_one_error_and_frees_everything(
    depth: int, compiler: GrammarCompiler
) -> None:
    core, out = core_with(compiler, depth)
    grammar = Grammar("regex", "a?")
    compiled(compiler, grammar)
    stuck = constrained("a", grammar)
    sampling = SamplingParams(temperature=0.0, grammar=grammar, min_tokens=3)
    stops = list(range(2, VOCAB)) + list(range(VOCAB, 512))
    core.round(
        [
            AddRequest(
                request_id="a",
                token_ids=stuck.token_ids,
                sampling=sampling,
                max_tokens=5,
                stop_token_ids=stops,
            )
        ]
    )
    run_until_idle(core)
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "grammar_failed"
    assert out.tokens("a") == []
    assert_all_blocks_home(core)


def test_a_grammar_with_a_mistake_is_one_error(depth: int, compiler: GrammarCompiler) -> None:
    core, out = core_with(compiler, depth)
    compiled(compiler, Grammar("regex", "[a"))
    core.round([constrained("a", Grammar("regex", "[a")), add("b", [4, 5], 3)])
    run_until_idle(core)
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "grammar_failed"
    assert out.tokens("b") == expected_output([4, 5], 3)
    assert core.is_idle


def test_an_engine_without_a_compiler_refuses_grammars() -> None:
    core, _, out = make_core()
    core.round([constrained("a", choice("a"))])
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "grammar_failed"
    assert core.is_idle


def test_every_choice_has_a_place_of_its_own(
    depth: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    core, out = core_with(compiler, depth)
    compiled(compiler, choice(*CHOICES))
    one = constrained("a", choice(*CHOICES))
    core.round([replace(one, num_choices=3)])
    run_until_idle(core)
    ends = out.terminals("a")
    assert sorted(end.choice for end in ends) == [0, 1, 2]
    assert {end.finish_reason for end in ends} == {"stop"}
    for index in range(3):
        mine = [d for d in out.deltas if d.request_id == "a" and d.choice == index]
        ids = [token for delta in mine for token in delta.token_ids]
        assert tokenizer.decode(ids) in CHOICES
    assert_all_blocks_home(core)


def test_a_dead_end_of_one_choice_is_one_error_of_the_request(
    depth: int, compiler: GrammarCompiler
) -> None:
    core, out = core_with(compiler, depth)
    grammar = Grammar("regex", "a?")
    compiled(compiler, grammar)
    stuck = constrained("a", grammar)
    sampling = replace(stuck.sampling, min_tokens=3)
    stops = list(range(2, 512))
    core.round([replace(stuck, num_choices=2, sampling=sampling, stop_token_ids=stops)])
    run_until_idle(core)
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "grammar_failed"
    assert core.is_idle
    assert_all_blocks_home(core)


def test_more_grammars_may_be_waited_for_than_are_kept(
    depth: int, compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.text.grammar, "_MAX_CACHED_BYTES", 100)
    core, out = core_with(compiler, depth)
    texts = [f"text {number}" for number in range(150)]
    core.round([constrained(text, choice(text)) for text in texts])
    for compiling in list(core.grammars.compiling.values()):
        compiling.exception()
    run_until_idle(core)
    for text in texts:
        assert tokenizer.decode(out.tokens(text)) == text
    assert core.is_idle


def test_a_grammar_slows_nobody_and_itself_least(compiler: GrammarCompiler) -> None:
    """The forward pass of its next step is launched before the last token is known."""
    core, executor, out = make_core(depth=1)
    core.grammars.compiler = compiler
    pattern = Grammar("regex", "([a-z]{3} ){30}")
    compiled(compiler, pattern)
    core.round([constrained("a", pattern, 20), add("b", [4, 5, 6], 20)])
    run_until_idle(core)
    assert (len(out.tokens("a")), len(out.tokens("b"))) == (20, 20)
    assert (executor.num_steps, executor.num_steps_ahead) == (20, 19)


class Held:
    """Masks after so many outputs of one grammar's sequences wait for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_outputs: int) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        compute = GrammarState._compute

        def held(state: GrammarState, row: Int32s) -> None:
            if state._num_consumed == num_outputs:
                self.begun.set()
                assert self.go_on.wait(60.0)
            compute(state, row)

        monkeypatch.setattr(GrammarState, "_compute", held)
        monkeypatch.setattr(engine.text.grammar, "_MAX_WAIT_S", 0.001)


def run_until_ended(core: EngineCore, out: MemoryTransport, request_id: str) -> None:
    while not out.terminals(request_id):
        core.round([])
        core.check_integrity()


@pytest.mark.parametrize("slow", [False, True])
def test_who_is_late_sits_out_and_draws_the_same(
    depth: int, slow: bool, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = Grammar("regex", "([a-z]{3} ){30}")
    compiled(compiler, pattern)
    asked = replace(constrained("a", pattern, 12), num_choices=2)
    alone, expected = core_with(compiler, depth)
    alone.round([asked])
    run_until_ended(alone, expected, "a")
    if slow:
        monkeypatch.setattr(engine.text.grammar, "_SLOW_S", -1.0)
    held = Held(monkeypatch, num_outputs=3)
    core, out = core_with(compiler, depth)
    core.grammars.timeout_s = 60.0
    core.round([asked])
    while not held.begun.is_set():
        core.round([])
    core.round([add("b", [4, 5, 6], 20)])
    run_until_ended(core, out, "b")
    assert out.tokens("b") == expected_output([4, 5, 6], 20) and not out.terminals("a")
    held.go_on.set()
    while len(out.terminals("a")) < 2:
        core.round([])
    for index in range(2):
        told, same = (
            [t for d in o.deltas if d.choice == index and d.request_id == "a" for t in d.token_ids]
            for o in (out, expected)
        )
        assert told == same and len(told) == 12
    run_until_idle(core)
    assert_all_blocks_home(core)


def test_who_is_late_for_too_long_fails_alone(
    depth: int, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = Grammar("regex", "([a-z]{3} ){30}")
    compiled(compiler, pattern)
    held = Held(monkeypatch, num_outputs=3)
    core, out = core_with(compiler, depth)
    core.grammars.timeout_s = 0.0
    core.round([constrained("a", pattern), add("b", [4, 5, 6], 20)])
    run_until_ended(core, out, "a")
    run_until_ended(core, out, "b")
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "grammar_failed"
    assert "--grammar-timeout-s" in end.error.message
    assert out.tokens("b") == expected_output([4, 5, 6], 20)
    held.go_on.set()
    run_until_idle(core)
    assert_all_blocks_home(core)


def test_a_grammar_that_is_always_late_ends_with_an_error(
    depth: int, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.text.grammar, "_LONG_S", -1.0)  # whatever it takes
    pattern = Grammar("regex", "([a-z]{3} ){30}")
    compiled(compiler, pattern)
    core, out = core_with(compiler, depth)
    core.round([constrained("a", pattern)])
    run_until_ended(core, out, "a")
    (end,) = out.terminals("a")
    assert end.error is not None and end.error.code == "grammar_failed"
    assert 0 < len(out.tokens("a")) <= engine.text.grammar._MAX_LONG
    run_until_idle(core)
    assert_all_blocks_home(core)
