"""A fault of one request ends only that request, with one typed error."""

from dataclasses import replace as replace_in
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.batch import StepFailed, StepInput
from engine.core.connector import KVConnector
from engine.core.logits_processing import RowAllocator
from engine.core.sequence import Sequence
from engine.worker.warm_up import WarmUpSizes
from kvcache.blocks import BlockStateError
from protocol.messages import Grammar, SamplingParams
from tests.rigs.rank_threads import ranks
from tests.rigs.shadow import (
    MemoryTransport,
    ShadowExecutor,
    _ShadowStep,
    add,
    assert_all_blocks_free,
    expected_output,
    make_core,
    run_until_idle,
)

BAD_SEED = 666


class FailingExecutor(ShadowExecutor):
    """Fails to launch steps that draw a token for the bad request, if the request has
    `length` or more context tokens."""

    def __init__(self, depth: int, length: int) -> None:
        super().__init__(32, 4, depth)
        self.length = length

    def launch(self, step: StepInput) -> _ShadowStep:
        lens = step.context_lens[step.sampled_sequences].tolist()
        draws = zip(step.sampling, lens, strict=True)
        if any(params.seed == BAD_SEED and n >= self.length for params, n in draws):
            raise StepFailed("this request is more than it can take")
        return super().launch(step)


def assert_internal_error(out: MemoryTransport, request_id: str) -> None:
    (end,) = out.terminals(request_id)
    assert end.error is not None and end.error.code == "internal_error"
    assert "The engine failed on this request" in end.error.message


@pytest.mark.parametrize("length", [0, 9])
def test_failed_launch_of_a_step_fails_only_the_bad_request(depth, length):
    core, _, out = make_core(executor=FailingExecutor(depth, length))
    # With these penalties, the output changes if a token is not counted exactly once.
    penalties = SamplingParams(presence_penalty=0.5, repetition_penalty=1.2)
    bad = add("x", [4, 5, 6, 7, 8], 12, SamplingParams(seed=BAD_SEED), num_choices=2)
    core.round([add("a", [1, 2, 3], 12, penalties)])
    run_until_idle(core, bad, add("b", [9, 9], 9))
    assert_internal_error(out, "x")
    assert out.tokens("a") == expected_output([1, 2, 3], 12)
    assert out.tokens("b") == expected_output([9, 9], 9)
    assert_all_blocks_free(core)


def test_lack_of_memory_for_masks_fails_only_the_draw(monkeypatch):
    sizes = WarmUpSizes(
        num_blocks=8, block_size=4, max_len=20, max_tokens=20, max_seqs=1
    )
    step = replace_in(sizes.step([5]), is_masked=True)
    masks = np.full((1, 16), -1, np.int32)

    def raise_out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 2 MiB")

    with ranks(1) as executor:
        executor.allocate(8, 4)
        expected = executor.launch(step)
        expected.draw(masks)
        with monkeypatch.context() as patch:
            patch.setattr("engine.worker.runner.sample", raise_out_of_memory)
            with pytest.raises(StepFailed, match="OutOfMemoryError: Tried to allocate"):
                executor.launch(step).draw(masks)
        again = executor.launch(step)
        again.draw(masks)
        assert again.result().token_ids == expected.result().token_ids


class _FailingConnector(KVConnector):
    """A connector that fails when request x ends."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_finish(self, sequence: Sequence) -> None:
        if sequence.request_id == "x":
            raise self.error


@pytest.mark.parametrize("is_planned", [True, False])
def test_error_in_a_plan_or_at_a_requests_end_fails_only_that_request(
    depth, is_planned, monkeypatch
):
    plan = RowAllocator.plan

    def plan_or_fail(self: RowAllocator, drawing: list[Sequence], *others: Any) -> Any:
        if any(sequence.request_id == "x" for sequence in drawing):
            raise IndexError("the request's state is invalid")
        return plan(self, drawing, *others)

    if not is_planned:
        monkeypatch.setattr(RowAllocator, "plan", plan_or_fail)
    core, _, out = make_core(
        depth=depth, role=_FailingConnector(ValueError("no such reference"))
    )
    run_until_idle(core, add("a", [1, 2, 3], 8), add("x", [4] * 6, 3), add("b", [5], 8))
    assert_internal_error(out, "x")
    assert out.tokens("a") == expected_output([1, 2, 3], 8)
    assert out.tokens("b") == expected_output([5], 8)
    assert_all_blocks_free(core)


@pytest.mark.parametrize("error", [BlockStateError("used"), AssertionError("wrong")])
def test_accounting_error_ends_the_engine(error):
    core, _, _ = make_core(role=_FailingConnector(error))
    core.round([add("x", [4] * 6, 3)])
    with pytest.raises(type(error)):
        run_until_idle(core)


class _BrokenMatcher:
    """Fails at the third token."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_consumed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def consume_tokens(self, token_ids: list[int]) -> Any:
        self._num_consumed += len(token_ids)
        if self._num_consumed >= 3:
            raise RuntimeError("out of fuel")
        return self._matcher.consume_tokens(token_ids)


def test_matcher_that_raises_ends_only_its_request(depth, compiler):
    core, _, out = make_core(depth=depth)
    core.grammars.compiler = compiler
    grammar = Grammar("regex", "([a-z]{3} ){12}")
    compiler.compile(grammar).exception()
    request = add("x", [1, 2], 20, SamplingParams(temperature=0.0, grammar=grammar))
    core.round([request, add("b", [5], 12)])
    state = core.sequences["x"].sampling.grammar
    assert state is not None
    state._matcher = _BrokenMatcher(state._matcher)  # type: ignore[assignment]
    run_until_idle(core)
    (end,) = out.terminals("x")
    assert end.error is not None and end.error.code == "grammar_failed"
    assert "internal error of the server; see its log" in end.error.message
    assert out.tokens("b") == expected_output([5], 12)
    assert_all_blocks_free(core)
