"""Random workloads on two engines and their store, under random faults.

Blocks are evicted in both tiers, requests are aborted, READs hang and fail, engines and
the store are killed, and some engines speculate. Each request nevertheless ends once,
every token continues its own prompt, the store publishes no KV of other tokens, and all
blocks are free in the end.
"""

import random
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from kvcache.groups import KVGroups
from kvcache.transfer.pulls.messages import PullSettings
from protocol.messages import AbortRequest, ResumedChoice
from tests.rigs.drafters import RandomDrafter, VerifyEverything
from tests.rigs.engines import COMPAT, Engine, WindowedEngine
from tests.rigs.shadow import VOCAB, expected_output, windowed_output
from tests.rigs.stores import Store, TieredGroup

WINDOWS = [KVGroups((None, 6, 6)), KVGroups((7,)), KVGroups((None, 2, 9))]
# Pulls that take longer than this timeout have failed, or hang.
SETTINGS = PullSettings(pull_timeout_s=0.2, drain_grace_s=0.01, fence_timeout_s=2.0)


class TierChaos:
    """A random workload on two engines with a store."""

    def __init__(self, seed: int, groups: KVGroups | None = None) -> None:
        self.random = random.Random(seed)
        self.groups = groups
        self.now_s = 1000.0  # the clock of all leases
        self.store_options: dict[str, Any] = {
            "block_size": self.random.choice([2, 3, 4, 8]),
            "num_blocks": self.random.choice([24, 40, 200]) * (6 if groups else 1),
            "max_model_len": 48,
            "settings": SETTINGS,
            "clock": self.clock,
            "kv_verify": self.random.choice(["off", "all"]),
        }
        if groups:
            record = replace(
                COMPAT, num_layers=2 * groups.count, kv_windows=groups.to_wire()
            )
            self.store_options |= {"compat": record, "group_layers": 2}
        self.group = TieredGroup(Store(**self.store_options))
        self.group.engines = [self.make_engine() for _ in range(2)]
        self.prefixes = [
            [self.random.randrange(VOCAB) for _ in range(30)] for _ in range(3)
        ]
        # By request name: the engine, prompt, and numbers of tokens and resumed tokens.
        self.requests: dict[str, tuple[Engine, list[int], int, int]] = {}
        self.aborted: set[str] = set()
        self.num_promoted = 0.0
        self.num_accepted = 0  # proposals

    def clock(self) -> float:
        return self.now_s

    def make_engine(self) -> Engine:
        pick = self.random.choice
        options: dict[str, Any] = {
            "block_size": pick([2, 4, 8]),
            "order": pick(["BHLCND", "LCBNHD"]),
            "num_blocks": pick([26, 60]) * (6 if self.groups else 1),
            "max_model_len": 48,
            "depth": pick([0, 1]),
            "settings": SETTINGS,
            "lease_clock": self.clock,
            "quarantine_timeout_s": 0.5,
            "verify": pick(["off", "all"]),
            "store_link": self.group.store.link(),
        }
        if self.groups:
            return WindowedEngine(self.groups, **options)
        if pick([False, True]):
            # KV of rejected proposals is in blocks that later become full and demoted.
            drafter = RandomDrafter(0.7, random.Random(self.random.random()))
            options |= {"drafters": [drafter], "policy": VerifyEverything()}
        return Engine(**options)

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.do_random_event()
            for engine in self.group.engines:
                engine.core.scheduler.check_integrity()
            self.group.store.region.check_integrity()
        self.resume()
        for name in self.requests:
            self.check_answer(name)
        # Leases for stores and engines that were killed expire.
        self.now_s += 1000.0
        self.group.settle()
        if self.groups is None:
            self.group.store.check_content()
        for engine in self.group.engines:
            self.count_promoted(engine)

    def count_promoted(self, engine: Engine) -> None:
        self.num_promoted += engine.stat("baton_kv_pulled_tokens", source="host")

    def do_random_event(self) -> None:
        group = self.group
        pick = self.random.choice
        dice = self.random.random()
        if dice < 0.35:
            self.send_request()
        elif dice < 0.42 and self.requests:
            name = pick(list(self.requests))
            self.requests[name][0].core.round([AbortRequest(name)])
            self.aborted.add(name)
        elif dice < 0.5:
            allocator = pick(group.engines).core.scheduler.allocator
            allocator.release(allocator.allocate(allocator.num_available))
        elif dice < 0.54:
            group.store.stall()
        elif dice < 0.6:
            self.resume()
        elif dice < 0.64:
            pick(group.store.agents).fail(self.random.randrange(1, 3))
        elif dice < 0.66:
            pick(group.engines).movers.fail(1)
        elif dice < 0.68:
            self.kill_engine()
        elif dice < 0.7:
            self.replace_store()
        elif dice < 0.73:
            self.now_s += pick([1.0, 6.0, 100.0])
        else:
            for _ in range(self.random.randrange(1, 8)):
                group.round()
                group.store.region.poll()
                # The other threads run during this wait.
                threading.Event().wait(pick([0.0, 0.005]))

    def resume(self) -> None:
        self.group.store.resume()
        for engine in self.group.engines:
            engine.movers.resume()

    def send_request(self) -> None:
        prompt = self.random.choice(self.prefixes)[: self.random.randrange(1, 30)]
        prompt = prompt + [
            self.random.randrange(VOCAB) for _ in range(self.random.randrange(4))
        ]
        num_tokens = self.random.randrange(2, 12)
        num_resumed = self.random.choice([0, 0, 0, 1, num_tokens - 1])
        members: dict[str, Any] = {}
        if num_resumed:
            resumed = self.expected(prompt, num_resumed)
            members["resumed_choices"] = [ResumedChoice(resumed)]
        engine = self.random.choice(self.group.engines)
        if self.random.random() < 0.2:
            members["hint"] = self.random.choice(self.group.engines).hint(40)
        name = self.group.begin(engine, prompt, num_tokens, **members)
        self.requests[name] = (engine, prompt, num_tokens, num_resumed)

    def kill_engine(self) -> None:
        engine = self.random.choice(self.group.engines)
        self.count_promoted(engine)
        self.group.replace(engine, self.make_engine())
        self.requests = {
            name: request
            for name, request in self.requests.items()
            if request[0] is not engine
        }

    def replace_store(self) -> None:
        store = self.group.store
        for engine in self.group.engines:
            engine.store_link.region = None
        store.close()
        self.group.store = Store(**self.store_options)
        for engine in self.group.engines:
            engine.store_link.region = self.group.store.link().region

    def expected(self, prompt: list[int], num_tokens: int) -> list[int]:
        if self.groups:
            return windowed_output(prompt, num_tokens, self.groups)
        return expected_output(prompt, num_tokens)

    def check_answer(self, name: str) -> None:
        engine, prompt, num_tokens, num_resumed = self.requests[name]
        end = self.group.end_of(engine, name)
        assert end.error is None or end.error.code == "overloaded", end
        tokens = engine.out.tokens(name)
        expected = self.expected(prompt, num_tokens)[num_resumed:]
        self.num_accepted += end.accepted_tokens
        is_complete = end.error is None and name not in self.aborted
        assert tokens == (expected if is_complete else expected[: len(tokens)])

    def close(self) -> None:
        self.resume()
        self.group.close()


RUNS: list[Any] = [
    *({"seed": seed} for seed in range(2)),
    *(pytest.param({"seed": seed}, marks=pytest.mark.slow) for seed in range(2, 60)),
    *(
        pytest.param({"seed": seed, "groups": WINDOWS[seed % 3]}, marks=slow)
        for seed, slow in (
            (0, ()), *((seed, pytest.mark.slow) for seed in range(1, 30))
        )
    ),
]  # fmt: skip


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", RUNS, ids=str)
def test_faults_of_two_tiers_change_no_answer_and_leak_no_block(options):
    chaos = TierChaos(**options)
    try:
        chaos.run(num_events=60)
        assert chaos.requests
    finally:
        chaos.close()


@pytest.mark.slow
def test_random_workloads_do_promote_kv_and_accept_proposals():
    """Without promotions and accepted proposals, TierChaos would test too little."""
    num_promoted = 0.0
    num_accepted = 0
    for seed in range(6):
        chaos = TierChaos(seed)
        try:
            chaos.run(num_events=60)
        finally:
            chaos.close()
        num_promoted += chaos.num_promoted
        num_accepted += chaos.num_accepted
    assert num_promoted > 30 and num_accepted > 5
