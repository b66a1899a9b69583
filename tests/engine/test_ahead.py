"""A core that launches a step before it knows what the one before drew, over a device that runs
each step as late as it may. tests/engine/test_core.py runs this way, too, and
tests/decode_server/test_role_mixture.py."""

import pytest

from engine.core.connector import KVConnector
from engine.core.core import EngineCore
from engine.core.sequence import Sequence
from kvcache.blocks import BlockState
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineInput,
    FirstToken,
    RemotePrefill,
    SamplingParams,
)
from tests.rigs.shadow import (
    MemoryTransport,
    ShadowExecutor,
    add,
    assert_all_blocks_home,
    expected_output,
    expected_scores,
    make_core,
    run_until_idle,
)

PROMPT = [1, 2, 3, 4, 5]


def remote(prompt: list[int]) -> RemotePrefill:
    names = dict.fromkeys(("host", "engine_id", "incarnation", "request_id", "lease_id"), "x")
    sizes = {"block_size": 4, "num_tokens": len(prompt), "cached_tokens": 0, "tp_size": 1}
    return RemotePrefill(
        **names,
        **sizes,
        port=1,
        lease_s=30.0,
        block_ids=[],
        first_tokens=[FirstToken(expected_output(prompt, 1)[0])],
    )


class PullingRole(KVConnector):
    """Bytes may arrive the moment a pull begins: a launched step must not refer to its blocks."""

    executor: ShadowExecutor

    def __init__(self) -> None:
        self.pulled: list[Sequence] = []

    def on_receive(self, sequence: Sequence) -> None:
        blocks = sequence.block_ids
        assert not self.executor.blocks_under_way().intersection(blocks), "a step refers to them"
        self.executor.pool[blocks] = -7  # on the way: nobody may read this
        self.pulled.append(sequence)

    def arrive(self) -> None:
        sequence = self.pulled.pop()
        for index, token in enumerate(sequence.token_ids[: sequence.num_prompt_tokens]):
            block, offset = divmod(index, self.executor.block_size)
            self.executor.pool[sequence.block_ids[block], offset] = token
        self.core.scheduler.received(sequence)


_RESTRICTED = SamplingParams(
    temperature=1.0, top_k=9, top_p=0.5, min_p=0.1, presence_penalty=0.5, logit_bias={3: 1.0}
)


@pytest.mark.parametrize(
    ("asked", "num_steps"),
    [
        pytest.param(add("a", PROMPT, 12), 12, id="decode steps"),
        pytest.param(add("a", PROMPT, 9, _RESTRICTED, stop_token_ids=[3]), 9, id="any draw"),
        pytest.param(add("a", range(20, 40), 0, num_prompt_logprobs=1), 4, id="scores alone"),
    ],
)
def test_steps_are_launched_before_the_last_ones_tokens_are_known(
    asked: AddRequest, num_steps: int
) -> None:
    core, executor, out = make_core(depth=1, max_num_batched_tokens=6)
    core.round([asked])
    run_until_idle(core)
    assert out.tokens("a") == expected_output(asked.token_ids, asked.max_tokens)
    if asked.num_prompt_logprobs:
        assert out.prompt_logprobs("a") == expected_scores(asked.token_ids, 1)
    assert executor.num_steps == num_steps, "the length is known beforehand: no step too many"
    assert executor.num_steps_ahead == num_steps - 1
    assert_all_blocks_home(core)


def test_the_token_after_a_stop_token_is_dropped() -> None:
    tokens = expected_output(PROMPT, 20)
    core, executor, out = make_core(depth=1)
    core.round([add("a", PROMPT, 20, stop_token_ids=[tokens[4]])])
    run_until_idle(core)
    num_outputs = tokens.index(tokens[4]) + 1
    assert out.tokens("a") == tokens[:num_outputs]
    assert [end.finish_reason for end in out.terminals("a")] == ["stop"]
    assert executor.num_steps == num_outputs + 1, "one step too many was on its way"
    assert_all_blocks_home(core)


@pytest.mark.parametrize("ending", ["stop", "abort"])
def test_a_pull_gets_no_block_that_a_launched_step_refers_to(ending: str) -> None:
    role = PullingRole()
    core, executor, out = make_core(depth=1, role=role, num_blocks=6, prefix_caching=False)
    role.executor = executor
    tokens = expected_output(PROMPT, 12)
    first = tokens.index(tokens[2])  # of the outputs that are the stop token
    core.round([add("a", PROMPT, 12, stop_token_ids=[tokens[2]] if ending == "stop" else [])])
    while len(out.tokens("a")) < first:
        core.round([])
    assert len(executor.under_way) == 1
    prompt = list(range(20, 36))  # takes four blocks of the five: those of the first one, too
    wanted = add("b", prompt, 4, remote=remote(prompt))
    core.round([wanted, *([AbortRequest("a")] if ending == "abort" else [])])
    # Its last token is out, but a launched step still referred to its blocks in this round.
    assert out.terminals("a") and not role.pulled
    if ending == "stop":
        assert executor.under_way and core.scheduler.allocator.counts()[BlockState.USED] > 0
    while not role.pulled:
        core.round([])
    role.arrive()
    run_until_idle(core)
    assert out.tokens("b") == expected_output(prompt, 4)
    assert_all_blocks_home(core)


@pytest.mark.parametrize("abort_in", range(4))
def test_an_abort_under_a_launched_step_answers_once_and_frees_the_blocks_later(
    abort_in: int,
) -> None:
    core, executor, out = make_core(depth=1)
    core.round([add("a", PROMPT, 12), add("b", PROMPT[::-1], 12)])
    for _ in range(abort_in):
        core.round([])
    assert executor.under_way
    core.round([AbortRequest("a")])
    assert [end.finish_reason for end in out.terminals("a")] == ["abort"]
    run_until_idle(core)
    assert len(out.terminals("a")) == 1
    assert out.tokens("b") == expected_output(PROMPT[::-1], 12)
    assert_all_blocks_home(core)


def test_choices_that_fork_off_hold_up_only_themselves() -> None:
    core, executor, out = make_core(depth=1)
    core.round([add("a", PROMPT, 20)])
    while len(out.tokens("a")) < 4:
        core.round([])
    prompt = list(range(20, 30))
    core.round([add("b", prompt, 6, num_choices=3)])
    run_until_idle(core)
    assert out.tokens("a") == expected_output(PROMPT, 20)
    for choice in range(3):
        assert out.tokens("b", choice) == expected_output(prompt, 6, choice=choice)
    assert (executor.num_steps, executor.num_steps_ahead) == (20, 19)
    assert_all_blocks_home(core)


class _Slow(ShadowExecutor):
    """The step that is waited for ends at the third look."""

    def __init__(self) -> None:
        super().__init__(32, 4, depth=1)
        self.num_looks = 0

    def has_ended(self) -> bool:
        self.num_looks += 1
        return self.num_looks % 3 == 0


class _Late(MemoryTransport):
    """What comes while a step is waited for; then it asks to end."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: list[EngineInput] = []
        self.ends = False

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        taken, self.coming = self.coming, []
        return taken, self.ends


def _core_that_waits() -> tuple[EngineCore, PullingRole, _Late]:
    role, out = PullingRole(), _Late()
    executor = _Slow()
    core, _, _ = make_core(executor=executor, role=role)
    role.executor, core.transport = executor, out
    core.round([add("a", PROMPT, 20)])
    for _ in range(3):
        core.round([])
    return core, role, out


def test_who_comes_while_a_step_is_waited_for_is_pulled_and_answered_before_it_ends() -> None:
    core, role, out = _core_that_waits()
    prompt = list(range(20, 36))
    wanted = add("b", prompt, 4, remote=remote(prompt))
    poll, seen = role.poll, []

    def arrives() -> None:
        if role.pulled:
            seen.append(out.tokens("b"))
            role.arrive()
        poll()

    role.poll = arrives  # type: ignore[method-assign]
    before = len(out.tokens("a"))
    out.coming = [wanted]
    core.round([])
    assert seen == [expected_output(prompt, 1)], "its first token went out, its KV is there"
    assert len(out.tokens("a")) == before + 1
    assert out.tokens("b") == expected_output(prompt, 1)
    core.round([])  # launches the step that it joins at once
    core.round([])
    assert out.tokens("b") == expected_output(prompt, 2)
    run_until_idle(core)
    assert out.tokens("b") == expected_output(prompt, 4)
    assert out.tokens("a") == expected_output(PROMPT, 20)
    assert_all_blocks_home(core)


def test_an_abort_while_a_step_is_waited_for_ends_the_request_then() -> None:
    core, _, out = _core_that_waits()
    out.coming = [AbortRequest("a")]
    core.round([])
    assert [end.finish_reason for end in out.terminals("a")] == ["abort"]
    run_until_idle(core)
    assert len(out.terminals("a")) == 1
    assert_all_blocks_home(core)


def test_the_order_to_end_is_heard_while_a_step_is_waited_for() -> None:
    core, _, out = _core_that_waits()
    out.coming = [add("b", PROMPT, 20)]
    receive = out.receive

    def then_end(timeout_s: float) -> tuple[list[EngineInput], bool]:
        taken = receive(timeout_s)
        out.ends = True
        assert len(out.tokens("a")) < 10, "it goes on for ever"
        return taken

    out.receive = then_end  # type: ignore[method-assign]
    core.run()


def test_nothing_is_planned_behind_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.core._MANY_TOKENS", 8)
    monkeypatch.setattr("engine.core.core._LONG_STEP_S", 0.0)
    core, executor, out = make_core(depth=1, max_num_batched_tokens=8)
    prompts = list(range(30)), PROMPT
    core.round([add("a", prompts[0], 4)])
    core.round([])
    assert executor.num_steps_ahead == 1, "nothing is known yet"
    core.round([add("b", prompts[1], 4)])
    while not executor.num_steps_ahead > 1:
        assert len(executor.under_way) == 1
        core.round([])
    run_until_idle(core)
    for name, prompt in zip("ab", prompts, strict=True):
        assert out.tokens(name) == expected_output(prompt, 4)
    assert_all_blocks_home(core)
