"""In-process pairs, closed at the end of their test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rigs.engine_pair import Pair


@pytest.fixture(params=[0, 1], ids=["synchronous", "ahead"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        pairs.append(Pair(depth=request.param, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


MakePair = Callable[..., Pair]
