"""A shadow of a model: its KV cache holds tokens, so wrong KV shows in the output.

Each slot of the pool stores the token that was written to it. The next token is a hash
of the whole context, read back through the block table. Any mistake with blocks,
positions, prefix hits or preemption therefore changes the output. `expected_output`
computes the same output without a cache.
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
from engine.core.budget.step_target import StepTarget
from engine.core.connector import KVConnector
from engine.core.core import EngineCore
from engine.core.core_grammar import CoreGrammars
from engine.core.logits_processing import NO_ROW, SamplingRow
from engine.core.scheduler import Scheduler
from engine.core.tables import SchedulerLimits
from engine.sampling.token_masks import step_masks
from engine.speculation.drafter import Drafter
from engine.speculation.policy import SpeculationPolicy
from engine.speculation.speculator import Speculator
from engine.text.grammar import GrammarCompiler, GrammarState
from kvcache.blocks import NULL_BLOCK, BlockAllocator, BlockState
from kvcache.groups import ONE_GROUP, KVGroups
from protocol.messages import AddRequest, EngineInput, SamplingParams, TokenLogprobs
from tests.rigs.memory_transport import MemoryTransport as MemoryTransport

VOCAB = 50


def next_token(context: Sequence[int], choice: int = 0) -> int:
    """Return the token that the shadow generates after a context, in this choice."""
    hashed = list(context)
    if choice > 0:
        hashed.append(choice)
    data = np.asarray(hashed, dtype=np.int64).tobytes()
    digest = hashlib.blake2b(data, digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def allowed(token: int, banned: Sequence[int]) -> int:
    """Return the token, or if it is banned, the next one (modulo VOCAB) that is not."""
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def _masked(token: int, mask: Int32s) -> int:
    """Return the token if the mask allows all tokens, else one of the allowed
    tokens.
    """
    if (mask == -1).all():
        return token
    allowed_tokens = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
    return int(allowed_tokens[token % len(allowed_tokens)])


def expected_score(context: Sequence[int], target: int, num_top: int) -> TokenLogprobs:
    """Return the "logprob" of a target token: a hash of the context and the target."""
    value = -float(next_token([*context, target]))
    return TokenLogprobs(value, [target] * num_top, [value] * num_top)


def expected_scores(prompt: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
    """Return the scores of all prompt tokens. The score of the first token is None."""
    rows = [
        expected_score(prompt[:index], prompt[index], num_top)
        for index in range(1, len(prompt))
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
        banned = stop if num_outputs < min_tokens else ()
        tokens.append(allowed(next_token(tokens, choice), banned))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class _ShadowStep:
    """A launched step, which runs when its result is requested.

    This is the worst case: a real device may run the step at any earlier time.
    """

    def __init__(self, executor: "ShadowExecutor", step: StepInput) -> None:
        self.step = step
        self._executor = executor
        self._masks: Int32s | None = None

    def draw(self, masks: Int32s) -> None:
        assert self.step.is_masked and self._masks is None
        is_last = self._executor.in_flight[-1] is self
        assert is_last, "another step was launched before the draw"
        self._masks = masks.copy()

    @property
    def blocks(self) -> set[int]:
        """The blocks that the step reads or writes."""
        num_blocks = -(-self.step.context_lens // self._executor.block_size)
        lens = num_blocks * self._executor.num_groups
        rows = zip(self.step.block_tables, lens.tolist(), strict=True)
        return {int(block) for row, length in rows for block in row[:length]}

    def has_ended(self) -> bool:
        return self._executor.has_ended()

    def result(self) -> StepOutput:
        is_oldest = self._executor.in_flight.popleft() is self
        assert is_oldest, "results were requested out of order"
        has_masks = self._masks is not None
        assert self.step.is_masked == has_masks, "masks are missing or superfluous"
        return self._executor.execute(self.step, self._masks)


class ShadowExecutor:
    """Executes steps on a pool of token ids. A slot that was never written holds -1.

    Attributes:
        num_steps_ahead: number of steps launched while an earlier one was in flight.
    """

    def __init__(self, num_blocks: int, block_size: int, depth: int = 0) -> None:
        self.depth = depth
        self.in_flight: deque[_ShadowStep] = deque()
        self.num_steps_ahead = 0
        self._drawn: list[int] = []  # tokens of the last step that ran
        self._setups: dict[int, SamplingRow] = {}  # by state row
        # The prompt and the drawn tokens, by state row.
        self._counted: dict[int, list[int]] = {}
        self.pool = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.block_size = block_size
        self.num_groups = 1
        self.num_steps = 0
        self.num_tokens = 0
        self.max_tokens_in_step = 0

    def launch(self, step: StepInput) -> _ShadowStep:
        assert len(self.in_flight) <= self.depth
        if self.in_flight:
            self.num_steps_ahead += 1
        # Convert to bytes and back, as an engine does for all ranks except rank 0.
        launched = _ShadowStep(self, step_from_bytes(step_to_bytes(step)))
        self.in_flight.append(launched)
        return launched

    def has_ended(self) -> bool:
        """Whether the oldest step in flight has ended. Subclasses may return false."""
        return True

    def blocks_in_flight(self) -> set[int]:
        return {block for step in self.in_flight for block in step.blocks}

    def execute(self, step: StepInput, masks: Int32s | None) -> StepOutput:
        ids = [
            self._drawn[-1 - token] if token < 0 else token
            for token in step.token_ids.tolist()
        ]
        output = self.run(
            dataclasses.replace(step, token_ids=np.array(ids, dtype=np.int64))
        )
        if masks is not None:
            masked = [
                _masked(token, mask)
                for token, mask in zip(output.token_ids, masks, strict=True)
            ]
            output = dataclasses.replace(output, token_ids=masked)
        self._drawn = output.token_ids
        return output

    def run(self, step: StepInput) -> StepOutput:
        self.num_steps += 1
        self.num_tokens += len(step.token_ids)
        self.max_tokens_in_step = max(self.max_tokens_in_step, len(step.token_ids))
        batch = step.attention_batch(self.block_size)
        slots = batch.slot_mapping
        assert not (slots < self.block_size).any(), "wrote to the null block"
        assert len(set(slots.tolist())) == len(slots), "wrote to a slot twice"
        self.pool.reshape(-1)[slots] = step.token_ids
        for setup in step.logit_changes.setups if step.logit_changes else []:
            self._setups[setup.row] = setup
            self._counted[setup.row] = [*setup.prompt_ids, *setup.output_ids]
        for uncounted in step.logit_changes.uncounted if step.logit_changes else []:
            self._counted[uncounted.row] += uncounted.token_ids
        tokens = [self._draw(step, index) for index in range(len(step.sampling))]
        self._count_draws(step, tokens)
        scores = [self._score(step, rows) for rows in step.scores]
        return StepOutput(tokens, [None] * len(tokens), scores)

    def _draw(self, step: StepInput, index: int) -> int:
        """Return the next token of a sampled row.

        If the row has penalties, its state row must have counted exactly the tokens of
        its context.
        """
        context = self.context(step, int(step.sampled_sequences[index]))
        token = next_token(context, step.sampling[index].choice_index)
        changes = step.logit_changes
        row = changes.rows[index] if changes else NO_ROW
        if changes is None or row == NO_ROW:
            return token
        setup = self._setups[row]
        token = allowed(token, setup.stop_token_ids if changes.bans[index] else ())
        if setup.penalties is not None:
            proposed = changes.proposed.get(index, [])
            is_exact = [*self._counted[row], *proposed] == context
            assert is_exact, "penalties of another context"
        return token

    def _count_draws(self, step: StepInput, tokens: Sequence[int]) -> None:
        """Count the drawn tokens for later penalties, except in rows with proposals."""
        changes = step.logit_changes
        if changes is None:
            return
        for index, row in enumerate(changes.rows):
            if row != NO_ROW and index not in changes.proposed:
                self._counted[row].append(tokens[index])

    def _score(self, step: StepInput, rows: ScoredRows) -> list[TokenLogprobs]:
        """Return the scores of the target tokens of one sequence.

        A target's "logprob" is a hash of the context that the KV holds.
        """
        ends = np.cumsum(step.query_lens)
        row = int(np.searchsorted(ends, rows.first_row, side="right"))
        first = int(step.positions[rows.first_row]) + 1
        context = self.context(step, row)
        return [
            expected_score(context[: first + index], target, rows.num_top)
            for index, target in enumerate(rows.targets)
        ]

    def context(self, step: StepInput, row: int) -> list[int]:
        length = int(step.context_lens[row])
        num_blocks = -(-length // self.block_size)
        slots = self.pool[step.block_tables[row, :num_blocks]].reshape(-1)[:length]
        assert (slots >= 0).all(), "read a slot that was never written"
        result: list[int] = slots.tolist()
        return result


def chained(seen: Sequence[int], token: int) -> int:
    """Return the number that the slots of a token hold.

    The number is a hash of the token and of everything that the token attends to.
    """
    data = np.array([*seen, token], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def seen(tokens: Sequence[int], groups: KVGroups) -> list[int]:
    """Return the contents of the slots that the last of these tokens attends to.

    These are the slots in the windows of all groups, one group after the other.
    """
    chain: list[int] = []
    for token in tokens:
        before: list[int] = []
        for window in groups.windows:
            first = max(0, len(chain) + 1 - window) if window else 0
            before += chain[first:]
        chain.append(chained(before, token))
    return [value for window in groups.windows for value in chain[-(window or 0) :]]


def windowed_output(
    prompt: Sequence[int], num_tokens: int, groups: KVGroups, choice: int = 0
) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(seen(tokens, groups), choice))
    return tokens[len(prompt) :]


class WindowedExecutor(ShadowExecutor):
    """A shadow executor with several KV groups.

    Each group reads its own blocks, as far back as its window reaches. A slot holds a
    hash of its token's whole prefix, so KV of a wrong prefix leads to a wrong token.
    """

    def __init__(
        self, num_blocks: int, block_size: int, depth: int, groups: KVGroups
    ) -> None:
        super().__init__(num_blocks, block_size, depth)
        self.groups = groups
        self.num_groups = groups.count

    def run(self, step: StepInput) -> StepOutput:
        self.num_steps += 1
        self.num_tokens += len(step.token_ids)
        ends = np.cumsum(step.query_lens)
        lens = zip(step.query_lens, step.context_lens, strict=True)
        for row, (length, stop) in enumerate(lens):
            for position in range(stop - length, stop):
                before = self.visible(step, row, position, position + 1)
                token = int(step.token_ids[ends[row] - stop + position])
                value = chained(before, token)
                for group in range(self.num_groups):
                    self.pool[self.slot(step, row, group, position)] = value
        drawn = []
        for row, params in zip(
            step.sampled_sequences.tolist(), step.sampling, strict=True
        ):
            length = step.context_lens[row]
            context = self.visible(step, row, length, length)
            drawn.append(next_token(context, params.choice_index))
        return StepOutput(drawn, [None] * len(drawn))

    def slot(
        self, step: StepInput, row: int, group: int, position: int
    ) -> tuple[int, int]:
        """Return the block and the offset in it of a position, in one group."""
        index, offset = divmod(position, self.block_size)
        block = int(step.block_tables[row, index * self.num_groups + group])
        is_dropped = block == NULL_BLOCK
        assert not is_dropped, f"group {group} reads token {position}, which it dropped"
        return block, offset

    def visible(self, step: StepInput, row: int, stop: int, end: int) -> list[int]:
        """Return slot contents before `stop` in windows that end at `end`, by group."""
        firsts = [
            max(0, end - window) if window else 0 for window in self.groups.windows
        ]
        values = [
            int(self.pool[self.slot(step, row, group, position)])
            for group, first in enumerate(firsts)
            for position in range(first, stop)
        ]
        assert min(values, default=0) >= 0, "read a slot that was never written"
        return values


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
    drafters: Sequence[Drafter] = (),
    policy: SpeculationPolicy | None = None,
) -> tuple[EngineCore, ShadowExecutor, MemoryTransport]:
    """Return an engine core, its executor and its transport."""
    step_target = None
    if itl_target_s is not None:
        step_target = StepTarget(itl_target_s, is_explicit=True)
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        step_target=step_target,
        groups=groups,
        max_proposals=16 if drafters else 0,
    )
    scheduler = Scheduler(limits, num_blocks, caches_prefixes=prefix_caching)
    if executor is None and groups.drops_blocks:
        executor = WindowedExecutor(num_blocks, block_size, depth, groups)
    executor = executor or ShadowExecutor(num_blocks, block_size, depth)
    if isinstance(executor, ShadowExecutor):
        _watch(scheduler.allocator, executor)
    transport = MemoryTransport()
    grammars = CoreGrammars(None, timeout_s=2.0)  # type: ignore[arg-type]
    core = EngineCore(
        scheduler,
        executor,
        role or KVConnector(),
        transport,
        grammars,
        Speculator(limits, drafters, policy=policy),
    )
    return core, executor, transport


def _watch(allocator: BlockAllocator, executor: ShadowExecutor) -> None:
    """Make `allocate` check invariant I8 of docs/design.md: no block that a step in
    flight uses is allocated.
    """
    allocate = allocator.allocate

    def checked(num_blocks: int) -> list[int]:
        blocks = allocate(num_blocks)
        conflicts = executor.blocks_in_flight().intersection(blocks)
        assert not conflicts, "a step in flight may still write to these blocks"
        return blocks

    allocator.allocate = checked  # type: ignore[method-assign]


def masks_of(
    compiler: GrammarCompiler, states: Sequence[GrammarState | None]
) -> Int32s:
    """Return the masks of one step. Wait for them without a time limit."""
    for state in states:
        if state is not None:
            state._advance([], fill=True)
    rows = [None if state is None else state.row for state in states]
    return step_masks(rows, compiler.vocab_size)


def add(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams | None = None,
    **fields: object,
) -> AddRequest:
    """Return a request for `EngineCore`."""
    return AddRequest(
        request_id=request_id,
        token_ids=list(prompt),
        sampling=sampling or SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        **fields,  # type: ignore[arg-type]
    )


def run_until_idle(core: EngineCore, *messages: EngineInput) -> None:
    """Run a round with these messages, then rounds until one makes no progress.

    Raises:
        AssertionError: the core still makes progress after 2,000 rounds.
    """
    if messages:
        core.round(messages)
    for _ in range(2000):
        if not core.round([]) and not wait_for_masks(core):
            return
        core.scheduler.check_integrity()
    raise AssertionError("the core still makes progress after 2,000 rounds")


def wait_for_masks(core: EngineCore) -> bool:
    """Wait for the masks of skipped sequences. Return whether there were any."""
    sitting = list(core.grammars.awaiting_mask.values())
    for _, work, _ in sitting:
        work.result(60.0)
    return bool(sitting)


def assert_all_blocks_free(core: EngineCore) -> None:
    """Assert that every block is free or cached."""
    counts = core.scheduler.allocator.counts()
    core.scheduler.check_integrity()
    num_available = counts[BlockState.FREE] + counts[BlockState.CACHED]
    assert num_available == core.scheduler.allocator.capacity, counts
