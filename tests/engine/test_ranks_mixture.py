"""Two ranks, each with half the heads or (dcp) half the tokens, under random schedules, against one
rank that has a request alone. All but the first get each step as bytes.

Chunks, preemptions, prefix hits, choices and aborts come as they will. Between two steps all memory
that holds nothing anybody may read is NaN on every rank, so whoever reads it says so. Whatever one
rank would miss (a block, a prompt to score, a penalty's counts) either changes what rank 0
answers, because both share every sum, or leaves a collective without its partner.
"""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.core.core import EngineCore
from engine.worker.runner import ModelRunner
from kvcache.blocks import BlockState
from protocol.messages import AbortRequest, AddRequest, SamplingParams, TokenLogprobs
from tests.rigs.rank_threads import Ranks, ranks
from tests.rigs.shadow import (
    MemoryTransport,
    add,
    assert_all_blocks_free,
    make_core,
    run_until_idle,
)

VOCAB, LONGEST = 512, 64
TOLERANCE = 1e-3  # sums in another order


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with ranks(1) as one:
        one.allocate(20, 8)
        yield one


@pytest.fixture(
    scope="module", params=[(1, 0), (2, 0), (2, 1)], ids=["heads", "tokens", "ahead"]
)
def shared(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """`ahead`: each step is launched before the last one's tokens are read, as on a GPU."""
    dcp, depth = request.param
    with (
        pytest.MonkeyPatch.context() as patch,
        ranks(2, dcp=dcp, max_model_len=LONGEST) as two,
    ):
        patch.setattr(ModelRunner, "depth", depth)
        two.depth = depth
        yield two


def _requests(rng: random.Random) -> list[AddRequest]:
    stems = [
        [rng.randrange(VOCAB) for _ in range(rng.randint(3, 30))] for _ in range(2)
    ]
    found = []
    for number in range(7):
        prompt = [*rng.choice([[], *stems]), *(rng.randrange(VOCAB) for _ in range(5))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=number, num_logprobs=3,
            frequency_penalty=rng.choice([0.0, 0.5]), repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([{}, {7: 3.0}]),
            **rng.choice([{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}]),
        )  # fmt: skip
        found.append(
            add(f"r{number}", prompt, rng.choice([1, 5, 25]), sampling,
            num_choices=rng.choice([1, 1, 2]), num_prompt_logprobs=rng.choice([None, None, 1]))
        )  # fmt: skip
    return found


def _spoil(core: EngineCore, executor: Ranks) -> None:
    allocator = core.scheduler.allocator
    unused = [
        b
        for b in range(1, allocator.num_blocks)
        if allocator.state(b) is BlockState.FREE
    ]
    for runner in executor.runners:
        runner.memory.pool.canonical[torch.tensor([0, *unused])] = float("nan")
        if runner.config.dcp > 1:
            runner.memory.backend.pool.tensor.fill_(
                float("nan")
            )  # the scratch of prompts


def _assert_kept(core: EngineCore, executor: Ranks) -> None:
    """What a step has computed when it ends on rank 0 is on every rank, or NaN: it may be lent."""
    for sequence in core.scheduler.running:
        at, table = (
            torch.arange(sequence.num_computed),
            torch.IntTensor(sequence.block_ids),
        )
        for rank, runner in enumerate(executor.runners):
            size, dcp = runner.config.block_size, runner.config.dcp
            own = at[at // size % dcp == rank % dcp]
            found = runner.memory.pool.canonical[
                table[own // (size * dcp)], :, :, :, own % size
            ]
            assert not found.isnan().any()


def _play(
    rng: random.Random, executor: Ranks, requests: list[AddRequest]
) -> MemoryTransport:
    """The answers of a small engine; some requests are aborted."""
    block_size, num_blocks = rng.choice([1, 2, 3, 4]), rng.randint(6, 14)
    tokens_per_block = block_size * executor.runners[0].config.dcp
    num_blocks = max(num_blocks, -(-LONGEST // tokens_per_block) + 1)
    executor.allocate(num_blocks, block_size)
    core, _, out = make_core(
        executor=executor,  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=tokens_per_block,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([1, 5, 16, 60]),
        max_model_len=LONGEST,
        prefix_caching=rng.random() < 0.8,
    )
    todo = list(requests)
    while todo or not core.is_idle:
        messages: list = [todo.pop(0)] if todo and rng.random() < 0.5 else []
        if rng.random() < 0.03:
            messages.append(AbortRequest(rng.choice(requests).request_id, None))
        if not core._steps.in_flight:
            _spoil(core, executor)
        core.round(messages)
        core.scheduler.check_integrity()
        _assert_kept(core, executor)
    run_until_idle(core)
    assert_all_blocks_free(core)
    drawn = [[rank.token_ids for rank in step] for step in executor.outputs()]
    assert all(first == second for first, second in drawn), "both draw the same"
    return out


def _assert_close(
    found: Sequence[TokenLogprobs | None], expected: Sequence[TokenLogprobs | None]
) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


def _logprobs(out: MemoryTransport, name: str, choice: int) -> list[TokenLogprobs]:
    mine = [d for d in out.deltas if (d.request_id, d.choice) == (name, choice)]
    return [row for delta in mine for row in delta.logprobs or []]


@pytest.mark.parametrize("seed", range(4))
def test_two_ranks_answer_like_one(alone, shared, seed):
    rng = random.Random(seed)
    requests = _requests(rng)
    out = _play(rng, shared, requests)
    for request in requests:
        name = request.request_id
        core, _, expected = make_core(
            executor=alone,  # type: ignore[arg-type]
            num_blocks=20,
            block_size=8,
            max_num_batched_tokens=100,
            max_model_len=LONGEST,
            prefix_caching=False,
        )
        run_until_idle(core, request)
        ends = out.terminals(name)
        assert all(end.error is None for end in ends)
        is_cut = len(ends) == 0 or any(end.finish_reason == "abort" for end in ends)
        for choice in range(request.num_choices):
            told, wanted = out.tokens(name, choice), expected.tokens(name, choice)
            assert told == (wanted[: len(told)] if is_cut else wanted)
            found = _logprobs(out, name, choice)
            _assert_close(found, _logprobs(expected, name, choice)[: len(found)])
        if request.num_prompt_logprobs is not None and not is_cut:
            _assert_close(out.prompt_logprobs(name), expected.prompt_logprobs(name))
