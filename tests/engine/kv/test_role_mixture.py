"""A decode engine, whole but for its model and its pulls, under everything at once: references that
fail in every way and at every moment, blocks that hanging READs write to, aborts of requests and of
single choices, grammars that compile late, steps and draws that fail, a pool that is too small.

Whatever comes, each request is told what its own prompt leads to and ends once, no block is read
or published that does not hold just its tokens, the books of the blocks add up after each round,
and in the end all is home. Everything is decided by a seed: there are no threads.
"""

import json
import random
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

import engine.text.grammar
from engine.core import core_grammar
from engine.core.batch import Int32s, StepFailed, StepInput
from engine.core.core import EngineCore
from engine.core.sequence import Phase
from engine.core.tables import SchedulerLimits
from engine.kv.borrower import Borrower
from engine.kv.rates import Rates
from engine.text.grammar import COMPLETE, CompiledGrammar, GrammarCompiler
from kvcache.blocks import BlockState
from protocol.kv_params import parse, to_remote_prefill
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineInput,
    FirstToken,
    Grammar,
    ReleaseRemote,
    RemotePrefill,
    ResumedChoice,
    SamplingParams,
    TokenDelta,
)
from tests.engine.conftest import compiling
from tests.rigs.choices import assert_choices_are_consistent
from tests.rigs.fake_coordinator import FakeCoordinator
from tests.rigs.offers import offer
from tests.rigs.shadow import (
    ShadowExecutor,
    _masked,
    _ShadowStep,
    add,
    allowed,
    assert_all_blocks_free,
    awaited_masks,
    expected_output,
    expected_scores,
    make_core,
    next_token,
)

FAULT = "a fault that was made"
GRAMMARS = [
    Grammar("choice", json.dumps(["Anna", "Ben lost a kite", "An"])),
    Grammar("regex", "[a-z]{1,6}( [a-z]{1,3}){0,2}"),
    Grammar("regex", "(yes|no)+"),
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with compiling(*GRAMMARS) as made:
        yield made


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
        state._advance([], fill=True)
        if state.ending is not None:
            return tokens[start:], "error" if state.ending.error else None
        banned = stop if len(tokens) - start < min_tokens else ()
        tokens.append(_masked(allowed(next_token(tokens, choice), banned), state.row))
        if tokens[-1] in stop or state.follow(tokens, start) is COMPLETE:
            break
    return tokens[start:], None


class _Executor(ShadowExecutor):
    """Steps end at any look; at times one cannot be launched, or its tokens not be drawn."""

    limits: SchedulerLimits

    def __init__(
        self, rng: random.Random, num_blocks: int, block_size: int, depth: int
    ) -> None:
        super().__init__(num_blocks, block_size, depth)
        self._rng = rng
        self._launch_fails = rng.choice([0.0, 0.0, 0.05, 0.2])
        self._draw_fails = rng.choice([0.0, 0.0, 0.15])

    def has_ended(self) -> bool:
        return self._rng.random() < 0.6

    def launch(self, step: StepInput) -> _ShadowStep:
        if self._rng.random() < self._launch_fails / len(step.query_lens):
            raise StepFailed(FAULT)
        assert len(step.query_lens) <= self.limits.max_num_seqs
        assert len(step.token_ids) <= self.limits.max_num_batched_tokens
        launched = super().launch(step)
        if step.is_masked and self._rng.random() < self._draw_fails / len(
            step.query_lens
        ):
            launched.draw = self._fail  # type: ignore[method-assign]
        return launched

    def _fail(self, masks: Int32s) -> None:
        step = self.in_flight.pop()
        assert not self.in_flight, "the one before has ended"
        self.execute(step.step, None)
        raise StepFailed(FAULT)


class _LateGrammars:
    """A compiler that takes its time."""

    def __init__(self, rng: random.Random, compiler: GrammarCompiler) -> None:
        self._rng, self._compiler = rng, compiler
        self._open: list[tuple[Future[CompiledGrammar], Grammar]] = []
        self.state, self.on_compiled = compiler.state, compiler.on_compiled
        self.vocab_size = compiler.vocab_size

    def compiled(self, grammar: Grammar, nbytes: int = 0) -> Future[CompiledGrammar]:
        if self._rng.random() < 0.5:
            return self._compiler.compiled(grammar, nbytes)
        self._open.append((Future(), grammar))
        return self._open[-1][0]

    def advance(self, *, to_end: bool = False) -> None:
        for late in list(self._open):
            if to_end or self._rng.random() < 0.3:
                self._open.remove(late)
                late[0].set_result(self._compiler.compiled(late[1]).result())


class _Mixture:
    def __init__(self, seed: int, compiler: GrammarCompiler) -> None:
        rng = self.rng = random.Random(seed)
        size, num_blocks = rng.randint(1, 6), rng.randint(5, 40)
        self.max_len = min(36, (num_blocks - 1) * size)
        if rng.random() < 0.3:
            num_blocks = -(-self.max_len // size) + 1  # for one sequence
        self.max_num_seqs = rng.choice([1, 2, 3, 4, 8])
        self.policy = rng.choice(["recompute", "recompute", "fail"])
        self.quarantine_timeout_s = rng.choice([0.0, 0.0, 1e9])
        self.executor = _Executor(rng, num_blocks, size, rng.randint(0, 1))
        self.content: dict[str, list[int]] = {}  # of leases
        self.coordinator = FakeCoordinator(
            rng, size, self.content, self._write, self._state_of
        )
        fake: Any = self.coordinator
        rates = Rates("never", 1, 1.0)
        self.role = Borrower(fake, self.policy, self.quarantine_timeout_s, rates, "d")
        self.core, _, self.out = make_core(
            executor=self.executor, role=self.role, num_blocks=num_blocks, block_size=size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=rng.choice([1, 2, size, 2 * size, 16, 40]),
            max_model_len=self.max_len, prefix_caching=rng.random() < 0.8,
        )  # fmt: skip
        self.executor.limits = self.core.scheduler.limits
        self.grammars: Any = _LateGrammars(rng, compiler)
        self.core.grammars.compiler = self.grammars
        self.compiler = compiler
        self.requests: dict[str, AddRequest] = {}
        self.remotes: list[RemotePrefill] = []
        self.aborted: dict[str, set[int]] = {}  # choices of requests
        self.max_requests = rng.choice([4, 12, 30])
        self.stems = [rng.choices(range(50), k=30) for _ in range(2)]
        self.is_over = False
        self._watch_blocks()
        self._let_draws_fail(rng.choice([0.0, 0.0, 0.02]))
        self.out.receive = lambda timeout_s: (  # type: ignore[method-assign]
            self.some() if rng.random() < 0.15 else [],
            False,
        )

    def _write(self, block: int, place: int, token: int) -> None:
        self.executor.pool[block, place] = token

    def _state_of(self, block: int) -> Any:
        return self.core.scheduler.allocator.state(block)

    def _watch_blocks(self) -> None:
        """New blocks hold nothing; published ones hold what they are published as."""
        scheduler, pool = self.core.scheduler, self.executor.pool
        allocate = scheduler.allocator.allocate

        def emptied(num_blocks: int) -> list[int]:
            taken = allocate(num_blocks)
            pool[taken] = -1
            return taken

        scheduler.allocator.allocate = emptied  # type: ignore[method-assign]
        if scheduler.prefix is None:
            return
        publish = scheduler.prefix.publish

        def checked(token_ids: Any, block_ids: Any, *args: Any, **options: Any) -> None:
            held = pool[list(block_ids)].reshape(-1).tolist()
            assert held == token_ids[: len(held)], "published what is not there"
            publish(token_ids, block_ids, *args, **options)

        scheduler.prefix.publish = checked  # type: ignore[method-assign]

    def _let_draws_fail(self, often: float) -> None:
        draw = self.core._draw

        def failing(*args: Any) -> Any:
            if self.rng.random() < often:
                raise RuntimeError(FAULT)
            return draw(*args)

        self.core._draw = failing  # type: ignore[method-assign]

    # -- what comes

    def some(self) -> list[EngineInput]:
        """What comes, a little at a time; time goes on for pulls and grammars."""
        self.coordinator.advance(to_end=self.is_over)
        self.grammars.advance(to_end=self.is_over)
        rng, messages = self.rng, list[EngineInput]()
        if self.is_over:
            return messages
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            if len(self.requests) < self.max_requests:
                request = self._request(f"r{len(self.requests)}")
                self.requests[request.request_id] = request
                messages.append(request)
        if self.requests and rng.random() < 0.2:
            name = rng.choice(list(self.requests)[rng.choice([-3, -6, 0]) :])
            choice = rng.choice([None, 0, 1, 2])
            messages.append(AbortRequest(name, choice))
            gone = self.aborted.setdefault(name, set())
            gone.update(range(3) if choice is None else [choice])
        if self.remotes and rng.random() < 0.05:
            messages.append(ReleaseRemote(rng.choice(self.remotes)))
        return messages

    def _request(self, name: str) -> AddRequest:
        rng = self.rng
        stem = rng.choice([[], *self.stems])[: rng.randint(0, 30)]
        prompt = ([*stem, *rng.choices(range(50), k=rng.randint(0, 5))] or [1])[
            : self.max_len - 1
        ]
        if rng.random() < 0.1:  # as long as can be
            prompt = ([*prompt, *[7] * self.max_len])[
                : self.max_len - rng.randint(1, 2)
            ]
        grammar = rng.choice([None, None, *GRAMMARS])
        num_scores = rng.choice([None, None, None, 0, 2])
        can_be_0 = grammar is None and num_scores is not None
        max_tokens, least = (
            rng.choice([1, 1, 2, 5, 9, 30, 0 if can_be_0 else 3]),
            [0, 0, 2],
        )
        penalty = (
            {"frequency_penalty": rng.choice([0.0, 0.5])} if grammar is None else {}
        )
        request = add(
            name, prompt, max_tokens,
            SamplingParams(
                temperature=0.0, grammar=grammar, min_tokens=rng.choice(least), **penalty
            ),
            num_choices=min(rng.choice([1, 1, 2, 3]), self.max_num_seqs),
            stop_token_ids=rng.choices(range(50), k=rng.randint(0, 4)),
            num_prompt_logprobs=num_scores,
        )  # fmt: skip
        if rng.random() < 0.3 and request.max_tokens and num_scores is None:
            request = self._resumed(request)
        return self._with_remote(request) if rng.random() < 0.7 else request

    def _resumed(self, request: AddRequest) -> AddRequest:
        """As it goes on from another server, which ended none, or some, of its choices."""
        known = []
        for choice in range(request.num_choices):
            tokens, kind = self._expected(request, choice)
            num_known = self.rng.choice(
                [0, len(tokens), self.rng.randint(0, len(tokens))]
            )
            has_ended = (
                num_known == len(tokens) and kind is None and self.rng.random() < 0.9
            )
            known.append(ResumedChoice(tokens[:num_known], has_ended))
        if all(one.has_ended for one in known):
            known[-1] = replace(
                known[-1], token_ids=known[-1].token_ids[:-1], has_ended=False
            )
        return replace(request, resumed_choices=known)

    def _expected(
        self, request: AddRequest, choice: int
    ) -> tuple[list[int], str | None]:
        limit = min(request.max_tokens, self.max_len - len(request.token_ids))
        return _expected(self.compiler, request, choice, limit)

    def _with_remote(self, request: AddRequest) -> AddRequest:
        """With what a prefill server would answer, or nearly that."""
        rng, prompt = self.rng, request.token_ids
        choices = range(request.num_choices)
        firsts = [_expected(self.compiler, request, choice, 1)[0] for choice in choices]
        if not all(firsts):
            return request
        scores, redrawn = None, not request.max_tokens or rng.random() < 0.2
        if request.num_prompt_logprobs is not None:
            scores = expected_scores(prompt, request.num_prompt_logprobs)
        offered = offer(
            b"secret", prompt, remote_engine_id=rng.choice(["one", "other"]),
            lease_id=f"{len(self.content):032x}", remote_cached_tokens=rng.randrange(len(prompt)),
            first_tokens=[FirstToken(token) for (token,) in firsts], prompt_logprobs=scores,
        )  # fmt: skip
        remote = to_remote_prefill(parse(offered), sender_releases=rng.random() < 0.5)
        if redrawn:
            remote = replace(remote, first_tokens=[])
        self.content[remote.lease_id] = list(prompt)
        self.remotes.append(remote)
        if rng.random() < 0.05:
            unused = rng.choice([None, remote])
            return replace(request, kv_rejected="it is another's", kv_unused=unused)
        return replace(request, remote=remote)

    # -- what must be

    def run(self) -> EngineCore:
        for _ in range(self.rng.choice([25, 60])):
            self.core.round(self.some())
            self.check_books()
        self.is_over = True
        for _ in range(6000):
            self.some()
            has_progressed = self.core.round([]) or awaited_masks(self.core)
            self.check_books()
            if not has_progressed and self.core.is_idle and self.coordinator.is_idle:
                break
        assert self.core.is_idle and self.coordinator.is_idle, "it never comes to rest"
        scheduler = self.core.scheduler
        assert not (scheduler.waiting or scheduler.running or scheduler.receiving)
        assert not self.core.grammars.compiling
        assert not (self.role._remote or self.role._undrained)
        for request in self.requests.values():
            self._check(request)
        return self.core

    def check_books(self) -> None:
        """Every use of a block is somebody's."""
        self.core.scheduler.check_integrity()
        assert_choices_are_consistent(self.core)
        scheduler, wanted = self.core.scheduler, set[int]()
        for sequence in scheduler.running:
            assert sequence.phase is Phase.RUNNING
            wanted.update(sequence.block_ids)
        for sequence in scheduler.receiving.values():
            assert sequence.phase is Phase.RECEIVING
            num_hits = sequence.num_computed // scheduler.limits.block_size
            wanted.update(sequence.block_ids[:num_hits])
        for sequence in scheduler.waiting:
            assert sequence.phase is Phase.WAITING and not sequence.block_ids
        for _, block_ids in scheduler.steps.deferred_releases:
            wanted.update(block_ids)
        allocator = scheduler.allocator
        blocks = range(1, allocator.num_blocks)
        assert {b for b in blocks if allocator.state(b) is BlockState.USED} == wanted

    def _check(self, request: AddRequest) -> None:
        name = request.request_id
        ends = self.out.terminals(name)
        errors = [end for end in ends if end.error is not None]
        choices = range(request.num_choices)
        known = request.resumed_choices or [ResumedChoice() for _ in choices]
        expected = [self._expected(request, choice) for choice in choices]
        if errors:
            assert errors == ends[-1:]
            assert self._may_fail(request, ends[-1]) or "error" in [
                kind for _, kind in expected
            ]
        else:
            assert sorted(end.choice for end in ends) == [
                choice for choice in choices if not known[choice].has_ended
            ]
        cut = {end.choice for end in ends if end.finish_reason in (None, "abort")}
        assert errors or cut <= self.aborted.get(name, set())
        for choice, (tokens, kind) in enumerate(expected):
            told = known[choice].token_ids + self.out.tokens(name, choice)
            if errors or choice in cut:
                assert told == tokens[: len(told)]
            else:
                assert told == tokens and kind is None
        self._check_scores(request, whole=not errors and 0 not in cut)
        for end in ends:
            self._check_usage(request, end)

    def _may_fail(self, request: AddRequest, end: TokenDelta) -> bool:
        assert end.error is not None
        is_locked_out = (
            end.error.code == "overloaded" and self.quarantine_timeout_s == 0
        )
        has_lost_kv = self.policy == "fail" and request.remote is not None
        return FAULT in end.error.message or is_locked_out or has_lost_kv

    def _check_scores(self, request: AddRequest, *, whole: bool) -> None:
        if request.num_prompt_logprobs is None:
            return
        expected = expected_scores(request.token_ids, request.num_prompt_logprobs)
        told = self.out.prompt_logprobs(request.request_id)
        assert told == expected[: len(told)] and (not whole or told == expected)

    @staticmethod
    def _check_usage(request: AddRequest, end: TokenDelta) -> None:
        """Each prompt token came from somewhere, unless no token was drawn here."""
        if end.usage is None or end.choice or end.finish_reason == "abort":
            return
        usage, num_prompt = end.usage, len(request.token_ids)
        told = usage.transferred + usage.recomputed + usage.skipped
        elsewhere = request.remote is not None or bool(request.resumed_choices)
        assert told == num_prompt or (told == 0 and elsewhere)


def _run(seed: int, compiler: GrammarCompiler) -> EngineCore:
    """At times steps wait for few of their masks, or all grammars are slow."""
    rng, wait_for = random.Random(seed), core_grammar.wait_for
    with pytest.MonkeyPatch.context() as patch:
        if seed % 4 == 1:
            patch.setattr(
                core_grammar,
                "wait_for",
                lambda *args: wait_for(*args) if rng.random() < 0.3 else None,
            )
        if seed % 4 == 2:
            patch.setattr(engine.text.grammar, "_SLOW_S", -1.0)
        if seed % 5 == 3:  # nothing is planned behind a step
            patch.setattr("engine.core.step_runner._PROPORTIONAL_TOKENS", 0)
            patch.setattr("engine.core.step_runner._LONG_STEP_S", 0.0)
        return _Mixture(seed, compiler).run()


MANY = [
    pytest.param(range(at, at + 200), marks=pytest.mark.slow)
    for at in range(100, 2100, 200)
]


@pytest.mark.parametrize("seeds", [*([seed] for seed in range(80)), *MANY])
def test_whatever_becomes_of_pulls_answers_are_right_and_blocks_come_home(
    compiler, seeds
):
    for seed in seeds:
        assert_all_blocks_free(_run(seed, compiler))
