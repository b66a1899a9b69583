"""How the core waits for grammars, and how their sequences end. What they draw beside others, with
choices, preemptions and late masks: tests/engine/kv/test_role_mixture.py."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import engine.text.grammar
from engine.core import core_grammar
from engine.core.core import EngineCore
from engine.text.grammar import _NUM_COMPILING, GrammarCompiler, GrammarState
from engine.text.tokenizer import Tokenizer
from protocol.errors import LeaseGone
from protocol.messages import AbortRequest, AddRequest, Grammar, SamplingParams
from tests.engine.conftest import compiling
from tests.make_models import ensure_model
from tests.rigs.shadow import (
    MemoryTransport,
    add,
    assert_all_blocks_free,
    expected_output,
    make_core,
    run_until_idle,
)

TEXTS = ["Anna found a red ball", "Ben lost a blue kite", "Anna found a key"]
CHOICES = Grammar("choice", json.dumps(TEXTS))
WORDS = Grammar("regex", "([a-z]{3} ){30}")
MISTAKEN = Grammar("regex", "[a")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ensure_model("gqa"))


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    """Has compiled nothing."""
    with compiling() as made:
        yield made


def core_with(
    compiler: GrammarCompiler, depth: int, *compiled: Grammar
) -> tuple[EngineCore, MemoryTransport]:
    for grammar in compiled:
        compiler.compiled(grammar).exception()
    core, _, out = make_core(depth=depth)
    core.grammars.compiler = compiler
    return core, out


def constrained(
    request_id: str, grammar: Grammar, max_tokens: int = 40, **members: Any
) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, grammar=grammar)
    return add(
        request_id, [1, 2, 3], max_tokens, sampling, stop_token_ids=[2], **members
    )


FREE = add("b", [4, 5, 6], 9)


def answered(core: EngineCore, *requests: AddRequest) -> None:
    run_until_idle(core, *requests)
    assert core.is_idle
    assert_all_blocks_free(core)


def assert_failed(
    out: MemoryTransport, request_id: str = "a", code: str = "grammar_failed"
) -> str:
    (end,) = out.terminals(request_id)
    assert end.error is not None and end.error.code == code
    return end.error.message


def test_sequences_wait_for_their_grammars_and_hold_up_nobody(
    depth, compiler, tokenizer
):
    go_on = threading.Event()
    core, out = core_with(compiler, depth)
    for _ in range(_NUM_COMPILING):
        compiler._compiling.submit(go_on.wait)
    waiting = [constrained(name, CHOICES) for name in ("a", "aborted")]
    run_until_idle(core, *waiting, constrained("failed", MISTAKEN), FREE)
    assert out.tokens("b") == expected_output([4, 5, 6], 9) and out.tokens("a") == []
    assert out.compiled == []
    core.round([AbortRequest("aborted")])
    core.fail(core.sequences["failed"], LeaseGone("the lease is gone"))
    go_on.set()
    for grammar in (CHOICES, MISTAKEN):
        compiler.compiled(grammar).exception()
    answered(core)
    assert out.compiled == ["a"], "it is reported whose grammar is there"
    assert tokenizer.decode(out.tokens("a")) in TEXTS
    assert [end.finish_reason for end in out.terminals("aborted")] == ["abort"]
    assert_failed(out, "failed", "lease_gone")
    assert not out.tokens("aborted")


def test_the_end_is_length_before_a_grammar_is_satisfied_and_stop_at_it(
    depth, compiler, tokenizer
):
    long, one = Grammar("regex", "[a-z]{1000}"), Grammar("choice", '["a"]')
    core, out = core_with(compiler, depth, long, one)
    answered(core, constrained("a", long, 5), constrained("b", one, 1))
    assert len(out.tokens("a")) == 5 and out.tokens("b") == tokenizer.encode("a")
    assert [out.terminals(name)[0].finish_reason for name in "ab"] == ["length", "stop"]


def test_a_grammar_with_a_mistake_is_one_error(depth, compiler):
    core, out = core_with(compiler, depth, MISTAKEN)
    answered(core, constrained("a", MISTAKEN), FREE)
    assert_failed(out)
    assert out.tokens("b") == expected_output([4, 5, 6], 9)


def test_more_grammars_may_be_waited_for_than_are_kept(
    depth, compiler, tokenizer, monkeypatch
):
    monkeypatch.setattr(engine.text.grammar, "_MAX_CACHED_BYTES", 100)
    core, out = core_with(compiler, depth)
    texts = [f"text {number}" for number in range(40)]
    core.round(
        [constrained(text, Grammar("choice", json.dumps([text]))) for text in texts]
    )
    for work in list(core.grammars.compiling.values()):
        work.exception()
    answered(core)
    for text in texts:
        assert tokenizer.decode(out.tokens(text)) == text


def test_a_grammar_slows_nobody_and_itself_least(compiler):
    """The forward pass of its next step is launched before the last token is known."""
    core, out = core_with(compiler, 1, WORDS)
    answered(core, constrained("a", WORDS, 20), add("b", [4, 5, 6], 20))
    assert (len(out.tokens("a")), len(out.tokens("b"))) == (20, 20)
    executor: Any = core.executor
    assert (executor.num_steps, executor.num_steps_ahead) == (20, 19)


@pytest.mark.parametrize("slow", [False, True])
def test_who_is_late_for_too_long_fails_alone(depth, slow, compiler, monkeypatch):
    """A step waits a moment for a mask, and not at all where the grammar is known to be slow."""
    go_on = threading.Event()
    compute = GrammarState._compute_mask

    def held(state: GrammarState) -> None:
        assert state._num_consumed < 3 or go_on.wait(60.0)
        compute(state)

    monkeypatch.setattr(GrammarState, "_compute_mask", held)
    monkeypatch.setattr(core_grammar, "_MAX_MASK_WAIT_S", 60.0 if slow else 0.001)
    if slow:
        monkeypatch.setattr(engine.text.grammar, "_SLOW_S", -1.0)
    core, out = core_with(compiler, depth, WORDS)
    core.grammars.timeout_s = 0.0
    core.round([constrained("a", WORDS), replace(FREE, max_tokens=20)])
    while not (out.terminals("a") and out.terminals("b")):
        core.round([])
        core.scheduler.check_integrity()
    assert "--grammar-timeout-s" in assert_failed(out)
    assert out.tokens("b") == expected_output([4, 5, 6], 20)
    go_on.set()
    answered(core)
