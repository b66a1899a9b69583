"""Ranks of a real model with a draft model, each in a thread.

Rank 0 sends its steps over the links that engines use. The other ranks receive and run
the steps as they would in separate processes.
"""

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from engine.config import EngineConfig
from engine.core.batch import StepInput
from engine.speculation.draft_model import DraftModelSpec, read_draft_model
from engine.worker.draft_runner import DraftRunner
from engine.worker.drafting.load_draft import load_draft
from engine.worker.ranks import RankExecutor, RankLinks
from engine.worker.runner import ModelRunner
from model.config import load_config
from model.parallel import Parallel
from protocol.messages import SamplingParams
from tests.rigs.engines import make_config

WAIT_S = 60.0
GREEDY = SamplingParams(temperature=0.0)


class DraftRanks(NamedTuple):
    """The ranks of an engine, and the executor of rank 0."""

    executor: RankExecutor
    drafts: list[DraftRunner]
    runners: list[ModelRunner]


def _make_rank(
    rank: int, config: EngineConfig, draft: DraftModelSpec | None, num_blocks: int
) -> tuple[ModelRunner, DraftRunner]:
    parallel = Parallel.connect(
        rank, config.tp, rendezvous_file=config.rendezvous_file, dcp=config.dcp
    )
    runner = ModelRunner(config, load_config(config.model_dir), parallel)
    draft_runner = (
        load_draft(runner, print) if draft is None else DraftRunner(runner, draft)
    )
    assert draft_runner is not None
    runner.allocate(num_blocks)
    draft_runner.allocate(num_blocks)
    draft_runner.memory.pool.tensor.fill_(float("nan"))
    return runner, draft_runner


@contextmanager
def draft_ranks(
    target: Path,
    draft_folder: Path | None = None,
    *,
    size: int = 1,
    num_blocks: int = 30,
    max_proposals: int = 4,
    **options: Any,
) -> Iterator[DraftRanks]:
    """Start `size` ranks with pools of `num_blocks` blocks.

    Args:
        draft_folder: folder of the draft model. If it is None, the ranks use the
            drafter that the option `speculate` names.
        options: further options of EngineConfig.
    """
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(size)]
        folder = stack.enter_context(TemporaryDirectory())
        config = make_config(
            model_dir=str(target),
            role="decode",
            tp=size,
            rendezvous_file=f"{folder}/group",
            **options,
        )
        draft = None
        if draft_folder is not None:
            draft = read_draft_model(
                config, load_config(target), str(draft_folder), max_proposals
            )
        pairs = [socket.socketpair() for _ in range(2 * size)]
        links = RankLinks(0, [first for first, _ in pairs[2:]])
        futures = [
            thread.submit(_make_rank, rank, config, draft, num_blocks)
            for rank, thread in enumerate(threads)
        ]
        ranks = [future.result(WAIT_S) for future in futures]
        running = []
        for rank, thread in enumerate(threads[1:], start=1):
            ends = [pairs[2 * rank][1], pairs[2 * rank + 1][1]]
            other_links = RankLinks(rank, ends)
            running.append(thread.submit(other_links.run_steps, ranks[rank][0]))
        runners = [runner for runner, _ in ranks]
        try:
            yield DraftRanks(
                RankExecutor(runners[0], links), [draft for _, draft in ranks], runners
            )
        except Exception:
            # If another rank has failed, raise its error, because it is the cause.
            for future in running:
                if future.done():
                    future.result()
            raise
        links.close()
        for future in running:
            future.result(WAIT_S)
        for runner in runners:
            runner.model.parallel.close()
        for first, second in pairs:
            first.close()
            second.close()


class LoneModel:
    """A model without an engine or drafter. It computes each context as one prompt."""

    def __init__(self, folder: Path, **options: Any) -> None:
        config = make_config(model_dir=str(folder), role="decode", **options)
        self._runner = ModelRunner(config, load_config(folder), Parallel())
        num_groups = self._runner.groups.count
        self._num_blocks = -(-128 // config.block_size) * num_groups
        self._runner.allocate(self._num_blocks + 1)
        self._tokens: dict[tuple[object, ...], int] = {}

    def continue_by(
        self, context: Sequence[int], count: int, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        """Return the next `count` tokens after a context."""
        tokens = list(context)
        for _ in range(count):
            key = (*tokens, sampling.temperature, sampling.seed, sampling.choice_index)
            if key not in self._tokens:
                self._tokens[key] = self._draw(tokens, sampling)
            tokens.append(self._tokens[key])
        return tokens[len(context) :]

    def _draw(self, tokens: list[int], sampling: SamplingParams) -> int:
        length = np.array([len(tokens)], np.int32)
        step = StepInput(
            token_ids=np.array(tokens, np.int64),
            query_lens=length,
            context_lens=length,
            block_tables=np.arange(1, self._num_blocks + 1, dtype=np.int32)[None],
            sampled_sequences=np.zeros(1, np.int32),
            sampling=[sampling],
        )
        return self._runner.execute(step).token_ids[0]
