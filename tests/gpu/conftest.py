"""Tests that need GPUs; machines without a GPU skip them with the reason.

Imports and compilations of FlashInfer and triton emit warnings, so warnings are not
errors here. parallel.py runs the tests in shards: BATON_TEST_SHARD=I/N selects every
Nth test.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)  # after -m has selected tests
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
def made() -> Iterator[list[Any]]:
    """A list of objects that are closed at the end of the test, in reverse order."""
    objects: list[Any] = []
    yield objects
    for each in reversed(objects):
        each.close()
