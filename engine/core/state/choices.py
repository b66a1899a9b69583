"""The choices of one request: which of them the client still waits for, and which have
yet to fork off choice 0.

A request of several choices is one sequence while its prompt is computed or pulled.
Choice 0, the parent, has the prompt. The other choices are its children. The
children fork off as soon as the KV of the prompt is computed or pulled, and share its
full blocks. Until then the children have no copy of the prompt's tokens, because many
requests may wait and only few run.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Sequenceable
from enum import Enum
from typing import Generic, Protocol, TypeVar


class ChoiceState(Enum):
    """What one choice still has to do. `ChoiceTree` makes all transitions.

        CHILD --> OPEN --> ENDED <--> PREFILLS_FOR_CHILDREN (choice 0 only)
        CHILD -----------> ENDED

    This state restricts the phase of the choice (Phase of sequence.py): a CHILD is in
    the phase NEW. An ENDED choice is in the phase FINISHED once the call that ended the
    choice has returned. Choices in the other two states are not FINISHED.
    """

    CHILD = "child"  # waits until choice 0 has the KV of the prompt, to fork off it
    OPEN = "open"  # has the prompt, and its terminal event is not sent
    # The choice's terminal event is sent, but the choice still computes the prompt for
    # its children.
    PREFILLS_FOR_CHILDREN = "prefills for children"
    ENDED = "ended"  # its terminal event is sent, or is about to be

    @property
    def has_ended(self) -> bool:
        """Whether the terminal event of the choice is sent, or is about to be."""
        return self is ChoiceState.ENDED or self is ChoiceState.PREFILLS_FOR_CHILDREN


class Choice(Protocol):
    """The attribute of a choice that ChoiceTree uses."""

    choice_state: ChoiceState


_Choice = TypeVar("_Choice", bound=Choice)


class ChoiceTree(Generic[_Choice]):
    """All choices of one request, which share this object.

    Invariants: `children` are the choices in state CHILD. Only the parent can be in
    state PREFILLS_FOR_CHILDREN, which it enters when it has ended and children are
    left. While children are left, only the parent has blocks.

    The scheduler forks children and ends a parent that has prefilled for them. The
    engine core makes all other changes.

    Attributes:
        parent: choice 0.
        children: the choices that have yet to fork off the parent, in order.
        migrating: the choice that leases its KV to the server that continues the
            request. None unless the request migrates.
    """

    def __init__(self, choices: Sequenceable[_Choice]) -> None:
        self._choices = tuple(choices)
        self.parent = self._choices[0]
        self.children = [
            choice
            for choice in self._choices
            if choice.choice_state is ChoiceState.CHILD
        ]
        self.migrating: _Choice | None = None

    def __iter__(self) -> Iterator[_Choice]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def open_choices(self) -> list[_Choice]:
        """The choices that have not ended."""
        return [choice for choice in self._choices if not choice.choice_state.has_ended]

    def fork(self, child: _Choice) -> None:
        """Records that a child has its own copy of the prompt."""
        assert child.choice_state is ChoiceState.CHILD, "a choice forks once"
        self.children.remove(child)
        child.choice_state = ChoiceState.OPEN

    def end(self, choice: _Choice) -> None:
        """Records that the terminal event of a choice is about to be sent."""
        assert not choice.choice_state.has_ended, "a choice ends once"
        if choice.choice_state is ChoiceState.CHILD:
            self.children.remove(choice)
        choice.choice_state = ChoiceState.ENDED

    def end_all(self) -> None:
        """Ends all choices at once, in any state."""
        self.children.clear()
        for choice in self._choices:
            choice.choice_state = ChoiceState.ENDED

    def prefill_for_children(self) -> None:
        """Lets the ended parent compute the prompt for its unforked children."""
        assert self.children, "a parent without children has nothing to compute"
        assert self.parent.choice_state is ChoiceState.ENDED
        self.parent.choice_state = ChoiceState.PREFILLS_FOR_CHILDREN

    def end_prefill(self) -> None:
        """Records that the ended parent has nothing more to compute."""
        assert not self.children, "the children still need the prompt"
        assert self.parent.choice_state.has_ended
        self.parent.choice_state = ChoiceState.ENDED
