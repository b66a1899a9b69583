"""Grammars, choices, aborts, preemptions and steps that cannot be drawn, all at once.

Each seed makes an engine of random sizes, often of one sequence or of a pool for one, and a random
workload that comes in between rounds and while steps are waited for.
"""

import json
import random
from collections.abc import Iterator

import pytest

import engine.text.grammar
from engine.core.batch import StepInput
from engine.text.grammar import COMPLETE, GrammarCompiler, StepMasks
from protocol.messages import AbortRequest, AddRequest, EngineInput, Grammar, SamplingParams
from tests.make_models import ensure_model
from tests.rigs.shadow import (
    MemoryTransport,
    UndrawnExecutor,
    _masked,
    add,
    allowed,
    assert_all_blocks_home,
    awaited_masks,
    expected_output,
    make_core,
    next_token,
)

MAX_REQUESTS = 12
UNDRAWN = "the masks do not fit"
GRAMMARS = [
    Grammar("choice", json.dumps(["Anna", "Ben lost a kite", "An"])),
    Grammar("regex", "[a-z]{1,6}( [a-z]{1,3}){0,2}"),
    Grammar("regex", "(yes|no)+"),
]


def _compiler() -> Iterator[GrammarCompiler]:
    """Has compiled GRAMMARS."""
    compiler = GrammarCompiler(ensure_model("gqa"), 512, lambda: None)
    for grammar in GRAMMARS:
        compiler.compiled(grammar).exception()
    yield compiler
    compiler.close()


compiler = pytest.fixture(_compiler, scope="module")


class _Executor(UndrawnExecutor):
    """Ends a step at any look; at times the tokens of a masked one cannot be drawn."""

    def __init__(self, rng: random.Random, num_blocks: int, block_size: int, depth: int) -> None:
        super().__init__(num_blocks, block_size, depth)
        self._rng = rng
        self._failing = rng.choice([0.0, 0.15])

    def has_ended(self) -> bool:
        return self._rng.random() < 0.6

    def fails(self, step: StepInput) -> bool:
        return self._rng.random() < self._failing / len(step.query_lens)


class _Workload:
    """What comes, a little at a time."""

    def __init__(self, rng: random.Random, max_len: int) -> None:
        self._rng, self._max_len = rng, max_len
        self.requests: dict[str, AddRequest] = {}

    def some(self) -> list[EngineInput]:
        rng, messages = self._rng, list[EngineInput]()
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            if len(self.requests) < MAX_REQUESTS:
                request = self._request(f"r{len(self.requests)}")
                self.requests[request.request_id] = request
                messages.append(request)
        if self.requests and rng.random() < 0.15:
            name = rng.choice(list(self.requests))
            messages.append(AbortRequest(name, rng.choice([None, 0, 1, 2])))
        return messages

    def _request(self, name: str) -> AddRequest:
        rng = self._rng
        prompt = [
            *rng.choice([[], [1, 2, 3, 4, 5, 6, 7, 8], [6] * 13]),
            *rng.choices(range(50), k=5),
        ]
        if rng.random() < 0.3:  # as long as can be, or one too long
            prompt = ([*prompt, *[7] * self._max_len])[: self._max_len - rng.randint(0, 2)]
        grammar = rng.choice([None, *GRAMMARS])
        penalty = rng.choice([0.0, 0.5]) if grammar is None else 0.0
        min_tokens = rng.choice([0, 0, 2])
        sampling = SamplingParams(
            temperature=0.0, grammar=grammar, min_tokens=min_tokens, frequency_penalty=penalty
        )
        return add(
            name,
            prompt,
            rng.choice([1, 1, 2, 5, 9, 30]),
            sampling,
            num_choices=rng.choice([1, 1, 2, 3]),
            stop_token_ids=rng.choices(range(50), k=rng.randint(0, 4)),
        )


def _expected(
    compiler: GrammarCompiler, request: AddRequest, choice: int, limit: int
) -> tuple[list[int], str | None]:
    """Tokens, and how they end: "error" for a text that cannot go on, None for any other way."""
    prompt, stop = request.token_ids, request.stop_token_ids
    min_tokens = request.sampling.min_tokens
    if request.sampling.grammar is None:
        return expected_output(prompt, limit, stop, choice, min_tokens), None
    state, tokens, start = compiler.state(request), list(prompt), len(prompt)
    while len(tokens) - start < limit:
        state.follow(tokens, start)
        state.fill()
        if state.ending is not None:
            return tokens[start:], "error" if state.ending.error else None
        banned = stop if len(tokens) - start < min_tokens else ()
        tokens.append(_masked(allowed(next_token(tokens, choice), banned), state.row))
        if tokens[-1] in stop or state.follow(tokens, start) is COMPLETE:
            break
    return tokens[start:], None


def _check(
    compiler: GrammarCompiler, request: AddRequest, out: MemoryTransport, max_len: int, n: int
) -> None:
    ends = out.terminals(request.request_id)
    errors = [end.error for end in ends if end.error is not None]
    num_prompt = len(request.token_ids)
    if num_prompt + 1 > max_len or request.num_choices > n:
        assert len(ends) == len(errors) == 1
        return
    choices = range(request.num_choices)
    limit = min(request.max_tokens, max_len - num_prompt)
    expected = [_expected(compiler, request, choice, limit) for choice in choices]
    if errors:
        assert len(errors) == 1 and ends[-1].error is errors[0]
        assert UNDRAWN in errors[0].message or "error" in [kind for _, kind in expected]
    else:
        assert sorted(end.choice for end in ends) == list(choices)
    cut = {end.choice for end in ends if end.finish_reason in (None, "abort")}
    for choice, (tokens, kind) in enumerate(expected):
        told = out.tokens(request.request_id, choice)
        if errors or choice in cut:
            assert told == tokens[: len(told)]
        else:
            assert told == tokens and kind is None


@pytest.fixture
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for few of their masks, or all grammars are slow, and their sequences sit out."""
    rng, wait = random.Random(request.param), StepMasks._wait
    if request.param % 4 == 1:
        monkeypatch.setattr(
            StepMasks, "_wait", lambda *args: wait(*args) if rng.random() < 0.3 else None
        )
    if request.param % 4 == 2:
        monkeypatch.setattr(engine.text.grammar, "_SLOW_S", -1.0)


@pytest.mark.parametrize(("seed", "late"), [(seed, seed) for seed in range(60)], indirect=["late"])
def test_any_mixture_is_answered_right(compiler: GrammarCompiler, seed: int, late: None) -> None:
    rng = random.Random(seed)
    block_size, max_num_seqs = rng.randint(1, 6), rng.choice([1, 1, 2, 4, 8])
    num_blocks = rng.randint(5, 40)
    max_len = min(36, (num_blocks - 1) * block_size)
    if rng.random() < 0.3:
        num_blocks = -(-max_len // block_size) + 1  # for one sequence
    depth = rng.randint(0, 1)
    core, _, out = make_core(
        executor=_Executor(rng, num_blocks, block_size, depth),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([1, 2, block_size, 2 * block_size, 16, 40]),
        max_model_len=max_len,
        prefix_caching=rng.random() < 0.7,
    )
    core.grammars.compiler = compiler
    workload = _Workload(rng, max_len)
    out.receive = lambda timeout_s: (  # type: ignore[method-assign]
        workload.some() if rng.random() < 0.15 else [],
        False,
    )
    for _ in range(25):
        core.round(workload.some())
        core.scheduler.check_integrity()
    out.receive = lambda timeout_s: ([], False)  # type: ignore[method-assign]
    for _ in range(3000):
        if not core.round([]) and not awaited_masks(core) and core.is_idle:
            break
        core.scheduler.check_integrity()
    assert core.is_idle, "it never comes to rest"
    assert_all_blocks_home(core)
    for request in workload.requests.values():
        _check(compiler, request, out, max_len, max_num_seqs)
