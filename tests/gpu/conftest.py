"""Tests that need GPUs: skipped, with the reason, where there are none.

FlashInfer and triton warn of their own affairs when they are imported and compiled, so warnings
are not errors here. parallel.py runs them in shards: BATON_TEST_SHARD=I/N keeps every Nth test.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    index, _, num_shards = os.environ.get("BATON_TEST_SHARD", "0/1").partition("/")
    items[:] = items[int(index) :: int(num_shards)]
    reason = _missing()
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"needs flashinfer: {error}"
    return None


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """What a test puts here is closed at its end, the last first."""
    sides: list[Any] = []
    yield sides
    for side in reversed(sides):
        side.close()
