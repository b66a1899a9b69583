"""Decides which sequences compute which tokens in the next step. The decisions depend
only on the sequences, the block allocator, the prefix index and measured durations.

Policy, in order:
1. Sequences that decode come first, so that a long prompt delays them by at most one
   chunk.
2. Running prompts get the rest of the token budget, in order of admission. Up to half
   of this rest is reserved for much shorter waiting prompts (waiting.py). If sequences
   decode, a target duration may limit the budget for prompts (budget/prompt_limit.py).
3. Waiting sequences are admitted in the order of waiting.py, when blocks for all their
   tokens are available. A sequence shares the blocks that the prefix index has, and
   allocates the other blocks.

Later requests may be admitted before a waiting sequence S in three cases: S needs more
blocks than are outside quarantine (kvcache/blocks.py); S needs a pull while pulls write
to too many blocks; or a running sequence computes a prefix of S (prefix_sharing.py).

When a running sequence needs a block and none is available, the sequence admitted last
is preempted: its blocks are released, and it waits at the head of the queue. Requests
that the pool cannot hold are refused (worker/memory.py), so every sequence finishes. A
sequence that does not fit in spite of this is `stuck` (plan.py).

A sequence with a `pull` is not computed. Its new blocks become RECEIVING, and the pull
fills them. `finish_pull`, `recompute_in_place` or `abandon_pull` ends this state.

A step may be planned while launched steps have not finished (step_ledger.py). A
sequence in an unfinished step is never preempted (`may_preempt`).
"""

from collections import deque
from collections.abc import Sequence as Sequenceable

from engine.core.budget.prompt_limit import PromptLimit
from engine.core.budget.step_times import StepTimes
from engine.core.plan import Plan as Plan
from engine.core.plan import Scheduled as Scheduled
from engine.core.prefix_sharing import PrefixSharing
from engine.core.sequence import Phase, Sequence
from engine.core.state.choices import ChoiceState
from engine.core.step_ledger import StepLedger
from engine.core.tables import BlockTables
from engine.core.tables import SchedulerLimits as SchedulerLimits
from engine.core.waiting import MAX_OVERTAKEN, enqueue, select_short_prompts, work_of
from kvcache.blocks import BlockAllocator, BlockState
from kvcache.groups import without_null_blocks
from kvcache.prefix import PrefixCursor, PrefixIndex


class Scheduler:
    """Owns the queue, the running set and the receiving set, and their blocks.

    Attributes:
        prefix: the prefix index; None if caching is off.
        waiting: sequences that wait for blocks, in order.
        running: sequences that take part in steps, in order of admission.
        receiving: sequences with blocks that a pull writes to, by request id.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        *,
        caches_prefixes: bool,
        step_times: StepTimes | None = None,  # None if they were not measured
    ) -> None:
        self.limits = limits
        self.allocator = BlockAllocator(num_blocks)
        self.prefix: PrefixIndex | None = None
        if caches_prefixes:
            self.prefix = PrefixIndex(self.allocator, limits.block_size, limits.groups)
        self.tables = BlockTables(limits)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.receiving: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self._prompt_limit = PromptLimit(
            limits.step_target, limits.max_num_batched_tokens, step_times
        )
        self.ledger = StepLedger(self.allocator, self._prompt_limit.budget)
        self._sharing = PrefixSharing(limits, self.tables, self.prefix)

    @property
    def is_deadlocked(self) -> bool:
        """Whether waiting requests cannot get blocks until leases or hanging READs end.

        False while any sequence receives KV. If no sequence runs either, True as soon
        as a request waits. If sequences run, True if the first waiting request lacks
        blocks, and would have enough if all leased blocks were returned.
        """
        if not self.waiting or self.receiving:
            return False
        if not self.running:
            return True
        first = self.waiting[0]
        needed = self.tables.num_blocks_for(first, first.num_to_admit)
        needed += self._num_spare(first)
        num_missing = needed - self.allocator.num_available
        return 0 < num_missing <= self.allocator.counts()[BlockState.LEASED]

    def is_blocked_on_quarantine(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence needs more blocks than are outside quarantine, so
        that hanging READs must end first."""
        num_quarantined = self.allocator.num_quarantined
        if not num_quarantined:
            return False
        needed = self.tables.num_blocks_for(sequence, len(sequence.token_ids))
        return needed > self.allocator.capacity - num_quarantined

    def add(self, sequence: Sequence) -> None:
        is_too_long = len(sequence.token_ids) > self.limits.max_model_len
        has_too_many_choices = len(sequence.choices) > self.limits.max_num_seqs
        assert not is_too_long, "a sequence that is too long would wait forever"
        assert not has_too_many_choices, "too many choices would wait forever"
        assert sequence.phase is Phase.NEW, "the sequence was added before"
        sequence.phase = Phase.WAITING
        self._prompt_limit.on_queued(sequence)
        enqueue(self.waiting, sequence)

    # -- one round ----------------------------------------------------------------

    def schedule(self) -> Plan:
        """Plans the next step. Also admits waiting sequences, and preempts running
        ones. If no token can be computed now, the plan's `scheduled` is empty."""
        proposing = [s for s in self.running if s.speculation.proposals]
        if proposing:
            needed = self._num_blocks_for_next_step()
            num_spare = self.allocator.num_available - needed
            self.tables.drop_proposals_without_blocks(proposing, num_spare)
        plan = Plan(self.limits.max_num_batched_tokens)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if sequence.awaits_result(self.limits.max_model_len):
                continue
            if sequence.is_decoding:
                decoding.append(sequence)
            else:
                prefilling.append(sequence)
        self._schedule_running(decoding, plan)
        if prefilling or self.waiting:
            self._limit_prompts(plan, prefilling)
        num_reserved = self._reserve_for_short_prompts(prefilling, plan.budget)
        plan.budget -= num_reserved
        self._schedule_running(prefilling, plan)
        plan.budget += num_reserved
        if not plan.preempted:
            self._admit_waiting(plan)
        return plan

    def _limit_prompts(self, plan: Plan, prefilling: list[Sequence]) -> None:
        """Limits the prompt tokens of a step that also decodes. A sequence with a pull
        in progress counts as a decoding sequence, because it will decode soon."""
        if (plan.scheduled or self.receiving) and self._prompt_limit.is_active:
            limit = self._prompt_limit.prompt_tokens(
                plan.scheduled, prefilling, self._waiting_if_admissible()
            )
            plan.budget = min(plan.budget, limit)

    def _waiting_if_admissible(self) -> Sequenceable[Sequence]:
        """The waiting prompts; empty if the first one cannot be admitted yet."""
        if not self.waiting or self._num_choices() >= self.limits.max_num_seqs:
            return ()
        first = self.waiting[0]
        num_blocks = self.tables.num_blocks_for(first, len(first.token_ids))
        fits = self.allocator.can_allocate(num_blocks + self._num_spare(first))
        return self.waiting if fits else ()

    def _reserve_for_short_prompts(
        self, prefilling: list[Sequence], budget: int
    ) -> int:
        """Returns the number of tokens of the step to reserve for short waiting
        prompts; 0 if not all of these prompts can be admitted."""
        prefill_tokens = sum(work_of(s, s.num_uncomputed) for s in prefilling)
        prompts = select_short_prompts(self.waiting, prefill_tokens, budget)
        needed = len(self.running) + len(prompts)
        num_tokens = 0
        for sequence in prompts:
            num_tokens += len(sequence.token_ids)
            needed += self.tables.num_blocks_for(sequence, len(sequence.token_ids))
        if not self.allocator.can_allocate(needed):
            return 0
        if self._num_choices() + len(prompts) > self.limits.max_num_seqs:
            return 0
        return num_tokens

    def _schedule_running(self, sequences: list[Sequence], plan: Plan) -> None:
        for sequence in sequences:
            if plan.budget == 0:
                break
            if sequence.phase is not Phase.RUNNING:
                continue  # preempted earlier in this round
            num_tokens = min(sequence.num_uncomputed, plan.budget)
            proposals = sequence.speculation.take_proposals()
            proposals = proposals[: plan.budget - num_tokens]
            num_with_kv = num_tokens + len(proposals)
            if self._allocate_for_step(sequence, num_with_kv, plan):
                plan.add(sequence, num_tokens, proposals)

    def admit_remote(self) -> Plan:
        """Admits the requests with a pull at the head of the queue. Plans no step."""
        plan = Plan(budget=0)
        self._admit_waiting(plan)
        return plan

    def _allocate_for_step(
        self, sequence: Sequence, num_tokens: int, plan: Plan
    ) -> bool:
        """Allocates the blocks that a sequence needs in a step, and preempts the latest
        admitted sequences if necessary. Returns False if the sequence itself was
        preempted."""
        entries = self.tables.entries_for_next(sequence, num_tokens)
        num_blocks = len(entries)
        while not self.allocator.can_allocate(num_blocks):
            victim = self.running[-1]
            plan.remove(victim)
            self._preempt(victim, plan)
            if victim is sequence:
                if self.allocator.is_all_available:
                    plan.stuck.append(sequence)
                return False
        blocks = self.allocator.allocate(num_blocks)
        self.limits.groups.fill_entries(sequence.block_ids, entries, blocks)
        return True

    def may_preempt(self) -> bool:
        """Whether the next `schedule` may preempt sequences, because the running
        sequences may need more blocks than are available. If so, all launched steps
        must have finished before `schedule` is called."""
        return not self.allocator.can_allocate(self._num_blocks_for_next_step())

    def _num_blocks_for_next_step(self) -> int:
        """The largest number of blocks that the running sequences may need for their
        next step, without proposals."""
        budget = self.limits.max_num_batched_tokens
        needed = 0
        for sequence in self.running:
            num_tokens = min(sequence.num_uncomputed, budget)
            needed += len(self.tables.entries_for_next(sequence, num_tokens))
        return needed

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        assert not self.ledger.is_in_launched_step(victim), (
            "preempted while a launched step uses its blocks"
        )
        self.running.remove(victim)
        self._release_blocks(victim)
        self.requeue(victim)
        plan.preempted.append(victim)
        self.num_preemptions += 1

    # -- admission ----------------------------------------------------------------

    def _admit_waiting(self, plan: Plan) -> None:
        num_passed = 0
        pulls_must_wait = False
        max_choices = self.limits.max_num_seqs - self._num_choices()
        while num_passed < len(self.waiting):
            sequence = self.waiting[num_passed]
            is_remote = sequence.pull is not None
            num_choices = 1 + len(sequence.choices.children)
            if num_choices > max_choices or not (is_remote or plan.budget):
                return
            is_blocked = self.is_blocked_on_quarantine(sequence)
            if is_remote and not (is_blocked or pulls_must_wait):
                needed = self.tables.num_blocks_for(sequence, sequence.num_to_admit)
                pulls_must_wait = not self.allocator.can_receive(needed)
            if (
                is_blocked
                or (is_remote and pulls_must_wait)
                or self._sharing.should_wait(sequence, self.running)
            ):
                num_passed += 1
                continue
            if not self._admit(sequence, plan.budget):
                if self.allocator.is_all_available:
                    plan.stuck.append(sequence)
                return
            del self.waiting[num_passed]
            max_choices -= num_choices
            plan.admitted.append(sequence)
            if is_remote:
                plan.receiving.append(sequence)
            else:
                self._run(sequence)
                plan.add(sequence, min(sequence.num_uncomputed, plan.budget))

    def _num_choices(self) -> int:
        """The number of choices that run or receive KV, and of their children."""
        sequences = (*self.running, *self.receiving.values())
        return sum(1 + len(sequence.choices.children) for sequence in sequences)

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Gives a waiting sequence its blocks: shares cached blocks, and allocates the
        other blocks. If there are too few blocks, changes nothing and returns False."""
        num_tokens = sequence.num_to_admit
        table = self._sharing.match(sequence)
        start = self.tables.num_tokens(table)
        hits = without_null_blocks(table)
        num_idle = sum(
            self.allocator.state(block) is BlockState.CACHED for block in hits
        )
        num_free = self.allocator.num_available - num_idle - self._num_spare(sequence)
        # A long sequence that does not fit is tried in each round, so a cheap check
        # comes first.
        if num_free < self.tables.num_blocks_for(sequence, num_tokens) - len(hits):
            return False
        entries = self.tables.entries_to_admit(sequence, table, num_tokens, budget)
        if num_free < len(entries):
            return False
        self.allocator.share(hits)
        fresh_blocks = self.allocator.allocate(len(entries))
        self.limits.groups.fill_entries(table, entries, fresh_blocks)
        sequence.block_ids = table
        sequence.num_computed = start
        if self.limits.groups.drops_blocks:
            sequence.prefix_cursor = PrefixCursor()  # publish from the start again
        sequence.accounting.count_admission(start)
        if sequence.pull is not None:
            self.allocator.receive(fresh_blocks)
            sequence.phase = Phase.RECEIVING
            self.receiving[sequence.request_id] = sequence
        return True

    def _num_spare(self, sequence: Sequence) -> int:
        """The number of blocks that must stay available when a sequence is admitted:
        one for each running sequence and each child, so that the admission does not
        cause a preemption in the next step.
        """
        if not self.running:
            return 0
        return len(self.running) + len(sequence.choices.children)

    def _run(self, sequence: Sequence) -> None:
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Puts a sequence that has lost its blocks at the head of the queue, after a
        preemption or a failed pull. No request overtakes the sequence."""
        sequence.phase = Phase.WAITING
        self._prompt_limit.on_queued(sequence)
        sequence.num_overtaken = MAX_OVERTAKEN
        self.waiting.appendleft(sequence)

    # -- pulls --------------------------------------------------------------------

    def finish_pull(self, sequence: Sequence, *, is_converted: bool = False) -> None:
        """Starts to run a sequence after a successful pull. All READs must have ended.

        If the KV was converted from another dtype or other scales, several choices use
        only the blocks that they all share. Each choice computes the rest of the prompt
        itself, so that all choices have equal KV.
        """
        assert sequence.pull is not None
        children = sequence.choices.children
        num_cached = sequence.num_computed
        num_to_receive = sequence.pull.num_to_receive(len(sequence.token_ids))
        num_received = max(num_to_receive, num_cached)
        if is_converted and children:
            num_shared = min(self._num_forked(sequence, child) for child in children)
            num_received = max(min(num_received, num_shared), num_cached)
        self.tables.mark_partial_blocks(sequence)
        self.recompute_in_place(sequence)
        sequence.accounting.count_pull(num_cached, num_received)
        sequence.num_computed = num_received
        self._publish(sequence, num_cached)
        self.fork_choices(sequence)

    def recompute_in_place(self, sequence: Sequence) -> None:
        """Ends the pull of a sequence, and starts to run the sequence in its blocks.
        All READs must have ended."""
        self.allocator.received(self.tables.fresh_blocks(sequence))
        del self.receiving[sequence.request_id]
        sequence.pull = None
        self._run(sequence)

    def abandon_pull(
        self, sequence: Sequence, *, quarantine: bool = False
    ) -> list[int]:
        """Takes the blocks from a receiving sequence, while its READs may still write.

        Returns the blocks that the READs may write to. With `quarantine` these blocks
        become QUARANTINED, otherwise they stay RECEIVING. The caller frees the blocks
        when the READs have ended.
        """
        fresh_blocks = self.tables.fresh_blocks(sequence)
        blocks = without_null_blocks(sequence.block_ids)
        if quarantine:
            self.allocator.quarantine(fresh_blocks)
        self.allocator.release(blocks[: len(blocks) - len(fresh_blocks)])
        del self.receiving[sequence.request_id]
        sequence.reset_blocks()
        return fresh_blocks

    # -- choices ------------------------------------------------------------------

    def fork_choices(self, parent: Sequence) -> None:
        """Forks the children off their parent, if the parent has the KV of the whole
        prompt. A parent that ran only for its children then finishes."""
        if parent.num_computed < parent.num_prompt_tokens:
            return
        for child in tuple(parent.choices.children):
            self._fork(parent, child)
        is_prefilling_only = parent.choice_state is ChoiceState.PREFILLS_FOR_CHILDREN
        if is_prefilling_only and parent.phase is Phase.RUNNING:
            parent.choices.end_prefill()
            self.finish(parent)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """Starts to run a child, which shares the full blocks of the parent's prompt.

        The child computes the prompt's tokens after the last full block itself. A child
        without outputs always computes the last prompt token, to draw from its logits.
        """
        child.fork_from(parent)
        child.num_computed = self._num_forked(parent, child)
        child.block_ids = self.limits.groups.prefix_table(
            parent.block_ids, child.num_computed, self.limits.block_size
        )
        self.allocator.share(without_null_blocks(child.block_ids))
        child.complete_from = parent.complete_from
        self._run(child)

    def _num_forked(self, parent: Sequence, child: Sequence) -> int:
        """The number of prompt tokens in blocks that a child shares with choice 0."""
        num_tokens = parent.num_prompt_tokens
        if not child.num_outputs:
            num_tokens -= 1
        return num_tokens // self.limits.block_size * self.limits.block_size

    # -- steps --------------------------------------------------------------------

    def step_launched(self, scheduled: Sequenceable[Scheduled]) -> None:
        self.ledger.record_launch(scheduled)

    def step_finished(self, seconds: float | None = None) -> None:
        """Records that the oldest launched step has ended on every rank."""
        self.ledger.record_finish(seconds)

    def draw_failed(self, scheduled: Sequenceable[Scheduled]) -> None:
        """Records that the only launched step has ended without drawing its tokens. Its
        sequences must compute the same tokens again."""
        self.step_finished()
        for item in scheduled:
            item.sequence.unlaunch(item.num_tokens, num_awaited=item.num_drawing_tokens)

    def commit(self, item: Scheduled, num_committed: int | None = None) -> None:
        """Records that a finished step has written the KV of a sequence's tokens.

        Args:
            num_committed: after a verification, the number of these tokens that the
                sequence keeps. The KV of the other tokens is overwritten later.
        """
        sequence = item.sequence
        if num_committed is None:
            num_committed = item.num_tokens
        num_before = sequence.num_computed
        num_prompt_tokens = sequence.num_prompt_tokens
        sequence.unlaunch(item.num_tokens, num_awaited=item.num_drawing_tokens)
        sequence.num_computed += num_committed
        if num_before < num_prompt_tokens <= sequence.num_computed:
            sequence.accounting.count_completion()
        self._publish(sequence, num_before)

    def _publish(self, sequence: Sequence, num_before: int) -> None:
        """Adds the blocks that became full to the prefix index, and releases the blocks
        that are no longer needed.

        Args:
            num_before: number of tokens that had KV before the step or pull.
        """
        self._sharing.publish(sequence, num_before)
        self.ledger.release(sequence, self.tables.take_passed_blocks(sequence))

    # -- ends ---------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence and releases its blocks."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        self._release_blocks(sequence)
        sequence.phase = Phase.FINISHED

    def withdraw(self, sequence: Sequence) -> None:
        """Removes a waiting sequence, which has no blocks, from the queue."""
        self.waiting.remove(sequence)
        sequence.phase = Phase.NEW

    def _release_blocks(self, sequence: Sequence) -> None:
        self.ledger.release(sequence, without_null_blocks(sequence.block_ids))
        sequence.reset_blocks()

    def check_integrity(self) -> None:
        """Raises an error if the counts of blocks do not add up."""
        self.allocator.check_integrity()
        if self.prefix is not None:
            self.prefix.check_integrity()
