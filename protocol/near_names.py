"""Near matches of an unknown name, for error messages."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

_MIN_SIMILARITY: Final = 0.7  # at 0.6 `stop` would match `top_p`


def suggestion(wrong: str, known_names: Iterable[str]) -> str:
    """Returns " (did you mean --x?)", or an empty string if no name is near."""
    return did_you_mean(near_names(wrong, known_names))


def near_names(wrong: str, known_names: Iterable[str]) -> list[str]:
    """Returns `wrong` itself if it is known, else up to three similar names, best
    first.
    """
    names = list(known_names)
    if wrong in names:
        return [wrong]
    return difflib.get_close_matches(wrong, names, n=3, cutoff=_MIN_SIMILARITY)


def did_you_mean(near: Sequence[str]) -> str:
    """Returns " (did you mean --x or --y?)", or an empty string for no names."""
    return f" (did you mean {' or '.join(near)}?)" if near else ""
