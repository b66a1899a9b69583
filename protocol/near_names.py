"""Near matches of a name that means nothing, for error messages."""

import difflib
from collections.abc import Iterable


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """ " (did you mean --x?)", or an empty string when nothing is near."""
    near = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
