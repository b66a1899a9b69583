"""Hooks for tests that need GPUs. Without a GPU, these tests are skipped with a reason.

Warnings are not errors in these tests, because FlashInfer and triton emit some when
they are imported and when they compile. parallel.py runs the tests in shards:
BATON_TEST_SHARD=I/N selects every Nth test, starting with test I (counted from 0).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)  # runs after -m has selected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    index, _, num_shards = os.environ.get("BATON_TEST_SHARD", "0/1").partition("/")
    items[:] = items[int(index) :: int(num_shards)]
    reason = _skip_reason()
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _skip_reason() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"needs flashinfer: {error}"
    return None


@pytest.fixture
def to_close() -> Iterator[list[Any]]:
    """Yields a list to which a test adds objects. After the test, the objects are
    closed in reverse order.
    """
    objects: list[Any] = []
    yield objects
    for each in reversed(objects):
        each.close()
