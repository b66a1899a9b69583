"""A stand-in for the model whose KV cache holds what it claims to hold.

Each slot of the shadow pool remembers the token written to it. The next token is a hash of the
whole context as read back through the block table, so any mistake with blocks, positions, prefix
hits or preemption changes the output, which `expected_output` computes without any cache.
"""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.core.batch import (
    Int32s,
    ScoredRows,
    StepInput,
    StepOutput,
    step_from_bytes,
    step_to_bytes,
)
from engine.core.connector import KVConnector
from engine.core.core import EngineCore
from engine.core.core_grammar import CoreGrammars
from engine.core.logits_processing import NO_ROW, SamplingRow
from engine.core.scheduler import Scheduler
from engine.core.tables import SchedulerLimits
from engine.text.grammar import GrammarCompiler, GrammarState, step_masks
from kvcache.blocks import NULL_BLOCK, BlockAllocator, BlockState
from kvcache.groups import ONE_GROUP, KVGroups
from protocol.messages import (
    AddRequest,
    EngineInput,
    EngineOutput,
    EngineStats,
    Outputs,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)

VOCAB = 50


def next_token(context: Sequence[int], choice: int = 0) -> int:
    data = np.asarray([*context, *[choice] * (choice > 0)], dtype=np.int64).tobytes()
    return (
        int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCAB
    )


def allowed(token: int, banned: Sequence[int]) -> int:
    """What is drawn instead of banned tokens, which must not be all."""
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def _masked(token: int, mask: Int32s) -> int:
    """Of the tokens a mask allows the one that `token` picks; itself where it allows all."""
    if (mask == -1).all():
        return token
    found = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
    return int(found[token % len(found)])


def expected_score(context: Sequence[int], target: int, num_top: int) -> TokenLogprobs:
    value = -float(next_token([*context, target]))
    return TokenLogprobs(value, [target] * num_top, [value] * num_top)


def expected_scores(prompt: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
    """Of every prompt token."""
    rows = [
        expected_score(prompt[:at], prompt[at], num_top) for at in range(1, len(prompt))
    ]
    return [None, *rows]


def expected_output(
    prompt: Sequence[int],
    max_tokens: int,
    stop: Sequence[int] = (),
    choice: int = 0,
    min_tokens: int = 0,
) -> list[int]:
    tokens = list(prompt)
    for num_outputs in range(max_tokens):
        tokens.append(
            allowed(
                next_token(tokens, choice), stop if num_outputs < min_tokens else ()
            )
        )
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class _ShadowStep:
    """Runs when its result is asked for, the latest moment at which a device may run it."""

    def __init__(self, executor: "ShadowExecutor", step: StepInput) -> None:
        self.step = step
        self._executor = executor
        self._masks: Int32s | None = None

    def draw(self, masks: Int32s) -> None:
        assert self.step.is_masked and self._masks is None
        assert self._executor.under_way[-1] is self, (
            "drawn before anything else is launched"
        )
        self._masks = masks.copy()

    @property
    def blocks(self) -> set[int]:
        """What the step reads and writes."""
        lens = (
            -(-self.step.context_lens // self._executor.block_size)
            * self._executor.num_groups
        )
        rows = zip(self.step.block_tables, lens.tolist(), strict=True)
        return {int(block) for row, length in rows for block in row[:length]}

    def has_ended(self) -> bool:
        return self._executor.has_ended()

    def result(self) -> StepOutput:
        assert self._executor.under_way.popleft() is self, (
            "results are asked for in order"
        )
        assert self.step.is_masked == (self._masks is not None), (
            "it cannot know what to draw"
        )
        return self._executor.execute(self.step, self._masks)


class ShadowExecutor:
    """Executes steps over a pool of token ids; -1 is a slot never written."""

    def __init__(self, num_blocks: int, block_size: int, depth: int = 0) -> None:
        self.depth = depth
        self.under_way: deque[_ShadowStep] = deque()
        self.num_steps_ahead = 0
        self._drawn: list[int] = []  # by the last step that ran
        self._setups: dict[int, SamplingRow] = {}  # by state row
        self._counted: dict[
            int, list[int]
        ] = {}  # by state row: prompt, then drawn tokens
        self.pool = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.block_size = block_size
        self.num_groups = 1
        self.num_steps = 0
        self.num_tokens = 0
        self.max_tokens_in_step = 0

    def launch(self, step: StepInput) -> _ShadowStep:
        assert len(self.under_way) <= self.depth
        self.num_steps_ahead += bool(self.under_way)
        launched = _ShadowStep(
            self, step_from_bytes(step_to_bytes(step))
        )  # as other ranks see it
        self.under_way.append(launched)
        return launched

    def has_ended(self) -> bool:
        """Of the step that is waited for; by default it runs when its result is asked for."""
        return True

    def blocks_in_flight(self) -> set[int]:
        return {block for step in self.under_way for block in step.blocks}

    def execute(self, step: StepInput, masks: Int32s | None) -> StepOutput:
        ids = [
            self._drawn[-1 - token] if token < 0 else token
            for token in step.token_ids.tolist()
        ]
        output = self.run(
            dataclasses.replace(step, token_ids=np.array(ids, dtype=np.int64))
        )
        if masks is not None:
            pairs = zip(output.token_ids, masks, strict=True)
            output = dataclasses.replace(
                output, token_ids=[_masked(*pair) for pair in pairs]
            )
        self._drawn = output.token_ids
        return output

    def run(self, step: StepInput) -> StepOutput:
        self.num_steps += 1
        self.num_tokens += len(step.token_ids)
        self.max_tokens_in_step = max(self.max_tokens_in_step, len(step.token_ids))
        batch = step.attention_batch(self.block_size)
        assert not (batch.slot_mapping < self.block_size).any(), (
            "wrote to the null block"
        )
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping), (
            "a slot twice"
        )
        self.pool.reshape(-1)[batch.slot_mapping] = step.token_ids
        for setup in step.shapes.setups if step.shapes else []:
            self._setups[setup.row] = setup
            self._counted[setup.row] = [*setup.prompt_ids, *setup.output_ids]
        tokens = [self._draw(step, at) for at in range(len(step.sampling))]
        scores = [self._score(step, wanted) for wanted in step.scores]
        return StepOutput(tokens, [None] * len(tokens), scores)

    def _draw(self, step: StepInput, at: int) -> int:
        """A token by the context; its state row, if any, must have counted just that."""
        context = self.context(step, int(step.sample_rows[at]))
        token = next_token(context, step.sampling[at].choice_index)
        row = step.shapes.rows[at] if step.shapes else NO_ROW
        if step.shapes is None or row == NO_ROW:
            return token
        setup = self._setups[row]
        token = allowed(token, setup.stop_token_ids if step.shapes.bans[at] else ())
        if setup.penalties is not None:
            assert self._counted[row] == context, "penalties of another text"
            self._counted[row].append(token)
        return token

    def _score(self, step: StepInput, wanted: ScoredRows) -> list[TokenLogprobs]:
        """Each target's "logprob" says what context it was found in, as KV has it."""
        row = int(
            np.searchsorted(np.cumsum(step.query_lens), wanted.first_row, side="right")
        )
        first = int(step.positions[wanted.first_row]) + 1
        context = self.context(step, row)
        return [
            expected_score(context[: first + at], target, wanted.num_top)
            for at, target in enumerate(wanted.targets)
        ]

    def context(self, step: StepInput, row: int) -> list[int]:
        length = int(step.context_lens[row])
        num_blocks = -(-length // self.block_size)
        slots = self.pool[step.block_tables[row, :num_blocks]].reshape(-1)[:length]
        assert (slots >= 0).all(), "read a slot that was never written"
        result: list[int] = slots.tolist()
        return result


def chained(seen: Sequence[int], token: int) -> int:
    """What the slots of a token hold that has seen these: it stands for all of them."""
    data = np.array([*seen, token], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def seen(tokens: Sequence[int], groups: KVGroups) -> list[int]:
    """What the last of these tokens sees, by group: what the slots in its window hold."""
    chain: list[int] = []
    for token in tokens:
        before = [
            v
            for w in groups.windows
            for v in chain[max(0, len(chain) + 1 - w) if w else 0 :]
        ]
        chain.append(chained(before, token))
    return [value for window in groups.windows for value in chain[-(window or 0) :]]


def windowed_output(
    prompt: Sequence[int], num: int, groups: KVGroups, choice: int = 0
) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(seen(tokens, groups), choice))
    return tokens[len(prompt) :]


class WindowedExecutor(ShadowExecutor):
    """Of several KV groups: each reads its own blocks, as far back as its window reaches. A slot
    stands for its whole prefix, so that a token drawn after another one's KV is another token."""

    def __init__(
        self, num_blocks: int, block_size: int, depth: int, groups: KVGroups
    ) -> None:
        super().__init__(num_blocks, block_size, depth)
        self.groups, self.num_groups = groups, groups.count

    def run(self, step: StepInput) -> StepOutput:
        self.num_steps += 1
        self.num_tokens += len(step.token_ids)
        ends = np.cumsum(step.query_lens)
        for row, (length, stop) in enumerate(
            zip(step.query_lens, step.context_lens, strict=True)
        ):
            for at in range(stop - length, stop):
                before = self.visible(step, row, at, at + 1)
                value = chained(before, int(step.token_ids[ends[row] - stop + at]))
                for group in range(self.num_groups):
                    self.pool[self.slot(step, row, group, at)] = value
        rows = zip(step.sample_rows.tolist(), step.sampling, strict=True)
        lens = step.context_lens
        drawn = [
            next_token(self.visible(step, row, lens[row], lens[row]), one.choice_index)
            for row, one in rows
        ]
        return StepOutput(drawn, [None] * len(drawn))

    def slot(self, step: StepInput, row: int, group: int, at: int) -> tuple[int, int]:
        block, offset = divmod(at, self.block_size)
        found = int(step.block_tables[row, block * self.num_groups + group])
        assert found != NULL_BLOCK, f"group {group} reads token {at}, which was dropped"
        return found, offset

    def visible(self, step: StepInput, row: int, stop: int, end: int) -> list[int]:
        """What is before `stop` in the window that ends at `end`."""
        firsts = [
            max(0, end - window) if window else 0 for window in self.groups.windows
        ]
        values = [
            int(self.pool[self.slot(step, row, group, at)])
            for group, first in enumerate(firsts)
            for at in range(first, stop)
        ]
        assert min(values, default=0) >= 0, "read a slot that was never written"
        return values


class MemoryTransport:
    """Collects what the core sends."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.compiled: list[str] = []
        self.stats: dict[str, float] = {}

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        return [], True

    def wake(self) -> None:
        pass

    def send(self, message: EngineOutput) -> None:
        match message:
            case Outputs(deltas, compiled):
                self.deltas += deltas
                self.compiled += compiled
            case EngineStats(values):
                self.stats = values

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        mine = [
            d for d in self.deltas if (d.request_id, d.choice) == (request_id, choice)
        ]
        return [t for d in mine for t in d.token_ids]

    def prompt_logprobs(self, request_id: str) -> list[TokenLogprobs | None]:
        mine = [d for d in self.deltas if d.request_id == request_id]
        return [row for d in mine for row in d.prompt_logprobs or []]

    def terminals(self, request_id: str) -> list[TokenDelta]:
        mine = [d for d in self.deltas if d.request_id == request_id]
        return [d for d in mine if d.finish_reason is not None or d.error is not None]


def make_core(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    prefix_caching: bool = True,
    role: KVConnector | None = None,
    depth: int = 0,
    executor: ShadowExecutor | None = None,
    itl_target_s: float | None = None,
    groups: KVGroups = ONE_GROUP,
) -> tuple[EngineCore, ShadowExecutor, MemoryTransport]:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, block_size=block_size, itl_target_s=itl_target_s,
        groups=groups,
    )  # fmt: skip
    scheduler = Scheduler(limits, num_blocks, cached=prefix_caching)
    if executor is None and groups.drops_blocks:
        executor = WindowedExecutor(num_blocks, block_size, depth, groups)
    executor = executor or ShadowExecutor(num_blocks, block_size, depth)
    if isinstance(executor, ShadowExecutor):
        _watch(scheduler.allocator, executor)
    transport = MemoryTransport()
    grammars = CoreGrammars(None, timeout_s=2.0)  # type: ignore[arg-type]
    core = EngineCore(scheduler, executor, role or KVConnector(), transport, grammars)
    return core, executor, transport


def _watch(allocator: BlockAllocator, executor: ShadowExecutor) -> None:
    """I8: no block is handed out while a launched step refers to it."""
    allocate = allocator.allocate

    def checked(num_blocks: int) -> list[int]:
        taken = allocate(num_blocks)
        assert not executor.blocks_in_flight().intersection(taken), (
            "a step may still write there"
        )
        return taken

    allocator.allocate = checked  # type: ignore[method-assign]


def masks_of(
    compiler: GrammarCompiler, states: Sequence[GrammarState | None]
) -> Int32s:
    """Of one step, however long they take."""
    for state in states:
        if state is not None:
            state._advance([], fill=True)
    return step_masks(states, compiler.vocab_size)


def add(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    **members: object,
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        token_ids=list(prompt),
        sampling=sampling or SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        **members,  # type: ignore[arg-type]
    )


def run_until_idle(core: EngineCore, *messages: EngineInput) -> None:
    """A round with these, then rounds until nothing progresses. A core that never settles fails
    here."""
    if messages:
        core.round(messages)
    for _ in range(2000):
        if not core.round([]) and not awaited_masks(core):
            return
        core.scheduler.check_integrity()
    raise AssertionError("the core never came to rest")


def awaited_masks(core: EngineCore) -> bool:
    """Whether sequences sat out; they have no more reason to."""
    sitting = list(core.grammars.awaiting_mask.values())
    for work, _ in sitting:
        work.result(60.0)
    return bool(sitting)


def assert_all_blocks_free(core: EngineCore) -> None:
    counts = core.scheduler.allocator.counts()
    core.scheduler.check_integrity()
    home = counts[BlockState.FREE] + counts[BlockState.CACHED]
    assert home == core.scheduler.allocator.capacity, counts
