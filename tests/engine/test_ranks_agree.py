"""Two ranks of a model, each in a thread, get from a step's bytes all that shapes its draws, each
with half the heads or (dcp) with half the tokens.

Whatever one rank would miss (a copied block, a prompt to score, a penalty's counts) either changes
what rank 0 answers, because both share every sum, or leaves a collective without its partner.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.batch import PendingStep, StepInput, StepOutput, step_from_bytes, step_to_bytes
from engine.runner import ModelRunner
from model.config import load_config
from model.parallel import Parallel
from protocol.messages import AddRequest, SamplingParams, TokenLogprobs
from tests.decode_server.pair import make_config
from tests.engine.shadow import MemoryTransport, make_core, run_until_idle
from tests.make_models import ensure_model

BLOCKS, BLOCK_SIZE = 80, 4


class _Ranks:
    """An executor of one or two ranks; the second gets each step as bytes."""

    depth = 0

    def __init__(self, runners: list[ModelRunner]) -> None:
        self.runners = runners
        self.outputs: list[tuple[StepOutput, StepOutput]] = []
        self._steps: queue.Queue[bytes | None] = queue.Queue()
        self._answers: queue.Queue[StepOutput] = queue.Queue()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while (data := self._steps.get()) is not None:
            self._answers.put(self.runners[1].execute(step_from_bytes(data)))

    def blocks_under_way(self) -> set[int]:
        return set()

    def launch(self, step: StepInput) -> PendingStep:
        if len(self.runners) > 1:
            self._steps.put(step_to_bytes(step))
        pending = self.runners[0].launch(step)
        if len(self.runners) > 1:
            self.outputs.append((pending.result(), self._answers.get(timeout=60)))
        return pending

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join(60)


def _runner(
    rank: int, size: int, dcp: int, port: int, listening: "queue.Queue[int]"
) -> ModelRunner:
    model = ensure_model("gqa")
    block_size = BLOCK_SIZE // dcp
    config = make_config(model_dir=str(model), block_size=block_size, tp=size, dcp=dcp)
    parallel = Parallel()
    if size > 1:
        parallel = Parallel.connect(
            rank, size, host="127.0.0.1", port=port, dcp=dcp, on_listening=listening.put
        )
    runner = ModelRunner(config, load_config(model), parallel)
    runner.allocate(BLOCKS)
    return runner


@contextmanager
def ranks(size: int, dcp: int = 1) -> Iterator[_Ranks]:
    listening: queue.Queue[int] = queue.Queue()
    runners: dict[int, ModelRunner] = {}

    def start(rank: int, port: int) -> None:
        runners[rank] = _runner(rank, size, dcp, port, listening)

    threads = [threading.Thread(target=start, args=(0, 0))]
    threads[0].start()
    if size > 1:
        threads.append(threading.Thread(target=start, args=(1, listening.get(timeout=60))))
        threads[1].start()
    for thread in threads:
        thread.join(60)
    executor = _Ranks([runners[rank] for rank in range(size)])
    try:
        yield executor
    finally:
        executor.close()
        for runner in runners.values():
            runner.model.parallel.close()


REQUESTS = [
    AddRequest(
        request_id="choices",
        token_ids=[(13 * at) % 200 for at in range(30)],
        sampling=SamplingParams(
            temperature=1.2,
            seed=5,
            num_logprobs=2,
            frequency_penalty=0.6,
            repetition_penalty=1.3,
            logit_bias={7: 3.0},
        ),
        max_tokens=10,
        num_choices=3,
        num_prompt_logprobs=2,
    ),
    AddRequest(
        request_id="scored",
        token_ids=[(7 * at * at) % 300 for at in range(33)],
        sampling=SamplingParams(temperature=0.0),
        max_tokens=0,
        num_prompt_logprobs=0,
    ),
    AddRequest(
        request_id="plain",
        token_ids=[9, 8, 7],
        sampling=SamplingParams(temperature=0.0, presence_penalty=1.0),
        max_tokens=12,
    ),
]


def _answers(executor: _Ranks) -> MemoryTransport:
    core, _, out = make_core(
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        executor=executor,  # type: ignore[arg-type]
    )
    core.round(REQUESTS)
    run_until_idle(core)
    return out


def _values(rows: list[TokenLogprobs | None]) -> torch.Tensor:
    return torch.tensor([row.logprob for row in rows if row is not None])


@pytest.mark.parametrize("dcp", [1, 2])
def test_two_ranks_answer_like_one_and_both_draw_the_same(dcp: int) -> None:
    with ranks(1) as one:
        expected = _answers(one)
    with ranks(2, dcp) as two:
        answered = _answers(two)
    for name, choice in (("choices", 0), ("choices", 1), ("choices", 2), ("plain", 0)):
        assert answered.tokens(name, choice) == expected.tokens(name, choice)
    for name in ("choices", "scored"):
        torch.testing.assert_close(
            _values(answered.prompt_logprobs(name)),
            _values(expected.prompt_logprobs(name)),
            atol=1e-4,
            rtol=0,
        )
    assert two.outputs, "steps were taken"
    assert all(first.token_ids == second.token_ids for first, second in two.outputs)
