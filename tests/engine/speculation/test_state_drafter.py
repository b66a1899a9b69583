"""MTP layers and EAGLE-3 in an engine, with trained drafters in float32.

Proposals are compared with a LoneDrafter, which computes each proposal from the
complete sequence. A wrong state, token or position would change the proposals.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from engine.core.batch import build_step
from engine.core.core import EngineCore
from engine.core.logits_processing import RowAllocator
from engine.core.plan import Scheduled
from engine.speculation.policy import SpeculationPolicy
from engine.worker.draft_runner import DraftRunner
from engine.worker.drafting import load_draft
from engine.worker.drafting.load_draft import draft_kv
from engine.worker.runner import ModelRunner
from protocol.handshake import DraftKV
from protocol.messages import AbortRequest, SamplingParams
from tests.make_drafters import KINDS
from tests.rigs.draft_ranks import DraftRanks, draft_ranks
from tests.rigs.drafters import VerifyEverything
from tests.rigs.engine_pair import RealPair
from tests.rigs.real_engine import RealEngine
from tests.rigs.shadow import MemoryTransport, add, make_core, run_until_idle
from tests.rigs.state_drafts import CheckedDrafter, LoneDrafter, engine_options

VOCAB = 512
MAX_LEN = 64
BLOCK_SIZE = 4
SAMPLED = SamplingParams(temperature=0.8, seed=3)


class _SometimesVerify(SpeculationPolicy):
    """Alternates between steps with proposals and many steps without proposals."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._num_plain = 0

    def limits(
        self, rates: Sequence[float], lengths: Sequence[int], num_streams: int
    ) -> list[int]:
        if self._num_plain:
            self._num_plain -= 1
            return [0] * len(lengths)
        if self._rng.random() < 0.15:
            self._num_plain = self._rng.randint(1, 25)
        return [self._rng.randint(0, length) for length in lengths]


def _ranks(kind: str, max_proposals: int = 3, **options: Any):
    folder, speculate = engine_options(kind, max_proposals)
    defaults = {
        "num_blocks": 40,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 20,
        "max_model_len": MAX_LEN,
    }
    return draft_ranks(folder, speculate=speculate, **{**defaults, **options})


def _core(
    ranks: DraftRanks, drafter: Any, policy: SpeculationPolicy | None = None
) -> tuple[EngineCore, MemoryTransport]:
    config = ranks.runners[0].config
    core, _, out = make_core(
        executor=ranks.executor,  # type: ignore[arg-type]
        num_blocks=ranks.runners[0].memory.pool.layout.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=MAX_LEN,
        drafters=[drafter] if drafter else [],
        policy=policy or VerifyEverything(),
    )
    return core, out


@pytest.fixture(scope="module")
def lone() -> dict[str, LoneDrafter]:
    return {kind: LoneDrafter(kind) for kind in KINDS}


def _run_mixture(core: EngineCore, seed: int) -> list[str]:
    """Run requests with shared prefixes, choices and aborts. Return their names."""
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCAB) for _ in range(25)]
    # No prefix ends at a block boundary. Otherwise, sequences that continue with
    # different tokens would share the prefix's last block.
    lens = [n for n in range(25) if n % BLOCK_SIZE or n == 0]
    unsent = []
    for number in range(7):
        prompt = prefix[: rng.choice(lens)] + [number] * 3
        sampling = rng.choice([SamplingParams(temperature=0.0), SAMPLED])
        num_choices = rng.choice([1, 1, 2])
        num_tokens = rng.choice([4, 30])
        unsent.append(
            add(f"r{number}", prompt, num_tokens, sampling, num_choices=num_choices)
        )
    names = [request.request_id for request in unsent]
    while unsent or not core.is_idle:
        messages: list[Any] = [unsent.pop()] if unsent and rng.random() < 0.3 else []
        if rng.random() < 0.01:
            messages.append(AbortRequest(f"r{rng.randrange(7)}", None))
        core.round(messages)
        core.scheduler.check_integrity()
    return names


@pytest.mark.parametrize(
    ("kind", "depth", "options", "changes"),
    [
        ("mtp-gqa", 0, {}, {}),
        ("eagle3-gqa", 0, {"num_blocks": 24}, {"max_graph_rows": 8}),
        ("mtp-mla", 1, {"size": 2}, {"max_graph_rows": 8}),
        ("eagle3-gqa", 1, {"size": 2, "num_blocks": 24, "max_num_seqs": 3}, {}),
    ],
    ids=["one rank", "rows", "two ranks ahead", "preemptions ahead"],
)
def test_proposals_equal_those_of_complete_sequences(
    lone, kind, depth, options, changes, monkeypatch
) -> None:
    """With a depth of 1, each step is launched before the tokens of the previous step
    are read, as on a GPU."""
    monkeypatch.setattr(ModelRunner, "depth", depth)
    with _ranks(kind, 4, **options) as ranks:
        drafter: Any = ranks.drafts[0].make_drafter(ranks.executor)
        drafter._limits = dataclasses.replace(drafter._limits, **changes)
        checked = CheckedDrafter(drafter, lone[kind])
        core, _ = _core(ranks, checked, _SometimesVerify(random.Random(2)))
        _run_mixture(core, seed=5)
        assert not checked.failures, checked.failures[0]
        assert checked.num_proposed > 100
        assert checked.num_skipped.count(0) > 0.7 * len(checked.num_skipped)
        if options.get("num_blocks") == 24:
            assert core.scheduler.num_preemptions


@pytest.mark.parametrize("kind", ["mtp-gqa", "eagle3-gqa"])
def test_prompt_of_several_steps_is_drafted_from_its_own_states(lone, kind) -> None:
    """No other sequence decodes, so the first steps draw nothing."""
    with _ranks(kind, max_num_batched_tokens=8) as ranks:
        drafter = ranks.drafts[0].make_drafter(ranks.executor)
        checked = CheckedDrafter(drafter, lone[kind])
        core, _ = _core(ranks, checked)
        run_until_idle(core, add("r", [7 * index % 101 for index in range(37)], 20))
    assert checked.num_proposed and not checked.failures, checked.failures[0]
    assert set(checked.num_skipped) == {0}


@pytest.mark.parametrize("kind", ["mtp-gqa", "eagle3-gqa"])
def test_trained_drafter_is_often_right(kind) -> None:
    """By chance, one of 512 proposals would be right."""
    prompt = list(range(40, 64))
    for sampling in (SamplingParams(temperature=0.0), SAMPLED):
        with _ranks(kind, 2, num_blocks=40) as ranks:
            drafter = ranks.drafts[0].make_drafter(ranks.executor)
            core, out = _core(ranks, drafter)
            run_until_idle(core, add("r", prompt, 38, sampling))
        (end,) = out.terminals("r")
        assert 3 * end.accepted_tokens > end.rejected_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_without_a_drafter(kind) -> None:
    samplings = {
        "greedy": SamplingParams(temperature=0.0, num_logprobs=2),
        "sampled": SamplingParams(temperature=1.0, seed=7, num_logprobs=0),
        "penalties": SamplingParams(
            temperature=0.8, seed=8, presence_penalty=0.7, repetition_penalty=1.2
        ),
    }
    requests = [
        add(name, list(range(number, 23 + number)), 30, sampling, num_choices=2)
        for number, (name, sampling) in enumerate(samplings.items())
    ]
    results = []
    for max_proposals in (1, 2, 4):
        with _ranks(kind, max_proposals, num_blocks=60) as ranks:
            drafter = ranks.drafts[0].make_drafter(ranks.executor)
            for used in [None, drafter] if max_proposals == 1 else [drafter]:
                core, out = _core(ranks, used)
                run_until_idle(core, *requests)
                results.append(out)
                accepted = [
                    end.accepted_tokens
                    for request in requests
                    for end in out.terminals(request.request_id)
                ]
                assert bool(sum(accepted)) == bool(used)
    expected = results[0]
    for out in results[1:]:
        for request in requests:
            name = request.request_id
            for choice in range(2):
                assert out.tokens(name, choice) == expected.tokens(name, choice)
                assert _logprobs(out, name, choice) == pytest.approx(
                    _logprobs(expected, name, choice), abs=1e-4
                )


def _logprobs(out: MemoryTransport, name: str, choice: int) -> list[float]:
    return [
        entry.logprob
        for delta in out.deltas
        if delta.request_id == name and delta.choice == choice
        for entry in delta.logprobs or []
    ]


def test_second_turn_sees_the_draft_kv_of_the_first(lone) -> None:
    prompt = [3 * index % 101 for index in range(21)]
    with _ranks("mtp-gqa") as ranks:
        drafter: Any = ranks.drafts[0].make_drafter(ranks.executor)
        checked = CheckedDrafter(drafter, lone["mtp-gqa"])
        core, out = _core(ranks, checked)
        run_until_idle(core, add("first", prompt, 12))
        num_compared = checked.num_proposed
        second = [*prompt, *out.tokens("first"), 5, 6, 7]
        run_until_idle(core, add("second", second, 12))
        usage = out.terminals("second")[0].usage
        assert usage is not None and usage.skipped == 32
        assert checked.num_proposed > num_compared
        assert not checked.failures, checked.failures[0]
        # The last tokens of the first turn were drawn, but have no draft KV.
        assert set(checked.num_skipped) == {0, BLOCK_SIZE}


def test_context_begins_at_the_first_state_without_draft_kv(lone) -> None:
    """The prefix cache has KV of the prompt, but no draft KV, as after a pull."""
    prompt = [3 * index % 101 for index in range(22)]
    with _ranks("eagle3-gqa") as ranks:
        drafter: Any = ranks.drafts[0].make_drafter(ranks.executor)
        checked = CheckedDrafter(drafter, lone["eagle3-gqa"])
        core, _ = _core(ranks, checked)
        run_until_idle(core, add("first", prompt, 2))
        drafter._blocks.forget(range(40))
        run_until_idle(core, add("second", [*prompt, 9, 9], 20))
        assert not checked.failures, checked.failures[0]
        assert set(checked.num_skipped) == {20}


def test_block_of_another_continuation_keeps_its_last_token(lone) -> None:
    """Two prompts share full blocks and differ in the next token. The draft KV of the
    last shared position depends on this next token."""
    shared = [3 * index % 101 for index in range(16)]
    with _ranks("mtp-gqa") as ranks:
        drafter: Any = ranks.drafts[0].make_drafter(ranks.executor)
        core, _ = _core(ranks, drafter)
        run_until_idle(core, add("first", [*shared, 7, 8], 4))
        core.round([add("second", [*shared, 9, 8], 20)])
        (second,) = core.sequences.values()
        core.round([])
        (proposals,) = drafter.propose([second], [3])
        assert len(proposals) == 3
        assert proposals == lone["mtp-gqa"].proposals(
            second.token_ids, 3, other_inputs={15: 7}
        )


def test_sequence_may_end_before_the_drafter_follows_its_step() -> None:
    """This happens when a step waits for grammar masks while the previous step ends."""
    with _ranks("mtp-gqa") as ranks:
        drafter: Any = ranks.drafts[0].make_drafter(ranks.executor)
        core, _ = _core(ranks, drafter)
        core.round([add("first", list(range(34)), 4)])
        (sequence,) = core.sequences.values()
        item = Scheduled.from_next_tokens(sequence, 14)
        step = build_step([item], RowAllocator())
        ranks.executor.launch(drafter.prepare([item], step)).result()
        core.round([AbortRequest("first", None)])
        drafter.follow()
        assert not sequence.num_drafted
        run_until_idle(core, add("second", list(range(34)), 4))
        assert core.stats()["baton_speculative_proposed_tokens{drafter=mtp}"] > 0


def test_drafter_that_fails_is_turned_off_and_no_request_notices(caplog) -> None:
    """Depending on the run, the step that follows a prompt or a later step fails."""
    prompt = list(range(30))
    outputs = []
    for num_launches in (None, 0, 1, 5):
        with _ranks("mtp-gqa") as ranks:
            drafter: Any = ranks.drafts[0].make_drafter(ranks.executor)
            num_left = 1 << 30 if num_launches is None else num_launches
            drafter._executor = _FailingExecutor(ranks.executor, num_left)
            core, out = _core(ranks, drafter)
            run_until_idle(core, add("a", prompt, 20), add("b", prompt[3:], 20))
            outputs.append([out.tokens("a"), out.tokens("b")])
        errors = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == (num_launches is not None)
        caplog.clear()
    assert all(output == outputs[0] for output in outputs)


class _FailingExecutor:
    def __init__(self, executor: Any, num_left: int) -> None:
        self.depth = executor.depth
        self._executor = executor
        self._num_left = num_left

    def launch(self, step: Any) -> Any:
        if not self._num_left:
            raise RuntimeError("out of memory")
        self._num_left -= 1
        return self._executor.launch(step)


class _Switch(SpeculationPolicy):
    """Allows all proposals while `is_on`, and none otherwise."""

    is_on = False

    def limits(
        self, rates: Sequence[float], lengths: Sequence[int], num_streams: int
    ) -> list[int]:
        return list(lengths) if self.is_on else [0] * len(lengths)


def test_drafter_that_does_not_pay_follows_no_streams_until_it_wakes(
    lone, monkeypatch
) -> None:
    """A sleeping drafter still computes draft KV of prompts, to use it after waking."""
    monkeypatch.setattr("engine.speculation.dormancy.AWAKE_STEPS", 6)
    monkeypatch.setattr("engine.speculation.dormancy.ASLEEP_STEPS", 20)
    with _ranks("mtp-gqa") as ranks:
        num_launched = itertools.count()
        launch = ranks.executor.launch

        def counting_launch(step: Any) -> Any:
            if step.is_draft:
                next(num_launched)
            return launch(step)

        monkeypatch.setattr(ranks.executor, "launch", counting_launch)
        drafter: Any = ranks.drafts[0].make_drafter(ranks.executor)
        checked = CheckedDrafter(drafter, lone["mtp-gqa"])
        policy = _Switch()
        core, out = _core(ranks, checked, policy)
        core.round([add("r", list(range(1, 10)), 50)])
        while not core.speculator._dormancy.is_asleep:
            core.round([])
        before = next(num_launched)
        policy.is_on = True
        for _ in range(10):
            core.round([])
        assert next(num_launched) == before + 1
        assert core.speculator._dormancy.is_asleep and not checked.num_proposed
        run_until_idle(core)
    assert checked.num_proposed and not checked.failures, checked.failures[0]
    # The drafter sees two full blocks of the prompt, and the tokens since it woke.
    num_outputs = len(out.tokens("r"))
    assert num_outputs == 50 and 0 < min(checked.num_skipped) < num_outputs


@pytest.mark.parametrize("kind", ["mtp-mla", "eagle3-gqa"])
def test_pulled_prompts_are_continued_with_proposals(lone, kind) -> None:
    """P has no drafter, so the drafter of D sees only tokens of the answer."""
    prompt = [3 * index % 101 for index in range(61)]
    folder, speculate = engine_options(kind, 3)
    requests = [
        add("greedy", prompt, 24),
        add("sampled", prompt, 24, SAMPLED, num_choices=2),
    ]
    with RealPair(folder, p_block_size=8, block_size=4) as pair:
        expected = [pair.prefill_and_decode(request) for request in requests]
    with RealPair(folder, p_block_size=8, block_size=4, speculate=speculate) as pair:
        engine = pair.d
        assert isinstance(engine, RealEngine) and engine.draft is not None
        drafter: Any = engine.draft.make_drafter(engine.executor)
        checked = CheckedDrafter(drafter, lone[kind])
        engine.use_drafter(checked)
        for request, plain in zip(requests, expected, strict=True):
            out = pair.prefill_and_decode(request)
            name = request.request_id
            for choice in range(request.num_choices):
                assert out.tokens(name, choice) == plain.tokens(name, choice)
            assert sum(end.accepted_tokens for end in out.terminals(name)) > 3
    assert not checked.failures, checked.failures[0]
    # The blocks of the first 60 tokens are shared by the choices.
    assert set(checked.num_skipped) == {60, 61}


def _checked_drafter(engine: RealEngine, lone: LoneDrafter) -> CheckedDrafter:
    """Let an engine use its drafter, and check each proposal."""
    assert engine.draft is not None
    drafter: Any = engine.draft.make_drafter(engine.executor)
    checked = CheckedDrafter(drafter, lone)
    engine.use_drafter(checked)
    return checked


@pytest.mark.parametrize(
    ("kind", "p_block_size", "num_tokens", "options"),
    [
        ("mtp-gqa", 8, 61, {}),
        ("mtp-mla", 2, 63, {"launch_bytes": 1 << 20}),
        ("eagle3-gqa", 4, 62, {"order": "LBCNHD", "p_order": "BLCHND"}),
    ],
    ids=["large blocks", "mapped", "other orders"],
)
def test_drafter_sees_the_draft_kv_of_a_prefill_server_with_the_same_drafter(
    lone, kind, p_block_size, num_tokens, options
) -> None:
    """Draft KV that is not pulled is NaN. Only the draft KV of the prompt's last token
    is missing, because P does not compute the token after the prompt."""
    prompt = [3 * index % 101 for index in range(num_tokens)]
    folder, speculate = engine_options(kind, 3)
    with RealPair(
        folder,
        p_block_size=p_block_size,
        block_size=4,
        speculate=speculate,
        p_speculate=speculate,
        **options,
    ) as pair:
        _checked_drafter(pair.p, lone[kind])
        checked = _checked_drafter(pair.d, lone[kind])
        out = pair.prefill_and_decode(add("first", prompt, 24))
        assert sum(end.accepted_tokens for end in out.terminals("first")) > 3
        assert set(checked.num_skipped) == {1}
        # A second request on D reuses cached blocks of the prompt and their draft KV.
        checked.num_skipped.clear()
        pair.decode_only(add("second", [*prompt[:42], 7, 8, 9], 20))
    assert checked.num_skipped and max(checked.num_skipped) <= 4
    assert not checked.failures, checked.failures[0]


def test_offered_prompt_brings_draft_kv_piece_by_piece(lone) -> None:
    folder, speculate = engine_options("mtp-gqa", 3)
    with RealPair(
        folder,
        block_size=4,
        speculate=speculate,
        p_speculate=speculate,
        p_max_num_batched_tokens=16,
    ) as pair:
        _checked_drafter(pair.p, lone["mtp-gqa"])
        checked = _checked_drafter(pair.d, lone["mtp-gqa"])
        prompt = [5 * index % 97 for index in range(64)]
        _, name = pair.submit_to_both(prompt, 24)
        pair.answer(name)
    assert checked.num_proposed and not checked.failures
    assert max(checked.num_skipped) <= 4


def test_no_draft_kv_comes_from_a_server_with_another_drafter(
    lone, monkeypatch
) -> None:
    """The other drafter has a layer of the same shape."""
    numbers = itertools.count()

    def other_draft_kv(runner: DraftRunner) -> DraftKV | None:
        described = draft_kv(runner)
        assert described is not None
        return replace(described, fingerprint=f"drafter {next(numbers)}")

    monkeypatch.setattr(load_draft, "draft_kv", other_draft_kv)
    folder, speculate = engine_options("mtp-gqa", 3)
    prompt = [3 * index % 101 for index in range(61)]
    with RealPair(
        folder, block_size=4, speculate=speculate, p_speculate=speculate
    ) as pair:
        _checked_drafter(pair.p, lone["mtp-gqa"])
        checked = _checked_drafter(pair.d, lone["mtp-gqa"])
        pair.prefill_and_decode(add("r", prompt, 24))
    assert checked.num_proposed and not checked.failures
    assert min(checked.num_skipped) == 61
