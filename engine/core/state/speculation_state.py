"""What is proposed for the next tokens of one choice, and how many proposals were
right."""

from dataclasses import dataclass, field

from engine.speculation.policy import AcceptanceRate


@dataclass(eq=False, slots=True)
class SpeculationState:
    """The proposals of one choice.

    Attributes:
        proposals: proposed tokens for the next step, which follow the last token. The
            speculator sets them before each plan, and the scheduler takes them.
        num_accepted: proposed tokens that were drawn.
        num_rejected: proposed tokens that were not drawn, including those after the
            first wrong one.
        drafter: name of the drafter of the latest proposals.
        rates: how often proposals for this choice are right, by drafter.
        is_paused: whether nothing is proposed for the next step, because the masks of
            the last proposals were not ready in time.
    """

    proposals: tuple[int, ...] = ()
    num_accepted: int = 0
    num_rejected: int = 0
    drafter: str = ""
    rates: dict[str, AcceptanceRate] = field(default_factory=dict)
    is_paused: bool = False

    def take_proposals(self) -> tuple[int, ...]:
        """Returns the proposals. Later calls return none."""
        proposals = self.proposals
        self.proposals = ()
        return proposals

    def record(self, num_proposed: int, num_accepted: int) -> None:
        """Counts the proposals of a finished step."""
        self.num_accepted += num_accepted
        self.num_rejected += num_proposed - num_accepted
