"""The engine core launches steps ahead, and serves messages and pulls while a step
runs.

The executor is a shadow of the KV cache (tests/rigs/shadow.py), which computes each
step as late as allowed.
"""

from collections.abc import Iterator
from itertools import count

import pytest

from engine.core.connector import KVConnector
from engine.core.sequence import Sequence
from protocol.kv_params import parse, to_remote_prefill
from protocol.messages import EngineInput, FirstToken, RemotePrefill, SamplingParams
from tests.rigs.offers import offer
from tests.rigs.shadow import (
    MemoryTransport,
    ShadowExecutor,
    add,
    assert_all_blocks_free,
    expected_output,
    expected_scores,
    make_core,
    run_until_idle,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


_RESTRICTED = SamplingParams(
    temperature=1.0,
    top_k=9,
    top_p=0.5,
    min_p=0.1,
    presence_penalty=0.5,
    logit_bias={3: 1.0},
)


@pytest.mark.parametrize(
    ("new_request", "num_steps"),
    [
        pytest.param(add("a", PROMPT[:5], 12), 12, id="decode steps"),
        pytest.param(
            add("a", PROMPT[:5], 9, _RESTRICTED, stop_token_ids=[3]), 9, id="sampling"
        ),
        pytest.param(
            add("a", range(20, 40), 0, num_prompt_logprobs=1), 4, id="prompt logprobs"
        ),
    ],
)
def test_steps_are_launched_before_the_tokens_of_the_previous_step_are_on_the_host(
    new_request, num_steps
):
    core, executor, out = make_core(depth=1, max_num_batched_tokens=6)
    run_until_idle(core, new_request)
    assert out.tokens("a") == expected_output(
        new_request.token_ids, new_request.max_tokens
    )
    if new_request.num_prompt_logprobs:
        assert out.prompt_logprobs("a") == expected_scores(new_request.token_ids, 1)
    assert executor.num_steps == num_steps, (
        "the core knows which step is the last, and launches no further step"
    )
    assert executor.num_steps_ahead == num_steps - 1
    assert_all_blocks_free(core)


def test_forking_choices_delay_no_other_request():
    core, executor, out = make_core(depth=1)
    core.round([add("a", PROMPT, 20)])
    while len(out.tokens("a")) < 4:
        core.round([])
    prompt = list(range(20, 30))
    run_until_idle(core, add("b", prompt, 6, num_choices=3))
    assert out.tokens("a") == expected_output(PROMPT, 20)
    for choice in range(3):
        assert out.tokens("b", choice) == expected_output(prompt, 6, choice=choice)
    assert (executor.num_steps, executor.num_steps_ahead) == (20, 19)
    assert_all_blocks_free(core)


class _SlowExecutor(ShadowExecutor):
    """Every step ends at the third check of `has_ended`."""

    num_checks = 0

    def has_ended(self) -> bool:
        self.num_checks += 1
        return self.num_checks % 3 == 0


class _PullingConnector(KVConnector):
    """Every pull ends at the next poll.

    Attributes:
        tokens_at_end: for each pull, the tokens that the client had when the pull
            ended.
    """

    def __init__(self, executor: ShadowExecutor, out: MemoryTransport) -> None:
        self.executor = executor
        self.out = out
        self.pulled: list[Sequence] = []
        self.tokens_at_end: list[list[int]] = []

    def on_receive(self, sequence: Sequence) -> None:
        self.pulled.append(sequence)

    def poll(self) -> None:
        while self.pulled:
            sequence = self.pulled.pop()
            self.tokens_at_end.append(self.out.tokens(sequence.request_id))
            tokens = self.executor.pool[sequence.block_ids].reshape(-1)
            tokens[: sequence.num_prompt_tokens] = sequence.request.token_ids
            self.executor.pool[sequence.block_ids] = tokens.reshape(
                -1, self.executor.block_size
            )
            self.core.scheduler.finish_pull(sequence)


def _remote(prompt: list[int]) -> RemotePrefill:
    first = FirstToken(expected_output(prompt, 1)[0])
    return to_remote_prefill(parse(offer(b"secret", prompt, first_tokens=[first])))


def test_request_that_arrives_during_a_step_is_pulled_and_answered_during_this_step():
    executor = _SlowExecutor(32, 4, depth=1)
    core, _, out = make_core(executor=executor)
    connector = _PullingConnector(executor, out)
    core.connector = connector
    connector.bind(core)
    core.round([add("a", PROMPT, 20)])
    for _ in range(3):
        core.round([])
    prompt = list(range(20, 36))
    num_before = len(out.tokens("a"))
    batches: list[list[EngineInput]] = [[add("b", prompt, 4, remote=_remote(prompt))]]

    def receive(timeout_s: float) -> tuple[list[EngineInput], bool]:
        return (batches.pop() if batches else [], False)

    out.receive = receive  # type: ignore[method-assign]
    core.round([])
    assert connector.tokens_at_end == [expected_output(prompt, 1)], (
        "the first token is sent before the pull ends"
    )
    assert len(out.tokens("a")) == num_before + 1
    core.round([])  # launches a step that includes request b
    core.round([])
    assert out.tokens("b") == expected_output(prompt, 2)
    run_until_idle(core)
    assert out.tokens("b") == expected_output(prompt, 4)
    assert out.tokens("a") == expected_output(PROMPT, 20)
    assert_all_blocks_free(core)


class _CountingList(list[Sequence]):
    """A list that counts its iterations."""

    num_iterations = 0

    def __iter__(self) -> Iterator[Sequence]:
        self.num_iterations += 1
        return super().__iter__()


def test_pulls_that_wait_for_blocks_cause_no_iterations_over_running_sequences(
    monkeypatch,
):
    core, _, _ = make_core(num_blocks=17, max_num_seqs=32)
    # No pull ends during this test.
    monkeypatch.setattr(core.connector, "on_receive", lambda sequence: None)
    core.round([add("s", PROMPT, 20)])
    num_iterations: list[int] = []
    numbers = count()
    for num_pulls in (6, 60):
        core.round(
            [
                add(f"{next(numbers)}", PROMPT, 9, remote=_remote(PROMPT))
                for _ in range(num_pulls)
            ]
        )
        running = _CountingList(core.scheduler.running)
        core.scheduler.running = running
        core.round([])
        num_iterations.append(running.num_iterations)
    assert len(core.scheduler.waiting) > 50
    assert num_iterations[0] == num_iterations[1] > 0


def test_core_stops_during_a_step_when_the_transport_is_closed():
    core, _, out = make_core(executor=_SlowExecutor(32, 4, depth=1))
    receives = iter(range(40))  # a core that does not stop raises StopIteration
    messages: list[EngineInput] = [add("b", PROMPT, 20)]
    out.receive = lambda timeout_s: (  # type: ignore[method-assign]
        [messages.pop()] if messages else [],
        next(receives) > 8,
    )
    core.run()
    assert not out.terminals("b")


def test_no_step_is_planned_while_a_long_step_is_in_flight(monkeypatch):
    monkeypatch.setattr("engine.core.step_runner._PROPORTIONAL_TOKENS", 8)
    monkeypatch.setattr("engine.core.step_runner._LONG_STEP_S", 0.0)
    core, executor, out = make_core(depth=1, max_num_batched_tokens=8)
    prompts = (list(range(30)), PROMPT)
    core.round([add("a", prompts[0], 4)])
    core.round([])
    assert executor.num_steps_ahead == 1, "steps count as long only once measured"
    core.round([add("b", prompts[1], 4)])
    while not executor.num_steps_ahead > 1:
        assert len(executor.in_flight) == 1
        core.round([])
    run_until_idle(core)
    for name, prompt in zip("ab", prompts, strict=True):
        assert out.tokens(name) == expected_output(prompt, 4)
    assert_all_blocks_free(core)
