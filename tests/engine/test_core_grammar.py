"""The engine core waits for grammars and masks without delaying other requests.

tests/engine/kv/test_role_mixture.py checks the drawn tokens, with choices, preemptions
and late masks.
"""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import engine.text.grammar
from engine.core import core_grammar
from engine.core.core import EngineCore
from engine.text.grammar import _NUM_COMPILING_THREADS, GrammarCompiler, GrammarState
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
INVALID = Grammar("regex", "[a")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ensure_model("gqa"))


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    """A compiler that has compiled nothing."""
    with compiling() as empty_compiler:
        yield empty_compiler


def make_core_with(
    compiler: GrammarCompiler, depth: int, *grammars: Grammar
) -> tuple[EngineCore, MemoryTransport]:
    """Makes a core after the compiler has compiled `grammars`."""
    for grammar in grammars:
        compiler.compile(grammar).exception()
    core, _, out = make_core(depth=depth)
    core.grammars.compiler = compiler
    return core, out


def constrained_request(
    request_id: str, grammar: Grammar, max_tokens: int = 40, **fields: Any
) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, grammar=grammar)
    return add(
        request_id, [1, 2, 3], max_tokens, sampling, stop_token_ids=[2], **fields
    )


WITHOUT_GRAMMAR = add("b", [4, 5, 6], 9)


def run_all(core: EngineCore, *requests: AddRequest) -> None:
    """Runs requests until they end, and checks that all blocks are then free."""
    run_until_idle(core, *requests)
    assert core.is_idle
    assert_all_blocks_free(core)


def assert_failed(
    out: MemoryTransport, request_id: str = "a", code: str = "grammar_failed"
) -> str:
    """Checks that a request ended with one error. Returns the message."""
    (end,) = out.terminals(request_id)
    assert end.error is not None and end.error.code == code
    return end.error.message


def test_sequences_that_wait_for_grammars_delay_no_other_request(
    depth, compiler, tokenizer
):
    unblock = threading.Event()
    core, out = make_core_with(compiler, depth)
    for _ in range(_NUM_COMPILING_THREADS):
        compiler._compiling.submit(unblock.wait)
    waiting = [constrained_request(name, CHOICES) for name in ("a", "aborted")]
    invalid = constrained_request("failed", INVALID)
    run_until_idle(core, *waiting, invalid, WITHOUT_GRAMMAR)
    assert out.tokens("b") == expected_output([4, 5, 6], 9) and out.tokens("a") == []
    assert out.compiled == []
    core.round([AbortRequest("aborted")])
    core.fail(core.sequences["failed"], LeaseGone("the lease is gone"))
    unblock.set()
    for grammar in (CHOICES, INVALID):
        compiler.compile(grammar).exception()
    run_all(core)
    assert out.compiled == ["a"], "the HTTP process learns that the grammar is compiled"
    assert tokenizer.decode(out.tokens("a")) in TEXTS
    assert [end.finish_reason for end in out.terminals("aborted")] == ["abort"]
    assert_failed(out, "failed", "lease_gone")
    assert not out.tokens("aborted")


def test_finish_reason_is_stop_only_if_the_grammar_is_complete(
    depth, compiler, tokenizer
):
    long = Grammar("regex", "[a-z]{1000}")
    short = Grammar("choice", '["a"]')
    core, out = make_core_with(compiler, depth, long, short)
    run_all(core, constrained_request("a", long, 5), constrained_request("b", short, 1))
    assert len(out.tokens("a")) == 5 and out.tokens("b") == tokenizer.encode("a")
    assert [out.terminals(name)[0].finish_reason for name in "ab"] == ["length", "stop"]


def test_invalid_grammar_ends_its_request_with_one_error(depth, compiler):
    core, out = make_core_with(compiler, depth, INVALID)
    run_all(core, constrained_request("a", INVALID), WITHOUT_GRAMMAR)
    assert_failed(out)
    assert out.tokens("b") == expected_output([4, 5, 6], 9)


def test_requests_may_wait_for_more_grammars_than_the_cache_holds(
    depth, compiler, tokenizer, monkeypatch
):
    monkeypatch.setattr(engine.text.grammar, "_MAX_CACHED_BYTES", 100)
    core, out = make_core_with(compiler, depth)
    texts = [f"text {number}" for number in range(40)]
    core.round(
        [
            constrained_request(text, Grammar("choice", json.dumps([text])))
            for text in texts
        ]
    )
    for work in list(core.grammars.compiling.values()):
        work.exception()
    run_all(core)
    for text in texts:
        assert tokenizer.decode(out.tokens(text)) == text


def test_grammar_does_not_keep_steps_from_being_launched_ahead(compiler):
    """A step's forward pass is launched before the previous step's token is known."""
    core, out = make_core_with(compiler, 1, WORDS)
    run_all(core, constrained_request("a", WORDS, 20), add("b", [4, 5, 6], 20))
    assert (len(out.tokens("a")), len(out.tokens("b"))) == (20, 20)
    executor: Any = core.executor
    assert (executor.num_steps, executor.num_steps_ahead) == (20, 19)


def delay_masks(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Makes masks after the third token wait for the returned event."""
    unblock = threading.Event()
    compute = GrammarState._compute_mask

    def compute_late(state: GrammarState) -> None:
        assert state._num_consumed < 3 or unblock.wait(60.0)
        compute(state)

    monkeypatch.setattr(GrammarState, "_compute_mask", compute_late)
    return unblock


def test_request_gets_one_error_if_the_masks_of_two_choices_are_late(
    compiler, monkeypatch
):
    unblock = delay_masks(monkeypatch)
    monkeypatch.setattr(core_grammar, "_MAX_MASK_WAIT_S", 0.001)
    core, out = make_core_with(compiler, 0, WORDS)
    core.grammars.timeout_s = 0.0
    core.round([constrained_request("a", WORDS, num_choices=2)])
    while not out.terminals("a"):
        core.round([])
    assert "--grammar-timeout-s" in assert_failed(out)
    unblock.set()
    run_all(core)


@pytest.mark.parametrize("is_slow", [False, True])
def test_request_that_waits_too_long_for_a_mask_fails_without_the_others(
    depth, is_slow, compiler, monkeypatch
):
    """A step waits for a mask for a limited time, and not at all if the grammar is
    slow."""
    unblock = delay_masks(monkeypatch)
    monkeypatch.setattr(core_grammar, "_MAX_MASK_WAIT_S", 60.0 if is_slow else 0.001)
    if is_slow:
        monkeypatch.setattr(engine.text.grammar, "_SLOW_MASK_S", -1.0)
    core, out = make_core_with(compiler, depth, WORDS)
    core.grammars.timeout_s = 0.0
    core.round(
        [constrained_request("a", WORDS), replace(WITHOUT_GRAMMAR, max_tokens=20)]
    )
    while not (out.terminals("a") and out.terminals("b")):
        core.round([])
        core.scheduler.check_integrity()
    assert "--grammar-timeout-s" in assert_failed(out)
    assert out.tokens("b") == expected_output([4, 5, 6], 20)
    unblock.set()
    run_all(core)
