"""Makes the drafters that an engine is configured with."""

from engine.config import EngineConfig
from engine.core.batch import Executor
from engine.core.tables import SchedulerLimits
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import NgramDrafter, PredictionDrafter
from engine.speculation.speculator import Speculator
from engine.worker.draft_runner import DraftRunner


def make_speculator(
    config: EngineConfig,
    limits: SchedulerLimits,
    executor: Executor,
    draft: DraftRunner | None,
) -> Speculator:
    """Makes the speculator of an engine, on rank 0.

    Args:
        executor: runs steps on all ranks.
        draft: the draft model of rank 0; None if there is none.
    """
    speculation = config.speculation
    drafters: list[Drafter] = []
    if speculation.uses_predictions:
        drafters.append(PredictionDrafter())
    if speculation.kind == "ngram":
        drafters.append(NgramDrafter())
    if draft is not None:
        drafters.append(draft.make_drafter(executor))
    return Speculator(limits, drafters, speculation.max_proposals)
