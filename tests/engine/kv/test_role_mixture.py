"""A decode engine with a fake model and fake pulls, under random workloads and faults.

Pulls fail in every way and at every moment, READs hang, requests and single choices are
aborted, grammars compile late, steps and draws fail, and the pool is small.

Each request gets the tokens that follow from its own prompt, and ends once. Each block
that is read or published contains exactly the tokens that it should contain. The
accounting of blocks is right after each round, and all blocks are free at the end. A
seed determines everything, because there are no threads.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import engine.text.grammar
from engine.core import core_grammar
from engine.core.core import EngineCore
from engine.core.sequence import Phase, Sequence
from engine.kv.borrower import Borrower
from engine.kv.rates import Rates
from engine.text.grammar import COMPLETE, GrammarCompiler
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
from tests.rigs.drafters import RandomDrafter, VerifyEverything
from tests.rigs.failing import FAULT, FailingExecutor, SlowCompiler
from tests.rigs.fake_coordinator import FakeCoordinator
from tests.rigs.offers import offer
from tests.rigs.shadow import (
    _masked,
    add,
    allowed,
    assert_all_blocks_free,
    expected_output,
    expected_scores,
    make_core,
    next_token,
    wait_for_masks,
)

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
    """Returns the expected tokens, and "error" if the grammar allows no next token."""
    prompt = request.token_ids
    stop = request.stop_token_ids
    min_tokens = request.sampling.min_tokens
    if request.sampling.grammar is None:
        return expected_output(prompt, limit, stop, choice, min_tokens), None
    state = compiler.new_state(request)
    tokens = list(prompt)
    start = len(prompt)
    while len(tokens) - start < limit:
        state.consume(tokens, start)
        state._advance([], fill=True)
        if state.ending is not None:
            return tokens[start:], "error" if state.ending.error else None
        banned = stop if len(tokens) - start < min_tokens else ()
        tokens.append(_masked(allowed(next_token(tokens, choice), banned), state.row))
        if tokens[-1] in stop or state.consume(tokens, start) is COMPLETE:
            break
    return tokens[start:], None


class _Mixture:
    """One random workload, and the engine that runs it."""

    def __init__(self, seed: int, compiler: GrammarCompiler) -> None:
        rng = self.rng = random.Random(seed)
        size = rng.randint(1, 6)
        num_blocks = rng.randint(5, 40)
        self.max_len = min(36, (num_blocks - 1) * size)
        if rng.random() < 0.3:
            num_blocks = -(-self.max_len // size) + 1  # the pool holds one sequence
        self.max_num_seqs = rng.choice([1, 2, 3, 4, 8])
        self.policy = rng.choice(["recompute", "recompute", "fail"])
        self.quarantine_timeout_s = rng.choice([0.0, 0.0, 1e9])
        self.executor = FailingExecutor(rng, num_blocks, size, rng.randint(0, 1))
        self.content: dict[str, list[int]] = {}  # the tokens of each lease
        self.coordinator = FakeCoordinator(
            rng, size, self.content, self._write, self._state_of
        )
        fake: Any = self.coordinator
        rates = Rates("never", 1, 1.0)
        self.role = Borrower(fake, self.policy, self.quarantine_timeout_s, rates, "d")
        self.core, _, self.out = make_core(
            executor=self.executor,
            role=self.role,
            num_blocks=num_blocks,
            block_size=size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=rng.choice([1, 2, size, 2 * size, 16, 40]),
            max_model_len=self.max_len,
            prefix_caching=rng.random() < 0.8,
            drafters=self._random_drafters(),
            policy=VerifyEverything(),
        )
        self.executor.limits = self.core.scheduler.limits
        self.grammars: Any = SlowCompiler(rng, compiler)
        self.core.grammars.compiler = self.grammars
        self.compiler = compiler
        self.requests: dict[str, AddRequest] = {}
        self.remotes: list[RemotePrefill] = []
        self.aborted: dict[str, set[int]] = {}  # aborted choices, by request
        self.max_requests = rng.choice([4, 12, 30])
        self.prefixes = [rng.choices(range(50), k=30) for _ in range(2)]
        self.is_draining = False
        self._watch_blocks()
        self._let_draws_fail(rng.choice([0.0, 0.0, 0.02]))
        self.out.receive = lambda timeout_s: (  # type: ignore[method-assign]
            self.next_messages() if rng.random() < 0.15 else [],
            False,
        )

    def _random_drafters(self) -> list[RandomDrafter]:
        share_right = self.rng.choice([None, 0.0, 0.5, 0.9, 1.0])
        if share_right is None:
            return []
        return [RandomDrafter(share_right, self.rng, self._next_token)]

    def _next_token(self, choice: Sequence, tokens: list[int]) -> int:
        """Returns the token that a choice draws after `tokens`. The result has no
        meaning if `tokens` contain wrong proposals."""
        request = self.requests[choice.request_id]
        outputs = self._expected(request, choice.choice)[0]
        num_outputs = len(tokens) - choice.num_prompt_tokens
        return outputs[num_outputs] if num_outputs < len(outputs) else 0

    def _write(self, block: int, slot: int, token: int) -> None:
        self.executor.pool[block, slot] = token

    def _state_of(self, block: int) -> Any:
        return self.core.scheduler.allocator.state(block)

    def _watch_blocks(self) -> None:
        """Makes the allocator empty each block that it allocates. Makes the prefix
        cache check that published blocks contain their tokens.
        """
        scheduler = self.core.scheduler
        pool = self.executor.pool
        allocate = scheduler.allocator.allocate

        def allocate_empty(num_blocks: int) -> list[int]:
            blocks = allocate(num_blocks)
            pool[blocks] = -1
            return blocks

        scheduler.allocator.allocate = allocate_empty  # type: ignore[method-assign]
        if scheduler.prefix is None:
            return
        publish = scheduler.prefix.publish

        def check_and_publish(
            token_ids: Any, block_ids: Any, *args: Any, **options: Any
        ) -> None:
            content = pool[list(block_ids)].reshape(-1).tolist()
            assert content == token_ids[: len(content)], "published other tokens"
            publish(token_ids, block_ids, *args, **options)

        scheduler.prefix.publish = check_and_publish  # type: ignore[method-assign]

    def _let_draws_fail(self, probability: float) -> None:
        draw = self.core._append_draw

        def draw_or_fail(*args: Any) -> Any:
            if self.rng.random() < probability:
                raise RuntimeError(FAULT)
            return draw(*args)

        self.core._append_draw = draw_or_fail  # type: ignore[method-assign]

    # -- the workload

    def next_messages(self) -> list[EngineInput]:
        """Advances pulls and grammars, and returns the next random messages."""
        self.coordinator.advance(to_end=self.is_draining)
        self.grammars.advance(to_end=self.is_draining)
        rng = self.rng
        messages: list[EngineInput] = []
        if self.is_draining:
            return messages
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            if len(self.requests) < self.max_requests:
                request = self._random_request(f"r{len(self.requests)}")
                self.requests[request.request_id] = request
                messages.append(request)
        if self.requests and rng.random() < 0.2:
            name = rng.choice(list(self.requests)[rng.choice([-3, -6, 0]) :])
            choice = rng.choice([None, 0, 1, 2])
            messages.append(AbortRequest(name, choice))
            aborted = self.aborted.setdefault(name, set())
            aborted.update(range(3) if choice is None else [choice])
        if self.remotes and rng.random() < 0.05:
            messages.append(ReleaseRemote(rng.choice(self.remotes)))
        return messages

    def _random_request(self, name: str) -> AddRequest:
        rng = self.rng
        prefix = rng.choice([[], *self.prefixes])[: rng.randint(0, 30)]
        prompt = ([*prefix, *rng.choices(range(50), k=rng.randint(0, 5))] or [1])[
            : self.max_len - 1
        ]
        if rng.random() < 0.1:  # the longest prompts that are allowed
            prompt = ([*prompt, *[7] * self.max_len])[
                : self.max_len - rng.randint(1, 2)
            ]
        grammar = rng.choice([None, None, *GRAMMARS])
        num_scores = rng.choice([None, None, None, 0, 2])
        can_draw_nothing = grammar is None and num_scores is not None
        max_tokens = rng.choice([1, 1, 2, 5, 9, 30, 0 if can_draw_nothing else 3])
        penalty: dict[str, float] = {}
        if grammar is None:
            penalty["frequency_penalty"] = rng.choice([0.0, 0.5])
        request = add(
            name,
            prompt,
            max_tokens,
            SamplingParams(
                temperature=0.0,
                grammar=grammar,
                min_tokens=rng.choice([0, 0, 2]),
                **penalty,
            ),
            num_choices=min(rng.choice([1, 1, 2, 3]), self.max_num_seqs),
            stop_token_ids=rng.choices(range(50), k=rng.randint(0, 4)),
            num_prompt_logprobs=num_scores,
        )
        if rng.random() < 0.3 and request.max_tokens and num_scores is None:
            request = self._as_resumed(request)
        return self._with_remote(request) if rng.random() < 0.7 else request

    def _as_resumed(self, request: AddRequest) -> AddRequest:
        """Returns the request as resumed after a failover. Some choices have ended."""
        resumed = []
        for choice in range(request.num_choices):
            tokens, error = self._expected(request, choice)
            num_sent = self.rng.choice(
                [0, len(tokens), self.rng.randint(0, len(tokens))]
            )
            has_ended = (
                num_sent == len(tokens) and error is None and self.rng.random() < 0.9
            )
            resumed.append(ResumedChoice(tokens[:num_sent], has_ended))
        if all(choice.has_ended for choice in resumed):
            last = resumed[-1]
            resumed[-1] = replace(last, token_ids=last.token_ids[:-1], has_ended=False)
        return replace(request, resumed_choices=resumed)

    def _expected(
        self, request: AddRequest, choice: int
    ) -> tuple[list[int], str | None]:
        limit = min(request.max_tokens, self.max_len - len(request.token_ids))
        return _expected(self.compiler, request, choice, limit)

    def _with_remote(self, request: AddRequest) -> AddRequest:
        """Returns the request with a reference to KV on a prefill server. Some
        references are marked as rejected, as the HTTP process of D would do."""
        rng = self.rng
        prompt = request.token_ids
        choices = range(request.num_choices)
        firsts = [_expected(self.compiler, request, choice, 1)[0] for choice in choices]
        if not all(firsts):
            return request
        scores = None
        has_no_first_tokens = not request.max_tokens or rng.random() < 0.2
        if request.num_prompt_logprobs is not None:
            scores = expected_scores(prompt, request.num_prompt_logprobs)
        offered = offer(
            b"secret",
            prompt,
            remote_engine_id=rng.choice(["one", "other"]),
            lease_id=f"{len(self.content):032x}",
            remote_cached_tokens=rng.randrange(len(prompt)),
            first_tokens=[FirstToken(token) for (token,) in firsts],
            prompt_logprobs=scores,
        )
        remote = to_remote_prefill(parse(offered), sender_releases=rng.random() < 0.5)
        if has_no_first_tokens:
            remote = replace(remote, first_tokens=[])
        self.content[remote.lease_id] = list(prompt)
        self.remotes.append(remote)
        if rng.random() < 0.05:
            unused = rng.choice([None, remote])
            return replace(request, kv_rejected="of another prompt", kv_unused=unused)
        return replace(request, remote=remote)

    # -- the checks

    def run(self) -> EngineCore:
        for _ in range(self.rng.choice([25, 60])):
            self.core.round(self.next_messages())
            self.check_accounting()
        self.is_draining = True
        for _ in range(6000):
            self.next_messages()
            has_progressed = self.core.round([]) or wait_for_masks(self.core)
            self.check_accounting()
            if not has_progressed and self.core.is_idle and self.coordinator.is_idle:
                break
        assert self.core.is_idle and self.coordinator.is_idle, "some request never ends"
        scheduler = self.core.scheduler
        assert not (scheduler.waiting or scheduler.running or scheduler.receiving)
        assert not self.core.grammars.compiling
        assert not (self.role._pulling or self.role._undrained)
        for request in self.requests.values():
            self._check_request(request)
        return self.core

    def check_accounting(self) -> None:
        """Checks that each block in state USED belongs to a sequence or is to be
        released at the end of a step."""
        self.core.scheduler.check_integrity()
        assert_choices_are_consistent(self.core)
        scheduler = self.core.scheduler
        expected: set[int] = set()
        for sequence in scheduler.running:
            assert sequence.phase is Phase.RUNNING
            expected.update(sequence.block_ids)
        for sequence in scheduler.receiving.values():
            assert sequence.phase is Phase.RECEIVING
            num_hits = sequence.num_computed // scheduler.limits.block_size
            expected.update(sequence.block_ids[:num_hits])
        for sequence in scheduler.waiting:
            assert sequence.phase is Phase.WAITING and not sequence.block_ids
        for _, block_ids in scheduler.ledger.deferred_releases:
            expected.update(block_ids)
        allocator = scheduler.allocator
        blocks = range(1, allocator.num_blocks)
        used = {b for b in blocks if allocator.state(b) is BlockState.USED}
        assert used == expected

    def _check_request(self, request: AddRequest) -> None:
        name = request.request_id
        ends = self.out.terminals(name)
        errors = [end for end in ends if end.error is not None]
        choices = range(request.num_choices)
        resumed = request.resumed_choices or [ResumedChoice() for _ in choices]
        expected = [self._expected(request, choice) for choice in choices]
        if errors:
            assert errors == ends[-1:]
            assert self._may_fail(request, ends[-1]) or "error" in [
                error for _, error in expected
            ]
        else:
            assert sorted(end.choice for end in ends) == [
                choice for choice in choices if not resumed[choice].has_ended
            ]
        aborted = {end.choice for end in ends if end.finish_reason in (None, "abort")}
        assert errors or aborted <= self.aborted.get(name, set())
        for choice, (expected_tokens, error) in enumerate(expected):
            tokens = resumed[choice].token_ids + self.out.tokens(name, choice)
            if errors or choice in aborted:
                assert tokens == expected_tokens[: len(tokens)]
            else:
                assert tokens == expected_tokens and error is None
        self._check_scores(request, is_complete=not errors and 0 not in aborted)
        for end in ends:
            self._check_usage(request, end)

    def _may_fail(self, request: AddRequest, end: TokenDelta) -> bool:
        assert end.error is not None
        is_quarantine_timeout = (
            end.error.code == "overloaded" and self.quarantine_timeout_s == 0
        )
        may_lose_kv = self.policy == "fail" and request.remote is not None
        return FAULT in end.error.message or is_quarantine_timeout or may_lose_kv

    def _check_scores(self, request: AddRequest, *, is_complete: bool) -> None:
        if request.num_prompt_logprobs is None:
            return
        expected = expected_scores(request.token_ids, request.num_prompt_logprobs)
        logprobs = self.out.prompt_logprobs(request.request_id)
        assert logprobs == expected[: len(logprobs)]
        assert not is_complete or logprobs == expected

    @staticmethod
    def _check_usage(request: AddRequest, end: TokenDelta) -> None:
        """Checks that the usage counts every prompt token. It may also count no token
        if another server has drawn tokens.
        """
        if end.usage is None or end.choice or end.finish_reason == "abort":
            return
        usage = end.usage
        num_counted = usage.transferred + usage.recomputed + usage.skipped
        has_remote_tokens = request.remote is not None or bool(request.resumed_choices)
        assert num_counted == len(request.token_ids) or (
            num_counted == 0 and has_remote_tokens
        )


def _run_mixture(seed: int, compiler: GrammarCompiler) -> EngineCore:
    """Runs the mixture of a seed. Depending on the seed, steps do not wait for most
    masks, all grammars are slow, or no step is launched ahead."""
    rng = random.Random(seed)
    wait_for = core_grammar.wait_for
    with pytest.MonkeyPatch.context() as patch:
        if seed % 4 == 1:
            patch.setattr(
                core_grammar,
                "wait_for",
                lambda *args: wait_for(*args) if rng.random() < 0.3 else None,
            )
        if seed % 4 == 2:
            patch.setattr(engine.text.grammar, "_SLOW_MASK_S", -1.0)
        if seed % 5 == 3:  # every step counts as a long step
            patch.setattr("engine.core.step_runner._PROPORTIONAL_TOKENS", 0)
            patch.setattr("engine.core.step_runner._LONG_STEP_S", 0.0)
        return _Mixture(seed, compiler).run()


SLOW_SEEDS = [
    pytest.param(range(first, first + 200), marks=pytest.mark.slow)
    for first in range(100, 2100, 200)
]


@pytest.mark.parametrize("seeds", [*([seed] for seed in range(80)), *SLOW_SEEDS])
def test_tokens_are_right_and_all_blocks_free_after_random_faults(compiler, seeds):
    for seed in seeds:
        assert_all_blocks_free(_run_mixture(seed, compiler))
