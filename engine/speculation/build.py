"""Makes the drafters that an engine is configured with."""

from engine.config import EngineConfig
from engine.core.tables import SchedulerLimits
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import NgramDrafter, PredictionDrafter
from engine.speculation.speculator import Speculator


def make_speculator(config: EngineConfig, limits: SchedulerLimits) -> Speculator:
    speculation = config.speculation
    drafters: list[Drafter] = []
    if speculation.uses_predictions:
        drafters.append(PredictionDrafter())
    if speculation.kind == "ngram":
        drafters.append(NgramDrafter())
    return Speculator(limits, drafters, speculation.max_proposals)
