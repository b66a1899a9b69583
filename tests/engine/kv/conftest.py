"""Pairs and groups of engines in one process. After a test, all blocks must be free."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.rigs.engine_pair import Pair
from tests.rigs.engines import Engine, Group

MakePair = Callable[..., Pair]


@pytest.fixture(params=[0, 1], ids=["synchronous", "ahead"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[MakePair]:
    with ExitStack() as stack:

        def make(**options: Any) -> Pair:
            pair = stack.enter_context(Pair(depth=request.param, **options))
            # Hanging READs must end, because their leases never expire: P's clock does
            # not advance.
            stack.callback(pair.d.movers.resume)
            return pair

        yield make


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()


@pytest.fixture
def make_group() -> Iterator[Callable[..., Group]]:
    with ExitStack() as stack:

        def group(*options: dict[str, Any]) -> Group:
            return stack.enter_context(Group(*(Engine(**each) for each in options)))

        yield group
