"""As test_chaos.py, where D copies out of P's mapped memory."""

import sys
from collections.abc import Iterator
from functools import partial

import pytest

from tests.decode_server.test_chaos import Chaos
from tests.rigs.mapped_engine_pair import MappedPair


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("seed", range(4))
def test_faults_change_no_answer_where_memory_is_mapped(seed: int) -> None:
    chaos = Chaos(seed, make=partial(MappedPair, 1 if seed % 2 else 1 << 30))
    try:
        chaos.run()
        assert chaos.pair.worker.counters["internal_errors"] == 0
    finally:
        chaos.close()
