"""The states of a request's choices: legal transitions, and illegal ones that raise."""

from dataclasses import dataclass

import pytest

from engine.core.sequence import Phase, Sequence
from engine.core.state.choices import ChoiceState, ChoiceTree
from protocol.messages import ResumedChoice
from tests.rigs.shadow import add

CHILD = ChoiceState.CHILD
OPEN = ChoiceState.OPEN
PREFILLS = ChoiceState.PREFILLS_FOR_CHILDREN
ENDED = ChoiceState.ENDED


@dataclass(eq=False)
class FakeChoice:
    choice_state: ChoiceState


def make_tree(num_children: int) -> ChoiceTree[FakeChoice]:
    children = [FakeChoice(CHILD) for _ in range(num_children)]
    return ChoiceTree([FakeChoice(OPEN), *children])


def states(tree: ChoiceTree[FakeChoice]) -> list[ChoiceState]:
    return [choice.choice_state for choice in tree]


def test_child_that_forked_or_ended_is_no_longer_a_child():
    tree = make_tree(3)
    first, second, third = tree.children
    tree.fork(first)
    tree.end(second)
    assert tree.children == [third]
    assert states(tree) == [OPEN, OPEN, ENDED, CHILD]
    assert tree.open_choices == [tree.parent, first, third]


def test_ended_parent_prefills_until_no_child_is_left():
    tree = make_tree(1)
    (child,) = tree.children
    tree.end(tree.parent)
    tree.prefill_for_children()
    assert states(tree) == [PREFILLS, CHILD]
    with pytest.raises(AssertionError, match="the children still need the prompt"):
        tree.end_prefill()
    tree.fork(child)
    tree.end_prefill()
    assert states(tree) == [ENDED, OPEN]


def test_open_parent_does_not_prefill_only_for_its_children():
    with pytest.raises(AssertionError):
        make_tree(1).prefill_for_children()


def test_parent_without_children_does_not_prefill_for_them():
    tree = make_tree(0)
    tree.end(tree.parent)
    with pytest.raises(AssertionError, match="without children"):
        tree.prefill_for_children()


def test_choice_ends_once():
    tree = make_tree(1)
    tree.end(tree.parent)
    with pytest.raises(AssertionError, match="ends once"):
        tree.end(tree.parent)
    tree.prefill_for_children()
    with pytest.raises(AssertionError, match="ends once"):
        tree.end(tree.parent)


def test_choice_forks_once_and_not_after_its_end():
    tree = make_tree(2)
    first, second = tree.children
    tree.fork(first)
    tree.end(second)
    for choice in tree:
        with pytest.raises(AssertionError, match="forks once"):
            tree.fork(choice)


def test_failed_request_has_only_ended_choices():
    tree = make_tree(2)
    tree.end(tree.parent)
    tree.prefill_for_children()
    tree.end_all()
    assert states(tree) == [ENDED] * 3
    assert not tree.children
    assert not tree.open_choices


def test_resumed_request_keeps_the_ends_of_its_choices():
    resumed = [
        ResumedChoice([7], has_ended=True),
        ResumedChoice([8, 9]),
        ResumedChoice([7], has_ended=True),
    ]
    parent = Sequence.from_request(
        add("a", [1, 2, 3], 9, num_choices=3, resumed_choices=resumed)
    )
    choices = list(parent.choices)
    assert [choice.choice_state for choice in choices] == [PREFILLS, CHILD, ENDED]
    assert [choice.phase for choice in choices] == [
        Phase.NEW,
        Phase.NEW,
        Phase.FINISHED,
    ]
    assert [choice.token_ids for choice in choices] == [[1, 2, 3], [8, 9], []]
    assert parent.choices.children == choices[1:2]
