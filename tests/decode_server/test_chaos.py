"""Random workloads under random faults: hung and failing READs, aborts, leases that run out.

Whatever comes, each request has its terminal events, every token is the continuation of its own
prompt, and in the end every block is home.
"""

import random
import threading

import pytest

from decode_server.role import QuarantineOverflow
from kvcache.transfer.pull import PullSettings
from protocol import kv_params
from protocol.messages import AbortRequest, ReleaseRemote
from tests.decode_server.pair import Pair
from tests.engine.shadow import VOCAB, add, expected_output


class _Chaos:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.pair = Pair(
            depth=pick([0, 1]),
            p_block_size=pick([2, 4, 8]),
            d_block_size=pick([2, 3, 4]),
            p_order=pick(["BHLCND", "LCBNHD"]),
            lease_s=pick([5.0, 30.0]),
            settings=PullSettings(
                pull_timeout_s=pick([0.03, 0.2, 5.0]),
                drain_grace_s=0.01,
                fence_timeout_s=2.0,
                release_delay_s=pick([0.001, 0.02]),
            ),
            quarantine_timeout_s=0.5,
        )
        self.stems = [[self._token() for _ in range(30)] for _ in range(3)]
        self.asked: dict[str, tuple[list[int], int, int]] = {}  # prompt, max_tokens, choices
        self.aborted: set[str] = set()

    def run(self) -> None:
        for _ in range(self.random.randrange(20, 70)):
            self._event()
            self.pair.p.core.check_integrity()
            self.pair.d.core.check_integrity()
        self.pair.d.agent.resume()
        for name in self.asked:
            self._check(name)
        self.pair.now_s += 1e6
        self.pair.settle()

    def close(self) -> None:
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
            pair.d.agent.resume()
        elif dice < 0.73:
            pair.d.agent.fail(self.random.randrange(1, 3))
        elif dice < 0.77:
            pair.now_s += self.random.choice([1.0, 10.0, 1e4])
        else:
            for _ in range(self.random.randrange(1, 6)):
                pair.p.core.round([])
                pair.d.core.round([])
                threading.Event().wait(self.random.choice([0.0, 0.005]))  # the threads' turn

    def _ask(self) -> None:
        stem = self.random.choice(self.stems)
        prompt = stem[: self.random.randrange(1, 30)]
        prompt += [self._token() for _ in range(self.random.randrange(5))]
        max_tokens, choices = self.random.randrange(1, 12), self.random.choice([1, 1, 1, 2, 3])
        if self.random.random() < 0.2:
            name = f"local{len(self.asked)}"
            self.pair.d.core.round([add(name, prompt, max_tokens, num_choices=choices)])
        else:
            params = self.pair.prefill(prompt, num_choices=choices)
            if self.random.random() < 0.1:  # as of a request that was refused
                reference = kv_params.to_remote_prefill(kv_params.parse(params))
                self.pair.d.core.round([ReleaseRemote(reference)])
            name = self.pair.ask(prompt, params, max_tokens, num_choices=choices)
        self.asked[name] = prompt, max_tokens, choices

    def _check(self, name: str) -> None:
        prompt, max_tokens, choices = self.asked[name]
        out = self.pair.d.out
        self.pair.until(
            lambda: (
                len(out.terminals(name)) >= choices or any(end.error for end in out.terminals(name))
            )
        )
        *before, last = out.terminals(name)
        assert all(end.error is None for end in before)
        if last.error is not None:
            assert last.error.code == "overloaded", last.error
            return
        assert len(before) + 1 == choices
        for choice in range(choices):
            tokens = out.tokens(name, choice)
            expected = expected_output(prompt, max_tokens, choice=choice)
            assert tokens == expected[: len(tokens)]
            assert name in self.aborted or len(tokens) == max_tokens


def _run(seed: int) -> None:
    chaos = _Chaos(seed)
    try:
        chaos.run()
    except QuarantineOverflow:
        pass  # more of the pool hangs than an engine goes on with
    finally:
        chaos.close()


@pytest.mark.parametrize("seed", range(12))
def test_faults_change_no_answer_and_keep_no_block(seed: int) -> None:
    _run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_faults_change_no_answer_in_many_draws(seed: int) -> None:
    _run(seed)
