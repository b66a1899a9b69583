"""Near matches of a name that means nothing, for error messages."""

import difflib
from collections.abc import Iterable, Sequence


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """ " (did you mean --x?)", or an empty string when nothing is near."""
    return did_you_mean(difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6))


def did_you_mean(near: Sequence[str]) -> str:
    """ " (did you mean --x or --y?)", or an empty string for none."""
    return f" (did you mean {' or '.join(near)}?)" if near else ""
