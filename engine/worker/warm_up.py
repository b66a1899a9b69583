"""The warm-up: every kind of step that requests can cause runs once before a server is
ready.

The kernels of a step depend only on the numbers of its tokens and sequences, on whether
the sequences have stored context, and on how its tokens are drawn. The warm-up steps
therefore use sizes below and above every threshold at which another kernel is chosen.
Most numbers of tokens are powers of two, which makes the libraries load their kernels
for small, medium and large matrix products. They also make NCCL set up its connections
for short and long messages.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import torch

from engine.core.batch import Int32s, ScoredRows, StepFailed, StepInput
from engine.core.logits_processing import LogitChanges, SamplingRow, UncountedTokens
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
from engine.worker.kernel_watch import KERNELS
from engine.worker.memory import (
    GpuUse,
    explaining_oom,
    kv_bytes,
    max_sequence_tokens,
    options_of_step_memory,
)
from engine.worker.runner import ModelRunner
from protocol.messages import SamplingParams

logger = logging.getLogger("baton.engine")

GREEDY: Final = SamplingParams(temperature=0.0)
_SAMPLINGS: Final = (
    GREEDY,
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
)
_LOGPROBS: Final = (None, 0, 1, 20)
_PENALTIES: Final = (0.1, 0.1, 1.1)
_LONG_PROMPT_TOKENS: Final = 2048
_SCORED_TOKENS: Final = 129  # several chunks of _SCORED_ROWS tokens (sampler.py)
# Estimated memory of CUDA graphs. Graphs retain their logits in the model's 16-bit
# dtype and in float32 (2 + 4 bytes), and the activations of one step.
_GRAPH_BYTES_PER_LOGIT: Final = 6
_GRAPHS_BASE_BYTES: Final = 512 * 2**20
# Numbers of draws in a warm-up step. More than 64 draws use the same kernels as 64.
_NUM_DRAWS: Final = (1, 2, 24, 64)


@dataclass(frozen=True)
class WarmUpSizes:
    """The limits within which warm-up steps are built.

    Attributes:
        num_blocks: blocks of the pool, including the null block.
        block_size: tokens of a block.
        max_len: largest number of tokens of a sequence.
        max_tokens: largest number of tokens of a step.
        max_seqs: largest number of sequences of a step.
        num_groups: number of KV groups.
    """

    num_blocks: int
    block_size: int
    max_len: int
    max_tokens: int
    max_seqs: int
    num_groups: int = 1

    @classmethod
    def of(cls, runner: ModelRunner) -> "WarmUpSizes":
        return cls(
            num_blocks=runner.memory.pool.layout.num_blocks,
            block_size=runner.config.tokens_per_block,
            max_len=max_sequence_tokens(runner.config, runner.model_config),
            max_tokens=runner.config.max_num_batched_tokens,
            max_seqs=runner.config.max_step_rows,
            num_groups=runner.groups.count,
        )

    def step(
        self,
        query_lens: Sequence[int],
        stored: Sequence[int] | int = 0,
        *,
        token: int = 0,
    ) -> StepInput:
        """Builds a step with as many of the requested sequences as the limits allow.
        Each sequence draws the likeliest token.

        Args:
            query_lens: the number of tokens that each sequence computes.
            stored: the number of earlier tokens of each sequence, whose KV is in the
                pool. A single number applies to all sequences.
            token: the id of all computed tokens; -1 for the token that row 0 of the
                previous step drew.
        """
        if isinstance(stored, int):
            stored = [stored] * len(query_lens)
        num_left = self.max_tokens
        lens: list[int] = []
        contexts: list[int] = []
        for requested_len, stored_len in zip(query_lens, stored, strict=True):
            query_len = min(requested_len, num_left, self.max_len)
            if query_len <= 0 or len(lens) == self.max_seqs:
                break
            num_left -= query_len
            lens.append(query_len)
            contexts.append(query_len + min(stored_len, self.max_len - query_len))
        width = -(-max(contexts) // self.block_size) * self.num_groups
        # No block is in use yet, so block numbers are arbitrary. In a small pool they
        # wrap around. Sequences then share blocks, which changes only the results, and
        # the results are not used.
        blocks = np.arange(len(lens) * width, dtype=np.int32)
        tables = blocks % max(1, self.num_blocks - 1) + 1
        return StepInput(
            token_ids=np.full(sum(lens), token, np.int64),
            query_lens=np.array(lens, np.int32),
            context_lens=np.array(contexts, np.int32),
            block_tables=tables.reshape(len(lens), width),
            sampled_sequences=np.arange(len(lens), dtype=np.int32),
            sampling=[GREEDY] * len(lens),
        )


def kv_budget_bytes(runner: ModelRunner) -> int:
    """Runs the largest step of the model, and that of the draft model if there is one,
    to measure the memory of these steps. Returns the bytes of GPU memory that remain
    for the rank's KV under --gpu-memory-utilization.

    Raises:
        MemoryTooSmall: a step does not fit into the memory.
    """
    config = runner.config
    runners = [runner]
    if runner.draft is not None:
        runners.append(runner.draft)
    subject = (
        f"a step of {config.max_num_batched_tokens} tokens, in addition to the model's "
        "weights,"
    )
    fix = f"lower {options_of_step_memory(config)}, or use a larger --tp"
    torch.cuda.reset_peak_memory_stats(runner.device)
    with explaining_oom(subject, runner.device, fix):
        workspace_bytes = [
            _run_largest_step(each, is_draft=each is not runner) for each in runners
        ]
    # The steps of the two models ran one after the other, so the peak includes only one
    # attention workspace. A serving engine has both workspaces.
    peak_bytes = torch.cuda.max_memory_allocated(runner.device)
    peak_bytes += sum(workspace_bytes[1:])
    torch.cuda.empty_cache()
    if not config.enforce_eager:
        for each in runners:
            num_logits = config.max_step_rows * each.model_config.vocab_size
            peak_bytes += num_logits * _GRAPH_BYTES_PER_LOGIT + _GRAPHS_BASE_BYTES
    return kv_bytes(
        GpuUse.of(runner.device), config.gpu_memory_utilization, peak_bytes=peak_bytes
    )


@torch.inference_mode()
def _run_largest_step(runner: ModelRunner, *, is_draft: bool) -> int:
    """Runs the step that takes the most memory: the longest prompt that a step can
    compute, and the largest number of draws, with all options that change logits or
    return logprobs. Draws of a draft model have no such options.

    Returns the bytes of the attention backend's workspace.
    """
    config = runner.config
    num_tokens = min(config.max_num_batched_tokens, runner.model_config.max_position)
    num_blocks = -(-num_tokens // config.tokens_per_block) * runner.groups.count
    memory = runner.make_memory(num_blocks + 1)
    sizes = WarmUpSizes(
        num_blocks=num_blocks + 1,
        block_size=config.tokens_per_block,
        max_len=num_tokens,
        max_tokens=num_tokens,
        max_seqs=1,
        num_groups=runner.groups.count,
    )
    hidden = runner.forward(memory, sizes.step([num_tokens]))
    if runner.store_states is not None:
        assert runner.captured_states is not None
        first_row = torch.zeros(1, dtype=torch.int64, device=runner.device)
        runner.store_states(runner.captured_states, first_row, first_row)
    rows = min(config.max_step_rows, num_tokens)
    sampling = _SAMPLINGS[-1]
    shaping = None
    if not is_draft:
        sampling = msgspec.structs.replace(sampling, num_logprobs=_LOGPROBS[-1])
        shaping = runner.shaper.prepare(_logit_changes(rows, _PENALTIES))
        shaping = runner.shaper.masked(shaping, _all_allowed(runner, rows))
    batch = SamplingBatch.from_params([sampling] * rows, [0] * rows, runner.device)
    sample(runner.model.logits(hidden[:rows]), batch, shaping)
    torch.cuda.synchronize(runner.device)
    return memory.backend.workspace_bytes


def warm_up(runner: ModelRunner) -> None:
    """Runs every kind of step of the model and of its draft model once, so that no
    request has to wait until a kernel is compiled or loaded. Every rank must call this
    at the same time, before any block is in use."""
    started_s = time.monotonic()
    num_kernels = KERNELS.num_at_start
    for step in steps(WarmUpSizes.of(runner)):
        if runner.store_states is not None:
            num_stored = min(len(step.query_lens), 2)
            rows = np.arange(num_stored, dtype=np.int32)
            step = replace(step, stored_rows=rows, stored_slots=rows)
        _try_step(runner, step)
    if runner.draft is not None:
        for step in steps(WarmUpSizes.of(runner.draft)):
            if _is_draft_step(step):
                _try_step(runner.draft, step)
    logger.info(
        "warm-up: ran every kind of step in %.1f s and loaded %d kernels",
        time.monotonic() - started_s,
        KERNELS.num_at_start - num_kernels,
    )


def _is_draft_step(step: StepInput) -> bool:
    """Whether draft models can also run this kind of step."""
    return not (
        step.scores
        or step.is_masked
        or step.logit_changes is not None
        or any(params.num_logprobs is not None for params in step.sampling)
    )


def _try_step(runner: ModelRunner, step: StepInput) -> None:
    try:
        run_step(runner, step)
    except StepFailed as error:
        # StepFailed is raised only in an engine of one rank, and the start of this
        # engine can continue. A request that needs such a step will fail as well.
        logger.warning(
            "a warm-up step of %d tokens failed: %s", len(step.token_ids), error
        )


def run_step(runner: ModelRunner, step: StepInput) -> None:
    """Runs a warm-up step, and waits for its end.

    Raises:
        StepFailed: see ModelRunner.launch.
    """
    pending = runner.launch(step)
    if step.is_masked and runner.model.parallel.rank == 0:
        pending.draw(_all_allowed(runner, len(step.sampling)))
    pending.result()


def _all_allowed(runner: ModelRunner, rows: int) -> Int32s:
    """Grammar masks for `rows` draws, which allow every token."""
    return np.full((rows, -(-runner.model_config.vocab_size // 32)), -1, np.int32)


def steps(sizes: WarmUpSizes) -> Iterator[StepInput]:
    """Yields all warm-up steps. They must run in this order, because some steps compute
    the token that the previous step drew."""
    max_tokens = min(sizes.max_tokens, sizes.max_len)
    lens = {min(1 << n, max_tokens) for n in range(max_tokens.bit_length() + 1)}
    for size in sorted(lens):
        yield sizes.step([size])  # a new prompt
        yield sizes.step([size], stored=sizes.block_size + 1)  # a prompt's next chunk
    yield _without_draws(sizes.step([max_tokens]))
    yield from _mixtures(sizes)
    for count in sorted({min(n, sizes.max_seqs) for n in _NUM_DRAWS}):
        yield from _draws(sizes.step([1] * count, stored=7))
    yield from _scores(sizes.step([_SCORED_TOKENS]))


def _without_draws(step: StepInput) -> StepInput:
    return replace(step, sampled_sequences=np.zeros(0, np.int32), sampling=[])


def _mixtures(sizes: WarmUpSizes) -> Iterator[StepInput]:
    """Yields steps that combine decoding sequences with prompts: short and long, first
    chunks and later chunks."""
    num_long = max(1, sizes.max_tokens // _LONG_PROMPT_TOKENS)
    for num_decodes in (0, 3):
        yield sizes.step([1] * num_decodes + [_LONG_PROMPT_TOKENS] * num_long)
    for num_decodes in (0, 1, 3):
        for prompts in ([40], [600], [1100], [3, 40], [40, 600], [3, 1100]):
            for stored in (0, sizes.block_size + 1):
                lens = [1] * num_decodes + prompts
                yield sizes.step(lens, [7] * num_decodes + [stored] * len(prompts))
    # The contexts of this step together exceed the longest context of one sequence. The
    # attention backend reads FP8 blocks of such a step in place instead of copying them
    # to 16 bits.
    yield sizes.step([40, 40], stored=sizes.max_len)
    yield sizes.step([1], stored=7)
    # These two steps compute a token that the previous step drew: the first outside a
    # CUDA graph, the second in a graph.
    yield sizes.step([1, 5], [8, 0], token=-1)
    yield sizes.step([1, 1], stored=9, token=-1)


def _draws(step: StepInput) -> Iterator[StepInput]:
    """Yields `step` with every combination of options that change how tokens are
    drawn."""
    count = len(step.sampling)
    for sampling in _SAMPLINGS:
        for num_logprobs in _LOGPROBS:
            params = msgspec.structs.replace(sampling, num_logprobs=num_logprobs)
            yield replace(step, sampling=[params] * count)
        shaped = replace(
            step,
            sampling=[sampling] * count,
            logit_changes=_logit_changes(count, _PENALTIES),
        )
        yield shaped
        yield replace(shaped, logit_changes=_logit_changes(count, None))
        yield replace(shaped, is_masked=True)
        yield replace(shaped, is_masked=True, logit_changes=None)
    # The first sequence draws for two choices. The other sequences, if any, draw
    # nothing.
    yield replace(
        step, sampled_sequences=np.zeros(2, np.int32), sampling=[_SAMPLINGS[1]] * 2
    )


def _logit_changes(
    count: int, penalties: tuple[float, float, float] | None
) -> LogitChanges:
    """Returns changes to the logits of `count` draws. Each draw has a bias, and the
    penalties if they are given. Every second draw bans its stop tokens. If there are
    several draws, the last one counts a proposal as drawn."""
    prompt: list[int] = []
    outputs: list[int] = []
    if penalties:
        prompt = [0, 0]
        outputs = [0]
    bans = [row % 2 == 0 for row in range(count)]
    setups = [
        SamplingRow(row, prompt, outputs, penalties, {0: 1.0}, [0])
        for row in range(count)
    ]
    uncounted = [UncountedTokens(0, [0])]
    proposed = {count - 1: [0]} if count > 1 else {}
    return LogitChanges(list(range(count)), bans, setups, uncounted, proposed)


def _scores(step: StepInput) -> Iterator[StepInput]:
    """Yields steps that compute logprobs of prompt tokens, with and without a draw at
    the end."""
    num_tokens = len(step.token_ids)
    for num_top in (0, 1, 20):
        for first in {0, num_tokens - 1}:
            targets = [0] * (num_tokens - first)
            scored = replace(step, scores=[ScoredRows(first, targets, num_top)])
            yield scored
            yield _without_draws(scored)
