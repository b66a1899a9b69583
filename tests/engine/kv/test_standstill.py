"""Engines with few blocks that lend to each other: whoever waits for blocks waits for nobody who
waits for him. No lease expires here: to wait for the end of one is to wait for ever."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache.transfer.pulls.messages import PullSettings
from protocol.messages import MOVED, AbortRequest, Migrate, ResumedChoice
from tests.rigs.engines import Engine, Group
from tests.rigs.shadow import VOCAB, add, expected_output

Script = Iterator[Callable[[], object]]  # of a proxy's request: what it waits for next


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("engine.kv.stalls._DEADLOCK_S", 0.05)


class Fleet(Group):
    """Servers that take either leg, and a proxy that gives requests to any of them."""

    def __init__(self, seed: int) -> None:
        self.rng, self.num = random.Random(seed), 0
        self.of_batches = Counter[Engine]()  # blocks, as of PrefillLeg.admit
        limits: dict[str, Any] = {"settings": PullSettings(pull_timeout_s=0.5)}
        limits["lease_clock"] = lambda: 0.0
        sizes = [self.rng.randrange(18, 30) for _ in range(self.rng.choice([2, 2, 3]))]
        super().__init__(*(Engine(num_blocks=n, depth=n % 2, **limits) for n in sizes))

    def pair(self) -> list[Engine]:
        return self.rng.sample(self.engines, 2)

    def prompt(self) -> list[int]:
        return [
            self.rng.randrange(VOCAB) for _ in range(self.rng.choice([8, 16, 24, 40]))
        ]

    def complete(
        self, engine: Engine, name: str, prompt: list[int], num: int = 1, **how: Any
    ) -> None:
        priority = self.rng.choice([0, 0, 0, -1])
        engine.core.round([add(name, prompt, num, priority=priority, **how)])

    def answer(
        self, engine: Engine, name: str, prompt: list[int], num: int, n: int = 1
    ) -> Script:
        yield lambda: len(engine.out.terminals(name)) == n
        told = [engine.out.tokens(name, choice) for choice in range(n)]
        assert told == [
            expected_output(prompt, num, choice=choice) for choice in range(n)
        ]

    def in_turn(self, call: str) -> Script:
        """As many prompts as a prefill server takes together; when it has all, their streams."""
        (p, d), n = self.pair(), self.rng.choice([1, 1, 1, 2])
        prompts, num = [self.prompt() for _ in range(self.rng.choice([1, 1, 2, 4]))], 6
        taken = sum(len(prompt) for prompt in prompts) // 4
        if self.of_batches[p] + taken > p.core.scheduler.allocator.capacity // 2:
            prompts, taken = prompts[:1], 0
        self.of_batches[p] += taken
        named = [(f"{call}-{at}", prompt) for at, prompt in enumerate(prompts)]
        for name, prompt in named:
            self.complete(p, name, prompt, retain_kv=True, num_choices=n)
        yield lambda: all(len(p.out.terminals(name)) == n for name, _ in named)
        self.of_batches[p] -= taken
        for name, prompt in named:
            self.complete(
                d, f"d{name}", prompt, num, remote=p.reference(name), num_choices=n
            )
        for name, prompt in named:
            yield from self.answer(d, f"d{name}", prompt, num, n)

    def at_once(self, call: str) -> Script:
        (p, d), prompt = self.pair(), self.prompt()
        remote = p.offer(call, prompt)
        theirs: dict[str, Any] = {
            "engine": d,
            "name": f"d{call}-0",
            "num": 5,
            "remote": remote,
        }
        ours: dict[str, Any] = {"engine": p, "name": f"{call}-0", "retain_kv": True}
        ours["transfer_id"] = remote.transfer_id
        for asked in self.rng.sample([ours, theirs], 2):
            self.complete(prompt=prompt, **asked)
        yield from self.answer(d, f"d{call}-0", prompt, 5)

    def looked_up(self, call: str) -> Script:
        (a, b), prompt = self.pair(), self.prompt()
        self.complete(a, f"{call}-0", prompt, 3)
        yield from self.answer(a, f"{call}-0", prompt, 3)
        longer = [*prompt, *self.prompt()][:50]
        self.complete(b, f"d{call}-0", longer, 3, hint=a.hint(len(prompt)))
        yield from self.answer(b, f"d{call}-0", longer, 3)

    def moved(self, call: str) -> Script:
        (a, b), prompt, num = self.pair(), self.prompt(), self.rng.randrange(4, 20)
        self.complete(a, f"{call}-0", prompt, num)
        yield lambda: len(a.out.tokens(f"{call}-0")) > 1
        a.core.round([Migrate(f"{call}-0")])
        yield lambda: a.out.terminals(f"{call}-0")
        tokens = a.out.tokens(f"{call}-0")
        if a.out.terminals(f"{call}-0")[0].finish_reason == MOVED:
            known, remote = [ResumedChoice(list(tokens))], a.reference(f"{call}-0")
            self.complete(
                b, f"d{call}-0", prompt, num, remote=remote, resumed_choices=known
            )
            yield lambda: b.out.terminals(f"d{call}-0")
            tokens += b.out.tokens(f"d{call}-0")
        assert tokens == expected_output(prompt, num)

    def check_calls(self, num_calls: int) -> None:
        left: dict[Script, Callable[[], object]] = {}
        kinds = [self.in_turn, self.in_turn, self.at_once, self.looked_up, self.moved]
        for at in range(num_calls):
            script = self.rng.choice(kinds)(f"call{at}")
            left[script] = next(script)
            self.round(self.rng.choice([0, 0, 1]))
        while left:
            self.until(lambda: any(condition() for condition in left.values()))
            for script in [script for script, condition in left.items() if condition()]:
                del left[script]
                left.update(
                    (script, condition)
                    for condition in [next(script, None)]
                    if condition
                )


@pytest.mark.parametrize("seed", range(12))
def test_whoever_lends_to_whom_every_request_ends_and_every_block_comes_home(seed):
    with Fleet(seed) as fleet:
        fleet.check_calls(20)


def test_the_rest_of_a_call_goes_before_who_does_not_fit_beside_what_is_lent_of_it(
    make,
):
    p, d = (group := make({"num_blocks": 21}, {"num_blocks": 21})).engines
    prompts = [[at] * 20 for at in range(3)]
    urgent = [7] * 63
    p.core.round(
        [add(f"call-{i}", each, 1, retain_kv=True) for i, each in enumerate(prompts)]
    )
    p.core.round([add("urgent-0", urgent, 1, priority=-1)])
    group.until(lambda: all(p.out.terminals(f"call-{at}") for at in range(3)))
    assert not p.out.terminals("urgent-0")
    for at, prompt in enumerate(prompts):
        assert group.complete(d, prompt, remote=p.reference(f"call-{at}"))[1] == (
            20,
            0,
            0,
        )
    assert group.tokens_of(p, "urgent-0") == expected_output(urgent, 1)


def test_two_who_wait_for_what_is_lent_to_the_other_do_not_wait_for_the_streams_beside_them(
    make,
):
    size = {"num_blocks": 161, "block_size": 16, "max_model_len": 2000}
    a, b = (group := make(*[{**size, "max_num_batched_tokens": 1280}] * 2)).engines
    prompts = {
        a: [7] * 1280,
        b: [8] * 1280,
    }  # half of a pool each, and lent by the other engine
    for lender, prompt in ((b, prompts[a]), (a, prompts[b])):
        lender.core.round([add("prompt", prompt, 1, retain_kv=True)])
        group.end_of(lender, "prompt")
    for engine, lender in ((a, b), (b, a)):
        engine.core.round([add("stream", [9] * 80, 1000)])
        group.until(lambda engine=engine: len(engine.out.tokens("stream")) > 0)
        asked = add("asked", prompts[engine], 2, remote=lender.reference("prompt"))
        engine.core.round([asked])
    for engine in (a, b):
        assert group.tokens_of(engine, "asked") == expected_output(prompts[engine], 2)
    assert not (a.out.terminals("stream") or b.out.terminals("stream"))
    for engine in (a, b):
        engine.core.round([AbortRequest("stream")])
