"""How many examples property tests draw."""

from typing import Any

import hypothesis

_SHARE = 3


def examples(count: int, **options: Any) -> hypothesis.settings:
    """So many in `make test-all`, which draws new ones; a third of them in `make test`,
    which draws the same ones each time.
    """
    if (
        hypothesis.settings.default is not None
        and hypothesis.settings.default.derandomize
    ):
        count = -(-count // _SHARE)
    return hypothesis.settings(deadline=None, max_examples=count, **options)
