"""Near matches of an unknown name, for error messages."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

_ALIKE: Final = 0.7  # at 0.6 `stop` is taken for `top_p`


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """ " (did you mean --x?)", or an empty string when nothing is near."""
    return did_you_mean(near_names(wrong, known))


def near_names(wrong: str, known: Iterable[str]) -> list[str]:
    """The one that is `wrong` exactly, else at most three that are spelled alike, best first."""
    names = list(known)
    if wrong in names:
        return [wrong]
    return difflib.get_close_matches(wrong, names, n=3, cutoff=_ALIKE)


def did_you_mean(near: Sequence[str]) -> str:
    """ " (did you mean --x or --y?)", or an empty string for none."""
    return f" (did you mean {' or '.join(near)}?)" if near else ""
