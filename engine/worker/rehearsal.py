"""Every kind of step that requests can ask for, to be run once before a server is ready.

What a step runs depends on how many tokens and sequences it has, on whether their context is
stored, and on what is asked of its draws. Each kernel's owner chooses between variants by these
alone, so the steps here go through all of them, at sizes on both sides of every choice: powers of
two, which also have the libraries load what they take for small, middling and large products, and
NCCL set up what it takes for short and long messages.
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
from engine.core.logits_processing import SamplingRow, StepShapes
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
from engine.worker.kernel_watch import KERNELS
from engine.worker.memory import fitting, free_gpu_bytes, longest, lower_for_steps
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
_LONG: Final = 2048  # tokens of a prompt
_SCORED: Final = 129  # tokens: of several chunks, see sampler.py
# Graphs keep their logits, in the model's dtype and in float32, and the activations of one step.
_GRAPH_BYTES_PER_LOGIT: Final = 6
_GRAPHS_BASE_BYTES: Final = 512 * 2**20
_DRAWS: Final = (1, 2, 24, 64)  # of one step; more take memory, but nothing else


@dataclass(frozen=True)
class Stage:
    """What there is room for."""

    num_blocks: int  # of the pool, the null block included
    block_size: int  # tokens
    max_len: int  # tokens of a sequence
    max_tokens: int  # of a step
    max_seqs: int  # of a step
    num_groups: int = 1  # of KV

    def step(
        self, lens: Sequence[int], stored: Sequence[int] | int = 0, *, token: int = 0
    ) -> StepInput:
        """Of sequences that compute `lens` tokens each after `stored` ones, as many as fit, each of
        which draws the likeliest token."""
        lens, stored = (
            list(lens),
            [stored] * len(lens) if isinstance(stored, int) else list(stored),
        )
        room = self.max_tokens
        for index, wanted in enumerate(lens):
            lens[index] = min(wanted, room, self.max_len)
            stored[index] = min(stored[index], self.max_len - lens[index])
            room -= lens[index]
        lens = [n for n in lens if n > 0][: self.max_seqs]
        context = np.array(lens, np.int32) + np.array(stored[: len(lens)], np.int32)
        width = -(-int(context.max()) // self.block_size) * self.num_groups
        # Nobody owns a block yet. Sequences that wrap around read what others wrote.
        tables = (
            np.arange(len(lens) * width, dtype=np.int32) % max(1, self.num_blocks - 1)
            + 1
        )
        return StepInput(
            token_ids=np.full(sum(lens), token, np.int64),
            query_lens=np.array(lens, np.int32),
            context_lens=context.astype(np.int32),
            block_tables=tables.reshape(len(lens), width),
            sample_rows=np.arange(len(lens), dtype=np.int32),
            sampling=[GREEDY] * len(lens),
        )


def kv_budget_bytes(runner: ModelRunner) -> int:
    """GPU memory that a rank's KV may take: what is free under the configured utilization
    once the largest step has run and been measured."""
    config = runner.config
    what = (
        f"a step of {config.max_num_batched_tokens} tokens beside the model's weights"
    )
    fix = f"lower {lower_for_steps(config)}, or use a larger --tp"
    with fitting(what, runner.device, fix):
        _run_largest_step(runner)
    peak = torch.cuda.max_memory_allocated(runner.device)
    torch.cuda.empty_cache()
    graphs = (
        config.max_num_seqs * runner.model_config.vocab_size * _GRAPH_BYTES_PER_LOGIT
    )
    return free_gpu_bytes(
        runner.device,
        config.gpu_memory_utilization,
        peak_bytes=peak + (0 if config.enforce_eager else graphs + _GRAPHS_BASE_BYTES),
    )


@torch.inference_mode()
def _run_largest_step(runner: ModelRunner) -> None:
    """A prompt as long as a step may be, and as many draws, with all that shapes and tells them."""
    num_tokens = min(
        runner.config.max_num_batched_tokens, runner.model_config.max_position
    )
    num_blocks = -(-num_tokens // runner.config.tokens_per_block) * runner.groups.count
    torch.cuda.reset_peak_memory_stats(runner.device)
    memory = runner.make_memory(num_blocks + 1)
    sizes = num_blocks + 1, runner.config.tokens_per_block, num_tokens, num_tokens, 1
    stage = Stage(*sizes, runner.groups.count)
    hidden = runner.forward(memory, stage.step([num_tokens]))
    rows = min(runner.config.max_num_seqs, num_tokens)
    params = [
        msgspec.structs.replace(_SAMPLINGS[-1], num_logprobs=_LOGPROBS[-1])
    ] * rows
    batch = SamplingBatch.from_params(params, [0] * rows, runner.device)
    shaping = runner.shaper.prepare(_shapes(rows, _PENALTIES))
    shaping = runner.shaper.masked(shaping, _no_masks(runner, rows))
    sample(runner.model.logits(hidden[:rows]), batch, shaping)
    torch.cuda.synchronize(runner.device)


def rehearse(runner: ModelRunner) -> None:
    """Runs every kind of step once, so that no request waits for what is compiled or loaded.
    Every rank does, in the same order; no block has an owner yet."""
    started_s, num_kernels = time.monotonic(), KERNELS.num_before
    stage = Stage(
        num_blocks=runner.memory.pool.layout.num_blocks,
        block_size=runner.config.tokens_per_block,
        max_len=longest(runner.config, runner.model_config),
        max_tokens=runner.config.max_num_batched_tokens,
        max_seqs=runner.config.max_num_seqs,
        num_groups=runner.groups.count,
    )
    for step in steps(stage):
        try:
            pending = runner.launch(step)
            if step.is_masked and runner.model.parallel.rank == 0:
                pending.draw(_no_masks(runner, len(step.sampling)))
            pending.result()
        except (
            StepFailed
        ) as error:  # of one rank, which has gone on; so would a request's
            logger.warning("a step of %d tokens fails: %s", len(step.token_ids), error)
    logger.info(
        "ran every kind of step in %.1f s; they loaded %d kernels",
        time.monotonic() - started_s,
        KERNELS.num_before - num_kernels,
    )


def _no_masks(runner: ModelRunner, rows: int) -> Int32s:
    """Masks of so many draws that allow every token."""
    return np.full((rows, -(-runner.model_config.vocab_size // 32)), -1, np.int32)


def steps(stage: Stage) -> Iterator[StepInput]:
    """All of them, to be run in this order: some take tokens that the one before has drawn."""
    most = min(stage.max_tokens, stage.max_len)
    for size in sorted({min(1 << n, most) for n in range(most.bit_length() + 1)}):
        yield stage.step([size])  # a prompt that is new, or goes on
        yield stage.step([size], stored=stage.block_size + 1)
    yield _undrawn(stage.step([most]))
    yield from _mixtures(stage)
    for count in sorted({min(n, stage.max_seqs) for n in _DRAWS}):
        yield from _draws(stage.step([1] * count, stored=7))
    yield from _scores(stage.step([_SCORED]))


def _undrawn(step: StepInput) -> StepInput:
    return replace(step, sample_rows=np.zeros(0, np.int32), sampling=[])


def _mixtures(stage: Stage) -> Iterator[StepInput]:
    """Sequences that decode, prompts that go on, and new ones, short and long, in one step."""
    for decodes in (0, 3):
        yield stage.step([1] * decodes + [_LONG] * max(1, stage.max_tokens // _LONG))
    for decodes in (0, 1, 3):
        for prompts in ([40], [600], [1100], [3, 40], [40, 600], [3, 1100]):
            for stored in (0, stage.block_size + 1):
                lens = [1] * decodes + prompts
                yield stage.step(lens, [7] * decodes + [stored] * len(prompts))
    yield stage.step([1], stored=7)
    yield stage.step(
        [1, 5], [8, 0], token=-1
    )  # what the step before has drawn, outside a graph
    yield stage.step([1, 1], stored=9, token=-1)


def _draws(step: StepInput) -> Iterator[StepInput]:
    """The same tokens, drawn in every way."""
    count = len(step.sampling)
    for sampling in _SAMPLINGS:
        for wanted in _LOGPROBS:
            params = msgspec.structs.replace(sampling, num_logprobs=wanted)
            yield replace(step, sampling=[params] * count)
        shaped = replace(
            step, sampling=[sampling] * count, shapes=_shapes(count, _PENALTIES)
        )
        yield shaped
        yield replace(shaped, shapes=_shapes(count, None))
        yield replace(shaped, is_masked=True)
        yield replace(shaped, is_masked=True, shapes=None)
    # Two choices of one sequence, and, where there are others, sequences that do not draw yet.
    yield replace(step, sample_rows=np.zeros(2, np.int32), sampling=[_SAMPLINGS[1]] * 2)


def _shapes(count: int, penalties: tuple[float, float, float] | None) -> StepShapes:
    """Of a bias for each row, stop tokens banned in every other one, and perhaps penalties."""
    prompt, outputs = ([0, 0], [0]) if penalties else ([], [])
    setups = [
        SamplingRow(r, prompt, outputs, penalties, {0: 1.0}, [0]) for r in range(count)
    ]
    return StepShapes(
        list(range(count)), [row % 2 == 0 for row in range(count)], setups
    )


def _scores(step: StepInput) -> Iterator[StepInput]:
    """Of a prompt's own tokens, with and without a draw at its end."""
    num_tokens = len(step.token_ids)
    for num_top in (0, 1, 20):
        for first in {0, num_tokens - 1}:
            targets = [0] * (num_tokens - first)
            scored = replace(step, scores=[ScoredRows(first, targets, num_top)])
            yield scored
            yield _undrawn(scored)
