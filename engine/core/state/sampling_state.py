"""How the tokens of one choice are drawn: parameters, first token and grammar."""

from dataclasses import dataclass

from engine.text.grammar import GrammarState
from protocol.messages import FirstToken, SamplingParams, TokenLogprobs


@dataclass(eq=False, slots=True)
class SamplingState:
    """How the tokens of one choice are drawn, and what is known of its first token.

    The randomness of a draw is a function of the seed in `params`, the choice, the
    position and the token, so no state of a random generator is stored. The ranks count
    tokens for penalties, in state rows that `RowAllocator` (logits_processing.py)
    assigns.

    Invariant: an unsent first token is the only output of its choice.

    Attributes:
        params: the parameters that are sent to the ranks for each draw, without bias
            and grammar: `RowAllocator` sends the bias once, and only rank 0 needs the
            grammar.
        unsent_first_token: the first token, if another server has drawn it and the
            client does not have it. The output processor sends it.
        first_logprobs: logprobs of the first output, if it was drawn here.
        grammar: the position in the request's grammar. None without a grammar, and
            until `CoreGrammars` has compiled it.
        awaits_mask: whether the sequence skips steps until a mask of its draws is
            ready. `CoreGrammars` changes it.
    """

    params: SamplingParams
    unsent_first_token: FirstToken | None = None
    first_logprobs: TokenLogprobs | None = None
    grammar: GrammarState | None = None
    awaits_mask: bool = False

    def take_unsent_first_token(self) -> FirstToken | None:
        """Returns the unsent first token, or None. Later calls return None."""
        token = self.unsent_first_token
        self.unsent_first_token = None
        return token
