"""How many processes share the tests where pytest-xdist is told `-n auto`, as the Makefile does."""

import pytest

from protocol.cores import available_cores

_MOST = 4  # each starts servers of its own, and torch in every one of them takes its memory


@pytest.hookimpl(optionalhook=True)  # GPU machines run part of the tests without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    return min(available_cores(), _MOST)
