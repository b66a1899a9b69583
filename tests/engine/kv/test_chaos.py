"""Random workloads under random faults.

READs hang or fail, requests are aborted, leases expire, and the prefill server
restarts. Each request nevertheless gets its terminal events, every token continues its
own prompt, and all blocks are free in the end.
"""

import random
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from engine.core.sequence import Phase
from kvcache.groups import KVGroups
from kvcache.transfer.pulls.messages import PullSettings
from protocol import kv_params
from protocol.messages import AbortRequest, ReleaseRemote, SamplingParams
from tests.rigs.engine_pair import Pair
from tests.rigs.engines import Engine, WindowedEngine
from tests.rigs.shadow import (
    VOCAB,
    add,
    expected_output,
    expected_scores,
    windowed_output,
)

SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=2.0, min_tokens=3),
]


# D has few blocks, and few tokens in a step. P has enough blocks even while stalled
# pulls keep many of them leased.
SMALL = {
    "num_blocks": 17,
    "p_num_blocks": 400,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 7,
}
SMALL["max_model_len"] = 30


class Chaos:
    """A random workload on a pair of engines, with random faults.

    Args:
        stays_hung: whether READs hang until all requests have ended.
    """

    def __init__(
        self,
        seed: int,
        stays_hung: bool = False,
        dcp: int = 1,
        launch_bytes: int | None = None,
        groups: KVGroups | None = None,
        **sizes: int,
    ) -> None:
        self.stays_hung = stays_hung
        self.groups = groups
        self.random = random.Random(seed)
        pick = self.random.choice
        p_sizes = [2, 4, 8]
        d_sizes = [2, 3, 4]
        if dcp > 1:  # P's block size must divide D's block size
            p_sizes = [2]
            d_sizes = [2, 4, 8]
        pull_s = 0.03 if stays_hung else pick([0.03, 0.2, 5.0])
        pull_settings = PullSettings(
            pull_timeout_s=pull_s, drain_grace_s=0.01, fence_timeout_s=2.0
        )
        self.pair = Pair(
            make=partial(WindowedEngine, groups) if groups else Engine,
            depth=pick([0, 1]),
            p_block_size=pick(p_sizes),
            block_size=pick(d_sizes),
            p_order=pick(["BHLCND", "LCBNHD"]),
            lease_s=pick([5.0, 30.0]),
            settings=pull_settings,
            quarantine_timeout_s=0.5,
            dcp=dcp,
            launch_bytes=launch_bytes,
            rng=self.random,
            **sizes,
        )
        self.series = self.pair.d.core.stats().keys()
        self.shared_prefixes = [
            [self._random_token() for _ in range(30)] for _ in range(3)
        ]
        self.max_len = sizes.get("max_model_len", 64)
        # The prompt, max_tokens and other fields of each request, by its name on D.
        self.requests: dict[str, tuple[list[int], int, dict[str, Any]]] = {}
        self.aborted: set[str] = set()
        # For requests that both engines get concurrently: their names on P, by name on
        # D.
        self.p_names: dict[str, str] = {}

    def lose_a_lease(self) -> None:
        """Lets a lease expire while READs hang. P reuses the blocks before the READs
        continue. The hanging READs delay no other request.
        """
        pair = self.pair
        config = pair.d.config
        # With this length, every rank has tokens of the prompt to read.
        num_tokens = 14 + config.block_size * (config.dcp - 1)
        prompt = [self._random_token() for _ in range(num_tokens)]
        params = pair.prefill(prompt)
        pair.d.clock.set_stopped(True)
        pair.d.movers.stall()
        name = pair.submit(prompt, params)
        pair.until(lambda: pair.d.movers.active > 0)
        pair.d.core.round([add("local", [1, 2, 3], 5)])
        assert pair.answer("local") == expected_output([1, 2, 3], 5)
        pair.now_s += 1e6
        pair.until(pair.p.has_all_blocks_free)
        assert pair.p.core.scheduler.prefix is not None
        prefix = pair.p.core.scheduler.prefix
        prefix._remove_descendants(prefix._root)
        pair.end_of(pair.p, pair.begin(pair.p, prompt[::-1], 1))
        pair.d.movers.resume()
        assert pair.answer(name) == expected_output(prompt, 6)
        pair.d.clock.set_stopped(False)

    def run(self) -> None:
        for _ in range(self.random.randrange(20, 70)):
            self._do_random_event()
            self.pair.p.core.scheduler.check_integrity()
            self.pair.d.core.scheduler.check_integrity()
        if not self.stays_hung:
            self.pair.d.movers.resume()
        for name in self.requests:
            self._check_answers(name)
        self.pair.d.movers.resume()
        for name, p_name in self.p_names.items():
            ends = self.pair.d.out.terminals(name)
            if not any(end.usage and end.usage.transferred for end in ends):
                # The proxy also aborts a prefill if no server pulls its KV.
                self.pair.p.core.round([AbortRequest(p_name)])
        self.pair.settle()  # all blocks become free, although no lease expires

    def close(self) -> None:
        # No event has added or removed a metric series.
        assert self.pair.d.core.stats().keys() == self.series
        self.pair.d.movers.resume()
        self.pair.close()

    def _random_token(self) -> int:
        return self.random.randrange(VOCAB)

    def _do_random_event(self) -> None:
        pair = self.pair
        dice = self.random.random()
        if dice < 0.4:
            self._send_request()
        elif dice < 0.55 and self.requests:
            name = self.random.choice(list(self.requests))
            pair.d.core.round(
                [AbortRequest(name, self.random.choice([None, None, 0, 1]))]
            )
            self.aborted.add(name)
        elif dice < 0.57 and self.p_names:
            p_name = self.random.choice(list(self.p_names.values()))
            pair.p.core.round([AbortRequest(p_name)])
        elif dice < 0.6:
            pair.d.movers.stall()
        elif dice < 0.68:
            if not self.stays_hung:
                pair.d.movers.resume()
        elif dice < 0.73:
            pair.d.movers.fail(self.random.randrange(1, 3))
        elif dice < 0.75:
            pair.restart_prefill()
        elif dice < 0.79:
            pair.now_s += self.random.choice([1.0, 10.0, 1e4])
        else:
            for _ in range(self.random.randrange(1, 6)):
                pair.p.core.round([])
                pair.d.core.round([])
                # The other threads run during this wait.
                threading.Event().wait(self.random.choice([0.0, 0.005]))

    def _random_prompt(self) -> list[int]:
        prefix = self.random.choice(self.shared_prefixes)
        prompt = prefix[
            : self.random.randrange(1, self.max_len - 15 if self.max_len < 64 else 30)
        ]
        return prompt + [self._random_token() for _ in range(self.random.randrange(5))]

    def _send_request(self) -> None:
        prompt = self._random_prompt()
        max_tokens = self.random.randrange(1, 12)
        pick = self.random.choice
        request_fields = {
            "num_choices": pick([1, 1, 1, 2, 3]),
            "num_prompt_logprobs": pick([None, None, None, 0, 2]),
            "stop_token_ids": self.random.choices(range(VOCAB), k=pick([0, 0, 3, 6])),
            "sampling": pick(SAMPLING),
        }
        if self.groups:  # WindowedEngine lacks penalties and prompt logprobs
            request_fields |= {"num_prompt_logprobs": None, "sampling": SAMPLING[0]}
        if self.random.random() < 0.2:
            name = f"local{len(self.requests)}"
            self.pair.d.core.round([add(name, prompt, max_tokens, **request_fields)])
        else:
            if self.pair.p.core.scheduler.allocator.num_available < 20:
                # Leases of hanging READs end only when P's clock advances.
                self.pair.now_s += 1e4
            if (
                request_fields["num_prompt_logprobs"] is None
                and self.random.random() < 0.5
            ):
                order = pick(["pd", "dp", "pd", "dp", "p", "d"])
                p_name, name = self.pair.submit_to_both(
                    prompt, max_tokens, order=order, **request_fields
                )
                self.p_names[name] = p_name
                self.requests[name] = prompt, max_tokens, request_fields
                if order == "p":  # D never receives the request
                    del self.requests[name]
                return
            params = self.pair.prefill(prompt, **request_fields)
            if self.random.random() < 0.1:  # as if D had refused the decode leg
                reference = kv_params.to_remote_prefill(kv_params.parse(params))
                self.pair.d.core.round([ReleaseRemote(reference)])
            name = self.pair.submit(prompt, params, max_tokens, **request_fields)
        self.requests[name] = prompt, max_tokens, request_fields

    def _check_answers(self, name: str) -> None:
        out = self.pair.d.out
        choices = self.requests[name][2]["num_choices"]
        self.pair.until(lambda: self._has_ended(name))
        ends = out.terminals(name)
        assert len(ends) <= choices
        assert all(
            end.error is None or end.error.code == "overloaded" for end in ends
        ), ends
        *before, last = ends
        assert all(end.error is None for end in before)
        assert last.error is not None or len(ends) == choices
        is_complete = last.error is None and name not in self.aborted
        self._check_output(name, is_complete=is_complete)

    def _has_ended(self, name: str) -> bool:
        sequence = self.pair.d.core.sequences.get(name)
        if sequence is not None and sequence.phase is Phase.NEW:
            # P may never get this request. The offer to D ends only if P's clock
            # advances.
            self.pair.now_s += 0.5
        ends = self.pair.d.out.terminals(name)
        return len(ends) >= self.requests[name][2]["num_choices"] or any(
            end.error for end in ends
        )

    def _check_output(self, name: str, *, is_complete: bool) -> None:
        """Checks that the output so far equals the expected output. If not
        `is_complete`, it may also be a prefix of the expected output.
        """
        prompt, max_tokens, request_fields = self.requests[name]
        out = self.pair.d.out
        num_top = request_fields["num_prompt_logprobs"]
        limit = min(max_tokens, self.max_len - len(prompt))
        stop = request_fields["stop_token_ids"]
        min_tokens = request_fields["sampling"].min_tokens
        for choice in range(request_fields["num_choices"]):
            tokens = out.tokens(name, choice)
            expected = expected_output(prompt, limit, stop, choice, min_tokens)
            if self.groups:
                unstopped = windowed_output(prompt, limit, self.groups, choice)
                ends = [num for num, token in enumerate(unstopped, 1) if token in stop]
                expected = unstopped[: ends[0] if ends else limit]
            assert tokens == (expected if is_complete else expected[: len(tokens)])
        scores = [] if num_top is None else expected_scores(prompt, num_top)
        logprobs = out.prompt_logprobs(name)
        assert logprobs == (scores if is_complete else scores[: len(logprobs)])


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Makes Python switch between threads far more often than by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _run_workload(seed: int, **options: Any) -> int:
    """Runs a random workload and checks all answers. Returns the number of requests."""
    chaos = Chaos(seed, **options)
    try:
        if chaos.stays_hung:
            chaos.pair.d.movers.stall()
        # With placers, READs complete immediately, so none of them can hang.
        elif not (chaos.groups or chaos.pair.d.movers.placers):
            chaos.lose_a_lease()
        chaos.run()
        for worker, placer in zip(
            chaos.pair.workers, chaos.pair.d.movers.placers, strict=False
        ):
            assert worker.counters["internal_errors"] == placer.num_failed
    finally:
        chaos.close()
    return len(chaos.requests)


RUNS: list[Any] = [
    *({"seed": seed} for seed in range(12)),
    *({"seed": seed, **SMALL} for seed in range(8)),
    # The ranks of D share the tokens of a sequence.
    *({"seed": seed, "dcp": dcp} for seed, dcp in ((2, 2), (3, 3), (22, 4))),
    # READs hang until the end of the test.
    *({"seed": seed, "stays_hung": True} for seed in range(3)),
    *(pytest.param({"seed": seed, "dcp": max(1, seed % 8 - 3)}, marks=pytest.mark.slow)
      for seed in range(100, 300)),
]  # fmt: skip


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_faults_change_no_answer_and_leak_no_block(options):
    assert _run_workload(**options) > 0


WINDOWS = [KVGroups((None, 6, 6)), KVGroups((7,)), KVGroups((None, 2, 9))]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(6))
def test_faults_change_no_answer_of_models_with_windows(seed):
    assert _run_workload(seed, groups=WINDOWS[seed % 3], num_blocks=60) > 0


@pytest.mark.usefixtures("frequent_thread_switches")
@pytest.mark.parametrize("seed", range(4))
def test_faults_change_no_answer_when_memory_is_mapped(seed):
    assert _run_workload(seed, launch_bytes=1 if seed % 2 else 1 << 30) > 0
