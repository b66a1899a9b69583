"""Checks the invariants of a request's choices that hold between two rounds of an
engine core.
"""

from engine.core.core import EngineCore
from engine.core.sequence import Phase, Sequence
from engine.core.state.choices import ChoiceState


def assert_choices_are_consistent(core: EngineCore) -> None:
    """Check the state of each choice against its phase, its tokens and its blocks."""
    for parent in core.sequences.values():
        children = []
        for choice in parent.choices:
            assert choice.choices is parent.choices
            _check_state(choice, is_parent=choice is parent)
            if choice.choice_state is ChoiceState.CHILD:
                children.append(choice)
        assert parent.choices.children == children
        with_blocks = [choice for choice in parent.choices if choice.block_ids]
        assert not children or with_blocks in ([], [parent])


def _check_state(choice: Sequence, *, is_parent: bool) -> None:
    is_finished = choice.phase is Phase.FINISHED
    if not is_parent:
        assert choice.pull is None
        assert choice.prompt_logprobs is None
    match choice.choice_state:
        case ChoiceState.CHILD:
            assert not is_parent
            assert not choice.has_prompt
            assert choice.phase is Phase.NEW
        case ChoiceState.OPEN:
            assert choice.has_prompt
            assert not is_finished
        case ChoiceState.PREFILLS_FOR_CHILDREN:
            assert is_parent
            assert choice.choices.children
            assert not is_finished
        case ChoiceState.ENDED:
            assert is_finished
            assert not choice.block_ids
    if choice.phase is Phase.RECEIVING:
        assert choice.pull is not None
    if choice.phase is Phase.RUNNING:
        assert choice.pull is None
    if choice.sampling.unsent_first_token is not None:
        assert choice.num_outputs == 1
        assert choice.token_ids[-1] == choice.sampling.unsent_first_token.id
