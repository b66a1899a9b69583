"""Suggests names that are similar to an unknown name, for error messages."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

_MIN_SIMILARITY: Final = 0.7  # at 0.6 `stop` would match `top_p`


def suggestion(name: str, valid_names: Iterable[str]) -> str:
    """Returns " (did you mean --x?)", or an empty string if no valid name is similar
    to `name`.
    """
    return did_you_mean(near_names(name, valid_names))


def near_names(name: str, valid_names: Iterable[str]) -> list[str]:
    """Returns up to three valid names that are similar to `name`, the most similar
    first.

    If `name` is itself valid, the result is [name].
    """
    names = list(valid_names)
    if name in names:
        return [name]
    return difflib.get_close_matches(name, names, n=3, cutoff=_MIN_SIMILARITY)


def did_you_mean(names: Sequence[str]) -> str:
    """Returns " (did you mean --x or --y?)", or an empty string without names."""
    return f" (did you mean {' or '.join(names)}?)" if names else ""
