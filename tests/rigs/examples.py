"""The number of examples that property-based tests draw."""

from typing import Any

import hypothesis

_REPEATABLE_DIVISOR = 3


def examples(count: int, **options: Any) -> hypothesis.settings:
    """Return Hypothesis settings with `count` examples for `make test-all`, and a third
    as many for `make test`.

    `make test-all` draws new examples each time. `make test` always draws the same
    examples.
    """
    default = hypothesis.settings.default
    if default is not None and default.derandomize:
        count = -(-count // _REPEATABLE_DIVISOR)
    return hypothesis.settings(deadline=None, max_examples=count, **options)
