"""Engines with few blocks that lease KV to each other never deadlock.

No lease expires in these tests, because the clock of the leases does not advance. A
request that waits until a lease expires would therefore wait forever.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache.transfer.pulls.messages import PullSettings
from protocol.messages import MOVED, AbortRequest, Migrate, ResumedChoice
from tests.rigs.engines import Engine, Group
from tests.rigs.shadow import VOCAB, add, expected_output

# A generator that runs a request like the proxy. It yields each condition for which the
# request must then wait.
Script = Iterator[Callable[[], object]]


@pytest.fixture(autouse=True)
def _short_deadlock_time(monkeypatch):
    monkeypatch.setattr("engine.kv.stalls._DEADLOCK_S", 0.05)


class Fleet(Group):
    """Servers that accept prefill and decode legs, and a proxy that picks servers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # For each prefill server: blocks of its calls with several prompts. In a real
        # server, PrefillLeg.admit limits these blocks.
        self.batch_blocks = Counter[Engine]()
        limits: dict[str, Any] = {"settings": PullSettings(pull_timeout_s=0.5)}
        limits["lease_clock"] = lambda: 0.0
        sizes = [self.rng.randrange(18, 30) for _ in range(self.rng.choice([2, 2, 3]))]
        super().__init__(*(Engine(num_blocks=n, depth=n % 2, **limits) for n in sizes))

    def pick_two_engines(self) -> list[Engine]:
        return self.rng.sample(self.engines, 2)

    def random_prompt(self) -> list[int]:
        return [
            self.rng.randrange(VOCAB) for _ in range(self.rng.choice([8, 16, 24, 40]))
        ]

    def send_request(
        self,
        engine: Engine,
        name: str,
        prompt: list[int],
        max_tokens: int = 1,
        **options: Any,
    ) -> None:
        priority = self.rng.choice([0, 0, 0, -1])
        request = add(name, prompt, max_tokens, priority=priority, **options)
        engine.core.round([request])

    def check_answer(
        self,
        engine: Engine,
        name: str,
        prompt: list[int],
        max_tokens: int,
        num_choices: int = 1,
    ) -> Script:
        yield lambda: len(engine.out.terminals(name)) == num_choices
        for choice in range(num_choices):
            expected = expected_output(prompt, max_tokens, choice=choice)
            assert engine.out.tokens(name, choice) == expected

    def run_legs_in_turn(self, call: str) -> Script:
        """Sends a call with several prompts, or with one prompt if P would not accept
        several. The decode legs begin when all prefill legs have finished."""
        p, d = self.pick_two_engines()
        num_choices = self.rng.choice([1, 1, 1, 2])
        prompts = [self.random_prompt() for _ in range(self.rng.choice([1, 1, 2, 4]))]
        num_blocks = sum(len(prompt) for prompt in prompts) // 4
        max_blocks = p.core.scheduler.allocator.capacity // 2
        if self.batch_blocks[p] + num_blocks > max_blocks:
            prompts = prompts[:1]
            num_blocks = 0
        self.batch_blocks[p] += num_blocks
        named = [(f"{call}-{index}", prompt) for index, prompt in enumerate(prompts)]
        for name, prompt in named:
            self.send_request(p, name, prompt, retain_kv=True, num_choices=num_choices)
        yield lambda: all(
            len(p.out.terminals(name)) == num_choices for name, _ in named
        )
        self.batch_blocks[p] -= num_blocks
        for name, prompt in named:
            self.send_request(
                d,
                f"d{name}",
                prompt,
                6,
                remote=p.reference(name),
                num_choices=num_choices,
            )
        for name, prompt in named:
            yield from self.check_answer(d, f"d{name}", prompt, 6, num_choices)

    def run_legs_concurrently(self, call: str) -> Script:
        """Sends both legs of a request with an offer, in random order."""
        p, d = self.pick_two_engines()
        prompt = self.random_prompt()
        remote = p.offer(call, prompt)
        decode_leg: dict[str, Any] = {
            "engine": d,
            "name": f"d{call}-0",
            "max_tokens": 5,
            "remote": remote,
        }
        prefill_leg: dict[str, Any] = {
            "engine": p,
            "name": f"{call}-0",
            "retain_kv": True,
            "transfer_id": remote.transfer_id,
        }
        for leg in self.rng.sample([prefill_leg, decode_leg], 2):
            self.send_request(prompt=prompt, **leg)
        yield from self.check_answer(d, f"d{call}-0", prompt, 5)

    def run_with_lookup(self, call: str) -> Script:
        """Sends a prompt to one engine. Then sends a longer prompt to another engine,
        with a hint to the first engine."""
        a, b = self.pick_two_engines()
        prompt = self.random_prompt()
        self.send_request(a, f"{call}-0", prompt, 3)
        yield from self.check_answer(a, f"{call}-0", prompt, 3)
        longer = [*prompt, *self.random_prompt()][:50]
        self.send_request(b, f"d{call}-0", longer, 3, hint=a.hint(len(prompt)))
        yield from self.check_answer(b, f"d{call}-0", longer, 3)

    def run_with_migration(self, call: str) -> Script:
        """Migrates a stream to another engine."""
        a, b = self.pick_two_engines()
        prompt = self.random_prompt()
        max_tokens = self.rng.randrange(4, 20)
        self.send_request(a, f"{call}-0", prompt, max_tokens)
        yield lambda: len(a.out.tokens(f"{call}-0")) > 1
        a.core.round([Migrate(f"{call}-0")])
        yield lambda: a.out.terminals(f"{call}-0")
        tokens = a.out.tokens(f"{call}-0")
        if a.out.terminals(f"{call}-0")[0].finish_reason == MOVED:
            self.send_request(
                b,
                f"d{call}-0",
                prompt,
                max_tokens,
                remote=a.reference(f"{call}-0"),
                resumed_choices=[ResumedChoice(list(tokens))],
            )
            yield lambda: b.out.terminals(f"d{call}-0")
            tokens += b.out.tokens(f"d{call}-0")
        assert tokens == expected_output(prompt, max_tokens)

    def run_random_calls(self, num_calls: int) -> None:
        """Runs random scripts until all have ended."""
        conditions: dict[Script, Callable[[], object]] = {}
        kinds = [
            self.run_legs_in_turn,
            self.run_legs_in_turn,
            self.run_legs_concurrently,
            self.run_with_lookup,
            self.run_with_migration,
        ]
        for index in range(num_calls):
            script = self.rng.choice(kinds)(f"call{index}")
            conditions[script] = next(script)
            self.round(self.rng.choice([0, 0, 1]))
        while conditions:
            self.until(lambda: any(condition() for condition in conditions.values()))
            ready = [script for script, condition in conditions.items() if condition()]
            for script in ready:
                del conditions[script]
                condition = next(script, None)
                if condition:
                    conditions[script] = condition


@pytest.mark.parametrize("seed", range(12))
def test_all_requests_of_random_legs_end_and_all_blocks_are_free_at_the_end(seed):
    with Fleet(seed) as fleet:
        fleet.run_random_calls(20)


def test_rest_of_a_call_with_leases_runs_before_a_request_that_does_not_fit(make_group):
    """The leases of the call end only when all its prompts are computed."""
    p, d = (group := make_group({"num_blocks": 21}, {"num_blocks": 21})).engines
    prompts = [[index] * 20 for index in range(3)]
    urgent = [7] * 63
    p.core.round(
        [
            add(f"call-{index}", prompt, 1, retain_kv=True)
            for index, prompt in enumerate(prompts)
        ]
    )
    p.core.round([add("urgent-0", urgent, 1, priority=-1)])
    group.until(lambda: all(p.out.terminals(f"call-{index}") for index in range(3)))
    assert not p.out.terminals("urgent-0")
    for index, prompt in enumerate(prompts):
        remote = p.reference(f"call-{index}")
        assert group.complete(d, prompt, remote=remote)[1] == (20, 0, 0)
    assert group.tokens_of(p, "urgent-0") == expected_output(urgent, 1)


def test_deadlock_of_two_engines_is_broken_while_both_have_running_streams(make_group):
    """Each engine waits for blocks that are leased to a waiting request of the other
    engine."""
    size = {"num_blocks": 161, "block_size": 16, "max_model_len": 2000}
    a, b = (
        group := make_group(*[{**size, "max_num_batched_tokens": 1280}] * 2)
    ).engines
    # Each prompt takes half of a pool, and is leased by the other engine.
    prompts = {a: [7] * 1280, b: [8] * 1280}
    for lender, prompt in ((b, prompts[a]), (a, prompts[b])):
        lender.core.round([add("prompt", prompt, 1, retain_kv=True)])
        group.end_of(lender, "prompt")
    for engine, lender in ((a, b), (b, a)):
        engine.core.round([add("stream", [9] * 80, 1000)])
        group.until(lambda engine=engine: len(engine.out.tokens("stream")) > 0)
        request = add("pull", prompts[engine], 2, remote=lender.reference("prompt"))
        engine.core.round([request])
    for engine in (a, b):
        assert group.tokens_of(engine, "pull") == expected_output(prompts[engine], 2)
    assert not (a.out.terminals("stream") or b.out.terminals("stream"))
    for engine in (a, b):
        engine.core.round([AbortRequest("stream")])
