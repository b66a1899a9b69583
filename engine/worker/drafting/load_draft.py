"""Loads the draft model of a rank."""

from collections.abc import Callable

from engine.speculation.draft_model import requested_draft_model
from engine.speculation.states.state_model import requested_state_model
from engine.worker.draft_runner import DraftRunner
from engine.worker.drafting.state_runner import StateDraftRunner
from engine.worker.runner import ModelRunner


def load_draft(
    target: ModelRunner, report: Callable[[str], None]
) -> DraftRunner | None:
    """Loads the draft model that --speculate names, on the rank of `target`. Returns
    None if the option names none."""
    states = requested_state_model(target.config, target.model_config)
    if states is not None:
        return StateDraftRunner(target, states, report)
    draft = requested_draft_model(target.config, target.model_config)
    return None if draft is None else DraftRunner(target, draft, report)
