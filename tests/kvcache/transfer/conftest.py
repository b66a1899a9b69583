"""Fixtures for tests of pulls."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ports import reserved_ports
from tests.rigs.memory_agent import MemoryAgent


@pytest.fixture
def rig() -> Iterator[Callable[..., Any]]:
    """A function that makes prefill and decode sides, which are closed after the test.

    The sides use MemoryAgent unless the test passes a different agent.
    """
    objects: list[Any] = []

    def make(kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
        objects.append(kind(*(args or (MemoryAgent,)), **options))
        return objects[-1]

    yield make
    for side in reversed(objects):
        side.close()


@pytest.fixture
def port() -> Iterator[int]:
    """A port that stays reserved, so that a prefill side and its successor can both use
    it.
    """
    with reserved_ports(1) as (port,):
        yield port
