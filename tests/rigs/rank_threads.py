"""Ranks of a real model, each in a thread, behind one executor; all but the first get
each step as bytes.
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
    """A launched one, of all ranks."""

    def __init__(
        self, ranks: "Ranks", own: PendingStep, others: list[Future[StepOutput]]
    ) -> None:
        self._ranks, self._own, self._others = ranks, own, others
        self.draw, self.has_ended = own.draw, own.has_ended

    def result(self) -> StepOutput:
        own = self._own.result()
        self._ranks.steps.append((own, self._others))
        return own


class Ranks:
    """An executor. As between processes, rank 0 does not wait for the others'
    results.
    """

    def __init__(
        self, runners: list[ModelRunner], threads: list[ThreadPoolExecutor]
    ) -> None:
        self.runners, self._threads = runners, threads
        self.depth = runners[0].depth
        self.steps: list[tuple[StepOutput, list[Future[StepOutput]]]] = []

    def outputs(self) -> list[list[StepOutput]]:
        """Of each step, by rank."""
        return [
            [own, *(one.result(WAIT_S) for one in others)] for own, others in self.steps
        ]

    def launch(self, step: StepInput) -> PendingStep:
        data, others = (
            step_to_bytes(step),
            zip(self._threads[1:], self.runners[1:], strict=True),
        )
        begun = [
            thread.submit(lambda runner=runner: runner.execute(step_from_bytes(data)))
            for thread, runner in others
        ]
        return _Step(self, self.runners[0].launch(step), begun)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """New pools, of blocks of so many tokens on each rank."""
        for runner in self.runners:
            runner.config = runner.config.model_copy(update={"block_size": block_size})
            runner.allocate(num_blocks)


def _runner(
    rank: int, *, size: int, dcp: int, meeting: str, **options: Any
) -> ModelRunner:
    model = ensure_model("gqa")
    config = make_config(
        model_dir=str(model), role="decode", tp=size, dcp=dcp, **options
    )
    parallel = Parallel.connect(rank, size, meeting=meeting, dcp=dcp)
    return ModelRunner(config, load_config(model), parallel)


@contextmanager
def ranks(size: int, dcp: int = 1, **options: Any) -> Iterator[Ranks]:
    """`size` ranks, of which `dcp` share tokens; `allocate` comes next.

    Args:
        options: further ones of EngineConfig.
    """
    runners: list[ModelRunner] = []
    with ExitStack() as stack:
        # Once no thread runs any more.
        stack.callback(lambda: [each.model.parallel.close() for each in runners])
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(size)]
        folder = stack.enter_context(TemporaryDirectory())
        options = {"size": size, "dcp": dcp, "meeting": f"{folder}/group", **options}
        making = [
            thread.submit(_runner, rank, **options)
            for rank, thread in enumerate(threads)
        ]
        runners += [each.result(WAIT_S) for each in making]
        yield Ranks(runners, threads)
