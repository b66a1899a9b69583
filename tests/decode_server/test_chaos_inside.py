"""As test_chaos.py, with an engine whose own thread begins and drives pulls while it is idle, and
with READs that begin before their plans: out of step with the worker's thread as they may be."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvcache.transfer import plan, whole_blocks
from kvcache.transfer.pull_worker import PullWorker
from tests.decode_server.inside_pair import InsidePair
from tests.decode_server.test_chaos import Chaos

_BLOCK = 4  # of both sides, where whole blocks are pulled


class _Inside(Chaos):
    def __init__(self, seed: int, moves: str, *, whole: bool) -> None:
        self._whole = whole
        super().__init__(seed, make=partial(self._make, moves=moves))

    def _make(self, **options: Any) -> InsidePair:
        if self._whole:
            options |= {"p_block_size": _BLOCK, "d_block_size": _BLOCK}
            options |= {"p_order": "BHLCND", "d_order": "BHLCND"}
        return InsidePair(self.random, **options)

    def _prompt(self) -> list[int]:
        """Mostly asked for when D has nothing else to do."""
        if self.random.random() < 0.7:
            self.pair.d.agent.resume()
            self.pair.until(lambda: self.pair.d.core.is_idle)
        prompt = super()._prompt()
        if self._whole:
            prompt += [self._token() for _ in range(-len(prompt) % _BLOCK)]
        return prompt


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("seed", range(4))
def test_faults_change_no_answer_where_the_engine_drives_its_pulls(seed: int) -> None:
    chaos = _Inside(seed, "mapped", whole=False)
    try:
        chaos.run()
        assert threading.get_ident() in chaos.pair.mapper.threads
        assert chaos.pair.worker.counters["internal_errors"] == 0
    finally:
        chaos.close()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_faults_change_no_answer_where_reads_begin_before_their_plans(
    monkeypatch: pytest.MonkeyPatch, seed: int, whole: bool
) -> None:
    opened: Counter[bool] = Counter()
    open_, long = PullWorker._open, 1 if whole else plan._LONG_RUN_BYTES

    def counted(self: Any, *args: Any) -> Any:
        found = open_(self, *args)
        if found is not None:
            opened[found.opening.is_staged] += 1
        return found

    monkeypatch.setattr(PullWorker, "_open", counted)
    monkeypatch.setattr(plan, "_LONG_RUN_BYTES", long)
    monkeypatch.setattr(whole_blocks, "_FIRST_BLOCKS", 1 + seed)
    chaos = _Inside(seed, "opened", whole=whole)
    try:
        chaos.run()
        assert opened[False] > 0 if whole else opened[False] == 0
        assert chaos.pair.worker.counters["internal_errors"] == 0
    finally:
        chaos.close()
