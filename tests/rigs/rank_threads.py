"""Ranks of a real model behind one executor, each in a thread.

All ranks except rank 0 receive each step as bytes, like ranks in separate processes.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from engine.core.batch import (
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
from tests.rigs.engines import make_config

WAIT_S = 60.0


class _Step:
    """A step that was launched on all ranks."""

    def __init__(
        self,
        ranks: "Ranks",
        first: PendingStep,
        other_outputs: list[Future[StepOutput]],
    ) -> None:
        self._ranks = ranks
        self._first = first
        self._others = other_outputs
        self.draw = first.draw
        self.has_ended = first.has_ended

    def result(self) -> StepOutput:
        output = self._first.result()
        self._ranks.steps.append((output, self._others))
        return output


class Ranks:
    """An executor with several ranks. Rank 0 does not wait for the other ranks, as if
    they were separate processes.

    Attributes:
        steps: for each step, the output of rank 0 and the futures of the other ranks.
    """

    def __init__(
        self, runners: list[ModelRunner], threads: list[ThreadPoolExecutor]
    ) -> None:
        self.runners = runners
        self._threads = threads
        self.depth = runners[0].depth
        self.steps: list[tuple[StepOutput, list[Future[StepOutput]]]] = []

    def outputs(self) -> list[list[StepOutput]]:
        """Return the outputs of all ranks, for each step."""
        return [
            [first, *(future.result(WAIT_S) for future in other_outputs)]
            for first, other_outputs in self.steps
        ]

    def launch(self, step: StepInput) -> PendingStep:
        data = step_to_bytes(step)

        def execute(runner: ModelRunner) -> StepOutput:
            return runner.execute(step_from_bytes(data))

        other_outputs = [
            thread.submit(execute, runner)
            for thread, runner in zip(self._threads[1:], self.runners[1:], strict=True)
        ]
        return _Step(self, self.runners[0].launch(step), other_outputs)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Allocate new pools, with blocks of `block_size` tokens on each rank."""
        for runner in self.runners:
            runner.config = runner.config.model_copy(update={"block_size": block_size})
            runner.allocate(num_blocks)


def _runner(
    rank: int, *, size: int, dcp: int, rendezvous_file: str, **options: Any
) -> ModelRunner:
    model = ensure_model("gqa")
    config = make_config(
        model_dir=str(model), role="decode", tp=size, dcp=dcp, **options
    )
    parallel = Parallel.connect(rank, size, rendezvous_file=rendezvous_file, dcp=dcp)
    return ModelRunner(config, load_config(model), parallel)


def _close(runners: list[ModelRunner]) -> None:
    for runner in runners:
        runner.model.parallel.close()


@contextmanager
def ranks(size: int, dcp: int = 1, **options: Any) -> Iterator[Ranks]:
    """Start `size` ranks. Each group of `dcp` ranks shares the tokens of sequences.
    The ranks have no KV pools until `allocate` is called.

    Args:
        options: further options of EngineConfig.
    """
    runners: list[ModelRunner] = []
    with ExitStack() as stack:
        # Callbacks run in reverse order, so this one runs after the threads have ended.
        stack.callback(lambda: _close(runners))
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(size)]
        folder = stack.enter_context(TemporaryDirectory())
        options = {
            "size": size,
            "dcp": dcp,
            "rendezvous_file": f"{folder}/group",
            **options,
        }
        futures = [
            thread.submit(_runner, rank, **options)
            for rank, thread in enumerate(threads)
        ]
        runners += [future.result(WAIT_S) for future in futures]
        yield Ranks(runners, threads)
