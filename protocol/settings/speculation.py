"""The value of the option --speculate: a drafter and a number of tokens."""

from dataclasses import dataclass
from typing import Final, Literal

from protocol.short_repr import short_repr

DrafterKind = Literal["", "ngram", "model", "mtp", "eagle3"]

# Maximum number of proposals for one sequence in one step. If each token is right with
# a probability of 0.9, the first 15 tokens are all right in 21 % of the steps, so more
# than 16 proposals would rarely help.
MAX_PROPOSALS: Final = 16
_MAX_DIGITS: Final = 4
_FORMS: Final = (
    "off, or a drafter with a number of tokens: ngram:8, model:DIR:4, mtp:3 or "
    "eagle3:DIR:4"
)
_KINDS: Final[tuple[DrafterKind, ...]] = ("ngram", "model", "mtp", "eagle3")
# The drafters with a checkpoint. In the option, its directory precedes the number.
_KINDS_WITH_FOLDER: Final[tuple[DrafterKind, ...]] = ("model", "eagle3")
# The number of tokens if the option is `mtp` without a number. An MTP layer is trained
# to propose one token. If it proposes more, the fourth is seldom right.
_DEFAULT_MTP_PROPOSALS: Final = 3


@dataclass(frozen=True)
class Speculation:
    """The settings of an engine's speculative decoding.

    Attributes:
        kind: the drafter; empty: none.
        max_proposals: largest number of proposals for one sequence in one step; 0:
            nothing is proposed.
        uses_predictions: whether the `prediction` of a request is proposed.
        folder: the directory of the drafter's checkpoint; empty if it has none.
    """

    kind: DrafterKind = ""
    max_proposals: int = MAX_PROPOSALS
    uses_predictions: bool = True
    folder: str = ""


def parse_speculation(text: str | None) -> Speculation:
    """Returns the settings that the value of --speculate describes.

    Raises:
        ValueError: the text is not a value of --speculate.
    """
    if text is None:
        return Speculation()
    if text == "off":
        return Speculation(max_proposals=0, uses_predictions=False)
    name, _, number = text.partition(":")
    if text == "mtp":
        number = str(_DEFAULT_MTP_PROPOSALS)
    kind = next((kind for kind in _KINDS if kind == name), None)
    quoted = short_repr(text)
    folder = ""
    if name in _KINDS_WITH_FOLDER:
        folder, _, number = number.rpartition(":")
        name = f"{name}:DIR"
        if not folder:
            raise ValueError(
                f"{quoted} has no directory or no number of tokens: write {name}:4"
            )
    if kind is None:
        raise ValueError(f"{quoted} names no drafter: write {_FORMS}")
    is_number = number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS
    if not is_number:
        raise ValueError(f"{quoted} has no number of tokens: write {_FORMS}")
    max_proposals = int(number)
    if not 1 <= max_proposals <= MAX_PROPOSALS:
        raise ValueError(
            f"{quoted}: a step verifies 1 to {MAX_PROPOSALS} proposed tokens of a "
            f"sequence; write for example {name}:{MAX_PROPOSALS}"
        )
    return Speculation(kind, max_proposals, folder=folder)
