"""Two ranks run random requests concurrently, and draw the same tokens as a single rank
that runs each request alone.

Each of the two ranks has half of the heads or, with dcp, half of the tokens. Rank 1
receives each step as bytes. Chunks, preemptions, prefix hits, choices, aborts and, with
every second seed, proposals occur at random. Between two steps, all memory that no step
may read is NaN on every rank, so a wrong read changes the tokens.

If one rank lacks data (a block, a prompt to score, the counts of a penalty), the tokens
of rank 0 change, because both ranks contribute to every sum, or a collective hangs.
"""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.core.core import EngineCore
from engine.core.sequence import Sequence as EngineSequence
from engine.worker.runner import ModelRunner
from kvcache.blocks import BlockState
from protocol.messages import AbortRequest, AddRequest, SamplingParams, TokenLogprobs
from tests.rigs.drafters import RandomDrafter, VerifyEverything
from tests.rigs.rank_threads import Ranks, ranks
from tests.rigs.shadow import (
    MemoryTransport,
    add,
    assert_all_blocks_free,
    make_core,
    run_until_idle,
)

VOCAB = 512
MAX_MODEL_LEN = 64
TOLERANCE = 1e-3  # because two ranks do not add in the order of a single rank


@pytest.fixture(scope="module")
def single_rank() -> Iterator[Ranks]:
    with ranks(1) as executor:
        executor.allocate(20, 8)
        yield executor


@pytest.fixture(
    scope="module", params=[(1, 0), (2, 0), (2, 1)], ids=["heads", "tokens", "ahead"]
)
def two_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """With "ahead", each step is launched before the tokens of the previous step are
    read, as on a GPU."""
    dcp, depth = request.param
    with (
        pytest.MonkeyPatch.context() as patch,
        ranks(2, dcp=dcp, max_model_len=MAX_MODEL_LEN) as executor,
    ):
        patch.setattr(ModelRunner, "depth", depth)
        executor.depth = depth
        yield executor


def _make_requests(rng: random.Random) -> list[AddRequest]:
    prefixes = [
        [rng.randrange(VOCAB) for _ in range(rng.randint(3, 30))] for _ in range(2)
    ]
    requests = []
    for number in range(7):
        prompt = [
            *rng.choice([[], *prefixes]),
            *(rng.randrange(VOCAB) for _ in range(5)),
        ]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            num_logprobs=3,
            frequency_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([{}, {7: 3.0}]),
            **rng.choice([{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}]),
        )
        requests.append(
            add(
                f"r{number}",
                prompt,
                rng.choice([1, 5, 25]),
                sampling,
                num_choices=rng.choice([1, 1, 2]),
                num_prompt_logprobs=rng.choice([None, None, 1]),
            )
        )
    return requests


def _overwrite_free_blocks(core: EngineCore, executor: Ranks) -> None:
    """Writes NaN to all memory that no step may read."""
    allocator = core.scheduler.allocator
    free_blocks = [
        block
        for block in range(1, allocator.num_blocks)
        if allocator.state(block) is BlockState.FREE
    ]
    for runner in executor.runners:
        runner.memory.pool.canonical[torch.tensor([0, *free_blocks])] = float("nan")
        if runner.config.dcp > 1:
            # The scratch buffer for the contexts of prompts.
            runner.memory.backend.pool.tensor.fill_(float("nan"))


def _assert_kv_is_written(core: EngineCore, executor: Ranks) -> None:
    """Asserts that the KV of finished steps is written on every rank.

    Rank 0 may lease this KV as soon as the step has ended on rank 0.
    """
    for sequence in core.scheduler.running:
        positions = torch.arange(sequence.num_computed)
        table = torch.IntTensor(sequence.block_ids)
        for rank, runner in enumerate(executor.runners):
            size = runner.config.block_size
            dcp = runner.config.dcp
            stored = positions[positions // size % dcp == rank % dcp]
            kv = runner.memory.pool.canonical[
                table[stored // (size * dcp)], :, :, :, stored % size
            ]
            assert not kv.isnan().any()


def _run_requests(
    rng: random.Random,
    executor: Ranks,
    requests: list[AddRequest],
    drafters: list[RandomDrafter],
) -> MemoryTransport:
    """Runs all requests on a small engine, and aborts some. Returns the outputs."""
    block_size = rng.choice([1, 2, 3, 4])
    num_blocks = rng.randint(6, 14)
    tokens_per_block = block_size * executor.runners[0].config.dcp
    num_blocks = max(num_blocks, -(-MAX_MODEL_LEN // tokens_per_block) + 1)
    executor.allocate(num_blocks, block_size)
    core, _, out = make_core(
        executor=executor,  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=tokens_per_block,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([1, 5, 16, 60]),
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=rng.random() < 0.8,
        drafters=drafters,
        policy=VerifyEverything(),
    )
    unsent = list(requests)
    while unsent or not core.is_idle:
        messages: list = [unsent.pop(0)] if unsent and rng.random() < 0.5 else []
        if rng.random() < 0.03:
            messages.append(AbortRequest(rng.choice(requests).request_id, None))
        if not core._steps.in_flight:
            _overwrite_free_blocks(core, executor)
        core.round(messages)
        core.scheduler.check_integrity()
        _assert_kv_is_written(core, executor)
    run_until_idle(core)
    assert_all_blocks_free(core)
    drawn = [[rank.token_ids for rank in step] for step in executor.outputs()]
    assert all(first == second for first, second in drawn), "both ranks draw the same"
    return out


def _assert_close(
    logprobs: Sequence[TokenLogprobs | None], expected: Sequence[TokenLogprobs | None]
) -> None:
    for entry, expected_entry in zip(logprobs, expected, strict=True):
        assert (entry is None) == (expected_entry is None)
        if entry is not None and expected_entry is not None:
            expected_logprob = pytest.approx(expected_entry.logprob, abs=TOLERANCE)
            assert entry.logprob == expected_logprob


def _logprobs(out: MemoryTransport, name: str, choice: int) -> list[TokenLogprobs]:
    deltas = [
        delta
        for delta in out.deltas
        if delta.request_id == name and delta.choice == choice
    ]
    return [row for delta in deltas for row in delta.logprobs or []]


def _run_alone(single_rank: Ranks, request: AddRequest) -> MemoryTransport:
    core, _, out = make_core(
        executor=single_rank,  # type: ignore[arg-type]
        num_blocks=20,
        block_size=8,
        max_num_batched_tokens=100,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=False,
    )
    run_until_idle(core, request)
    return out


@pytest.mark.parametrize("seed", range(4))
def test_two_ranks_draw_the_same_tokens_as_one(single_rank, two_ranks, seed):
    rng = random.Random(seed)
    requests = _make_requests(rng)
    expected_outs = {r.request_id: _run_alone(single_rank, r) for r in requests}

    def next_token(sequence: EngineSequence, tokens: Sequence[int]) -> int:
        expected = expected_outs[sequence.request_id]
        outputs = expected.tokens(sequence.request_id, sequence.choice)
        index = len(tokens) - sequence.num_prompt_tokens
        return outputs[index] if index < len(outputs) else 0

    drafters = [RandomDrafter(0.7, random.Random(seed), next_token, VOCAB)]
    out = _run_requests(rng, two_ranks, requests, drafters if seed % 2 else [])
    for request in requests:
        name = request.request_id
        expected = expected_outs[name]
        ends = out.terminals(name)
        assert all(end.error is None for end in ends)
        is_aborted = len(ends) == 0 or any(end.finish_reason == "abort" for end in ends)
        for choice in range(request.num_choices):
            tokens = out.tokens(name, choice)
            expected_tokens = expected.tokens(name, choice)
            if is_aborted:
                expected_tokens = expected_tokens[: len(tokens)]
            assert tokens == expected_tokens
            logprobs = _logprobs(out, name, choice)
            expected_logprobs = _logprobs(expected, name, choice)
            _assert_close(logprobs, expected_logprobs[: len(logprobs)])
        if request.num_prompt_logprobs is not None and not is_aborted:
            _assert_close(out.prompt_logprobs(name), expected.prompt_logprobs(name))
