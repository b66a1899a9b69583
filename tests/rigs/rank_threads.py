"""Ranks of a real model, each in a thread, behind one executor; all but the first get each step as
bytes."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.core.batch import (
    Int32s,
    PendingStep,
    StepInput,
    StepOutput,
    step_from_bytes,
    step_to_bytes,
)
from engine.worker.runner import ModelRunner
from model.config import load_config
from model.parallel import Parallel
from tests.make_models import ensure_model
from tests.rigs.engine_pair import make_config

WAIT_S = 60.0


class _Step:
    """A launched one, of all ranks."""

    def __init__(self, ranks: "Ranks", pending: PendingStep) -> None:
        self._ranks, self._pending = ranks, pending

    def draw(self, masks: Int32s) -> None:
        self._pending.draw(masks)

    def has_ended(self) -> bool:
        return self._pending.has_ended()

    def result(self) -> StepOutput:
        own = self._pending.result()
        others = [answers.get(timeout=WAIT_S) for answers in self._ranks.answers]
        self._ranks.outputs.append([own, *others])
        return own


class Ranks:
    """An executor.

    Attributes:
        outputs: of each step, by rank.
    """

    def __init__(self, runners: list[ModelRunner]) -> None:
        self.runners = runners
        self.depth = runners[0].depth
        self.outputs: list[list[StepOutput]] = []
        self._steps: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in runners[1:]]
        self.answers: list[queue.Queue[StepOutput]] = [queue.Queue() for _ in runners[1:]]
        self._threads = [
            threading.Thread(target=self._follow, args=(rank,)) for rank in range(1, len(runners))
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, rank: int) -> None:
        while (data := self._steps[rank - 1].get()) is not None:
            self.answers[rank - 1].put(self.runners[rank].execute(step_from_bytes(data)))

    def blocks_under_way(self) -> set[int]:
        return set()

    def launch(self, step: StepInput) -> PendingStep:
        for steps in self._steps:
            steps.put(step_to_bytes(step))
        return _Step(self, self.runners[0].launch(step))

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """New pools, of blocks of so many tokens on each rank."""
        for runner in self.runners:
            runner.config = runner.config.model_copy(update={"block_size": block_size})
            runner.allocate(num_blocks)

    def close(self) -> None:
        for steps in self._steps:
            steps.put(None)
        for thread in self._threads:
            thread.join(WAIT_S)


def _runner(
    rank: int, size: int, dcp: int, port: int, listening: "queue.Queue[int]", **options: int
) -> ModelRunner:
    model = ensure_model("gqa")
    config = make_config(model_dir=str(model), tp=size, dcp=dcp, **options)
    parallel = Parallel()
    if size > 1:
        parallel = Parallel.connect(
            rank, size, host="127.0.0.1", port=port, dcp=dcp, on_listening=listening.put
        )
    return ModelRunner(config, load_config(model), parallel)


@contextmanager
def ranks(size: int, dcp: int = 1, **options: int) -> Iterator[Ranks]:
    """`size` ranks, of which `dcp` share tokens; `allocate` comes next.

    Args:
        options: further ones of EngineConfig.
    """
    listening: queue.Queue[int] = queue.Queue()
    runners: dict[int, ModelRunner] = {}

    def start(rank: int, port: int) -> None:
        runners[rank] = _runner(rank, size, dcp, port, listening, **options)

    threads = [threading.Thread(target=start, args=(0, 0))]
    threads[0].start()
    if size > 1:
        port = listening.get(timeout=WAIT_S)
        threads += [threading.Thread(target=start, args=(rank, port)) for rank in range(1, size)]
        for thread in threads[1:]:
            thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    executor = Ranks([runners[rank] for rank in range(size)])
    try:
        yield executor
    finally:
        executor.close()
        for runner in runners.values():
            runner.model.parallel.close()
