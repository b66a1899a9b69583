"""Runs the steps of a drafter's round. Each step draws the next proposal of each
stream."""

from collections import deque
from collections.abc import Iterator

from engine.core.batch import Executor, PendingStep, StepInput
from engine.speculation.draft_round import DraftRound, DraftStream
from engine.speculation.states.state_rounds import DraftRows, StateRound


def run_round(
    executor: Executor, draft_round: DraftRound | StateRound, first_step: StepInput
) -> Iterator[None]:
    """Runs the steps of a round, and stores the draws as proposals. Yields each time
    the draws of a step have been stored.

    Steps are launched ahead as far as the executor allows, because a step reads the
    draws of the previous step on the device.
    """
    launched: deque[
        tuple[PendingStep, dict[DraftStream, int] | dict[DraftRows, int]]
    ] = deque()
    step: StepInput | None = first_step
    while step is not None or launched:
        if step is not None:
            launched.append((executor.launch(step), draft_round.rows))
            step = draft_round.next_step()
        if step is not None and len(launched) <= executor.depth:
            continue
        pending, rows = launched.popleft()
        token_ids = pending.result().token_ids
        for stream, row in rows.items():
            stream.proposals.append(token_ids[row])
        yield
