"""Random workloads under random faults: hung and failing READs, aborts, leases that run out, a
prefill server that is started again.

Whatever comes, each request has its terminal events, every token is the continuation of its own
prompt, and in the end every block is home.
"""

import random
import sys
import threading
from collections.abc import Iterator

import pytest

from kvcache.transfer.pulls.messages import PullSettings
from protocol import kv_params
from protocol.messages import AbortRequest, ReleaseRemote
from tests.rigs.engine_pair import Pair
from tests.rigs.shadow import VOCAB, add, expected_output


class Chaos:
    def __init__(
        self,
        seed: int,
        stays_hung: bool = False,
        dcp: int = 1,
        launch_bytes: int | None = None,
    ) -> None:
        self.stays_hung = stays_hung
        self.random = random.Random(seed)
        pick = self.random.choice
        p_sizes, d_sizes = [2, 4, 8], [2, 3, 4]
        if dcp > 1:  # P's blocks divide D's
            p_sizes, d_sizes = [2], [2, 4, 8]
        self.pair = Pair(
            depth=pick([0, 1]),
            p_block_size=pick(p_sizes),
            d_block_size=pick(d_sizes),
            p_order=pick(["BHLCND", "LCBNHD"]),
            lease_s=pick([5.0, 30.0]),
            settings=PullSettings(
                pull_timeout_s=0.03 if stays_hung else pick([0.03, 0.2, 5.0]),
                drain_grace_s=0.01,
                fence_timeout_s=2.0,
            ),
            quarantine_timeout_s=0.5,
            dcp=dcp,
            launch_bytes=launch_bytes,
            rng=self.random,
        )
        self.series = self.pair.d.core.stats().keys()
        self.stems = [[self._token() for _ in range(30)] for _ in range(3)]
        self.asked: dict[str, tuple[list[int], int, int]] = {}  # prompt, max_tokens, choices
        self.aborted: set[str] = set()

    def run(self) -> None:
        for _ in range(self.random.randrange(20, 70)):
            self._event()
            self.pair.p.core.scheduler.check_integrity()
            self.pair.d.core.scheduler.check_integrity()
        if not self.stays_hung:
            self.pair.d.agent.resume()
        for name in self.asked:
            self._check(name)
        self.pair.d.agent.resume()
        self.pair.settle()  # nothing has to expire for that

    def close(self) -> None:
        assert self.pair.d.core.stats().keys() == self.series  # as they were before any event
        self.pair.d.agent.resume()
        self.pair.close()

    def _token(self) -> int:
        return self.random.randrange(VOCAB)

    def _event(self) -> None:
        pair, dice = self.pair, self.random.random()
        if dice < 0.4:
            self._ask()
        elif dice < 0.55 and self.asked:
            name = self.random.choice(list(self.asked))
            pair.d.core.round([AbortRequest(name)])
            self.aborted.add(name)
        elif dice < 0.6:
            pair.d.agent.stall()
        elif dice < 0.68:
            if not self.stays_hung:
                pair.d.agent.resume()
        elif dice < 0.73:
            pair.d.agent.fail(self.random.randrange(1, 3))
        elif dice < 0.75:
            pair.restart_prefill()
        elif dice < 0.79:
            pair.now_s += self.random.choice([1.0, 10.0, 1e4])
        else:
            for _ in range(self.random.randrange(1, 6)):
                pair.p.core.round([])
                pair.d.core.round([])
                threading.Event().wait(self.random.choice([0.0, 0.005]))  # the threads' turn

    def _prompt(self) -> list[int]:
        stem = self.random.choice(self.stems)
        prompt = stem[: self.random.randrange(1, 30)]
        return prompt + [self._token() for _ in range(self.random.randrange(5))]

    def _ask(self) -> None:
        prompt = self._prompt()
        max_tokens, choices = self.random.randrange(1, 12), self.random.choice([1, 1, 1, 2, 3])
        if self.random.random() < 0.2:
            name = f"local{len(self.asked)}"
            self.pair.d.core.round([add(name, prompt, max_tokens, num_choices=choices)])
        else:
            if self.pair.p.core.scheduler.allocator.num_available < 20:
                self.pair.now_s += 1e4  # leases of READs that hang end by P's clock alone
            params = self.pair.prefill(prompt, num_choices=choices)
            if self.random.random() < 0.1:  # as of a request that was refused
                reference = kv_params.to_remote_prefill(kv_params.parse(params))
                self.pair.d.core.round([ReleaseRemote(reference)])
            name = self.pair.ask(prompt, params, max_tokens, num_choices=choices)
        self.asked[name] = prompt, max_tokens, choices

    def _check(self, name: str) -> None:
        _, max_tokens, choices = self.asked[name]
        out = self.pair.d.out
        self.pair.until(
            lambda: (
                len(out.terminals(name)) >= choices or any(end.error for end in out.terminals(name))
            )
        )
        self._check_told(name)
        *before, last = out.terminals(name)
        assert all(end.error is None for end in before)
        if last.error is not None:
            return
        assert len(before) + 1 == choices
        if name not in self.aborted:
            told = [len(out.tokens(name, choice)) for choice in range(choices)]
            assert told == [max_tokens] * choices

    def _check_told(self, name: str) -> None:
        """What the client has by now, whether or not that is all."""
        prompt, max_tokens, choices = self.asked[name]
        out = self.pair.d.out
        ends = out.terminals(name)
        assert len(ends) <= choices
        assert all(end.error is None or end.error.code == "overloaded" for end in ends), ends
        for choice in range(choices):
            tokens = out.tokens(name, choice)
            assert tokens == expected_output(prompt, max_tokens, choice=choice)[: len(tokens)]


def _run(seed: int, dcp: int = 1) -> None:
    chaos = Chaos(seed, dcp=dcp)
    try:
        chaos.run()
    finally:
        chaos.close()


@pytest.mark.parametrize("seed", range(12))
def test_faults_change_no_answer_and_keep_no_block(seed: int) -> None:
    _run(seed)


@pytest.mark.parametrize("dcp", [2, 3, 4])
def test_faults_change_no_answer_where_ranks_share_tokens(dcp: int) -> None:
    _run(dcp, dcp)


@pytest.mark.parametrize("seed", range(3))
def test_reads_that_hang_for_ever_leave_room_for_all_that_comes(seed: int) -> None:
    chaos = Chaos(seed, stays_hung=True)
    chaos.pair.d.agent.stall()
    try:
        chaos.run()
    finally:
        chaos.close()


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
    chaos = Chaos(seed, launch_bytes=1 if seed % 2 else 1 << 30)
    try:
        chaos.run()
        assert chaos.pair.workers[0].counters["internal_errors"] == 0
    finally:
        chaos.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_faults_change_no_answer_in_many_draws(seed: int) -> None:
    _run(seed, max(1, seed % 8 - 3))
