"""The interface of drafters, which propose the next tokens of sequences that decode.

A proposal is a guess. The step that follows verifies it: it draws the token of each
proposed position as an ordinary step would, and accepts the proposals that equal the
drawn tokens, up to the first that differs. So no drafter can change a token.
"""

from collections.abc import Sequence as Sequenceable
from typing import Protocol, runtime_checkable

from engine.core.batch import StepInput
from engine.core.plan import Scheduled
from engine.core.sequence import Sequence


class Drafter(Protocol):
    """Proposes tokens. All calls are made by the engine core's thread.

    Attributes:
        name: the value of the label `drafter` of the metrics.
        uses_device: whether proposing takes time on the device. If not, the engine
            requests proposals for all sequences first, and then decides how many of
            them to verify.
    """

    name: str
    uses_device: bool

    def propose(
        self, sequences: Sequenceable[Sequence], limits: Sequenceable[int]
    ) -> list[list[int]]:
        """Returns, for each sequence, the tokens that may follow its last token.

        May return fewer tokens than requested, or none. May raise any exception: the
        engine then stops using this drafter.

        Args:
            sequences: decoding sequences. All their tokens but the last one have KV.
            limits: for each sequence, the largest number of tokens to propose.
        """


@runtime_checkable
class StateReadingDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the engine's model. The methods may raise
    any exception, like `Drafter.propose`."""

    def prepare(self, scheduled: Sequenceable[Scheduled], step: StepInput) -> StepInput:
        """Returns a step of the engine's model that also stores states.

        Args:
            scheduled: what the step computes.
        """

    def follow(self) -> None:
        """Must be called once the prepared step has been launched and has drawn, and
        before the next step is launched. Not called if the step has failed."""
