"""Suggests names that are similar to an unknown name, for error messages."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

_MIN_SIMILARITY: Final = 0.7  # at 0.6 `stop` would match `top_p`


def suggestion(wrong: str, valid_names: Iterable[str]) -> str:
    """Returns " (did you mean --x?)", or an empty string if no name is similar."""
    return did_you_mean(near_names(wrong, valid_names))


def near_names(wrong: str, valid_names: Iterable[str]) -> list[str]:
    """Returns up to three names that are similar to `wrong`, the most similar first.

    If `wrong` is itself a valid name, the result is [wrong].
    """
    names = list(valid_names)
    if wrong in names:
        return [wrong]
    return difflib.get_close_matches(wrong, names, n=3, cutoff=_MIN_SIMILARITY)


def did_you_mean(names: Sequence[str]) -> str:
    """Returns " (did you mean --x or --y?)", or an empty string without names."""
    return f" (did you mean {' or '.join(names)}?)" if names else ""
