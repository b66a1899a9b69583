"""The interface of drafters, which propose the next tokens of sequences that decode.

A proposal is a guess. The step that follows verifies it: it draws the token of each
proposed position as an ordinary step would, and accepts the proposals that equal the
drawn tokens, up to the first that differs. So no drafter can change a token of the
output.
"""

from collections.abc import Sequence as Sequenceable
from typing import Protocol, runtime_checkable

from engine.core.batch import PendingStep, StepInput
from engine.core.plan import Scheduled
from engine.core.sequence import Sequence
from engine.speculation.draft_kv import DraftedBlocks


class Drafter(Protocol):
    """Proposes tokens. All calls are made by the engine core's thread.

    Attributes:
        name: the value of the label `drafter` of the metrics.
        uses_device: whether proposing takes time on the device. If False, the engine
            first requests proposals for all sequences, and then decides how many of
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
            sequences: decoding sequences. All their tokens except the last have KV.
            limits: for each sequence, the largest number of tokens to propose.
        """


@runtime_checkable
class StateReadingDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the engine's model. The methods may raise
    any exception, like `Drafter.propose`."""

    def prepare(
        self,
        scheduled: Sequenceable[Scheduled],
        step: StepInput,
        *,
        only_prompts: bool = False,
    ) -> StepInput:
        """Returns `step`, extended to also store hidden states for the drafter.

        Args:
            scheduled: the tokens that the step of the engine's model computes.
            only_prompts: do nothing for sequences that decode.
        """

    def follow(self) -> list[PendingStep]:
        """Launches steps of the drafter, and returns them. Called after the prepared
        step has been launched and has drawn its tokens, before the next step is
        launched. Not called if the prepared step has failed."""


@runtime_checkable
class KVDrafter(Drafter, Protocol):
    """A drafter with KV in the engine's blocks.

    Attributes:
        drafted_blocks: which blocks have draft KV, and of which tokens.
        catch_up_token_s: seconds to compute the draft KV of one token that has only KV
            of the engine's model, such as a token of a pulled prompt; 0 until measured,
            infinity if the drafter cannot compute it.
    """

    drafted_blocks: DraftedBlocks
    catch_up_token_s: float
