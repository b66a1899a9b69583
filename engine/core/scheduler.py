"""Who computes what in the next step: pure decisions over the block allocator and prefix index.

Policy, in order:
1. Sequences that decode go first, so that a long prompt delays them by one chunk at most.
2. Prompts that are under way get what is left of the token budget, in order of admission, but for
   what shorter ones need: half at most. Beside streams it is what `itl_target_s` leaves.
3. Waiting sequences are admitted in the order of `waiting.py`, when blocks for all their tokens
   are available; each takes what the prefix index holds and only allocates the rest. One that would
   not even fit into what is not quarantined, or is to be pulled beside too much that is being
   written to, lets others pass until it does. So does one whose beginning a running sequence
   computes just now: it finds it in the index then.
When a running sequence needs a block and there is none, the latest admitted one is preempted: it
gives its blocks back and waits at the head of the queue. One that fits the pool alone always ends;
engines take no others (worker/memory.py), and one that is found not to fit all the same is `stuck`.

A sequence with a `remote` reference is not computed: its new blocks become RECEIVING, a pull fills
them, and `received`, `recompute_in_place` or `abandon` brings it back. It ends or times out alone.

A step may be planned while others have not finished. Blocks go back to the allocator only when
every launched step that refers to them has (I8); none is preempted under a step (`may_preempt`).
"""

from collections import deque
from collections.abc import Sequence as Sequenceable

from engine.core.pace import Load, Pace
from engine.core.plan import Plan as Plan
from engine.core.plan import Scheduled as Scheduled
from engine.core.plan import load_of
from engine.core.sequence import Phase, Sequence
from engine.core.tables import BlockTables
from engine.core.tables import SchedulerLimits as SchedulerLimits
from engine.core.waiting import MAX_OVERTAKEN, enqueue, short_ones, work_of
from kvcache.blocks import BlockAllocator, BlockState
from kvcache.groups import without_null_blocks
from kvcache.prefix import PrefixCursor, PrefixIndex
from protocol.metrics import stat_key

_MUCH_SHARED = (
    256  # tokens of a prefix that are worth a wait, or half of what there is to compute
)


class Scheduler:
    """Owns the queue, the running set and the receiving set, and their blocks."""

    def __init__(
        self, limits: SchedulerLimits, num_blocks: int, *, cached: bool
    ) -> None:
        self.limits = limits
        self.allocator = allocator = BlockAllocator(num_blocks)
        self.prefix = (
            PrefixIndex(allocator, limits.block_size, limits.groups) if cached else None
        )
        self.tables = BlockTables(limits)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.receiving: dict[str, Sequence] = {}
        self.num_preemptions = 0
        most, target_s = limits.max_num_batched_tokens, limits.itl_target_s
        self._pace = Pace(target_s, most) if target_s else None
        self._loads: deque[Load] = deque()  # of the launched steps
        self._num_finished_steps = 0
        self._deferred: list[
            tuple[int, list[int]]
        ] = []  # step to finish, blocks to release

    @property
    def stands(self) -> bool:
        """Whether some wait, and nobody has blocks but who borrows them, or READs that hang; beside
        streams, whether the first would have its own if what is lent were here."""
        if not self.waiting or self.receiving:
            return False
        first, lent = self.waiting[0], self.allocator.counts()[BlockState.LEASED]
        num_tokens = len(first.token_ids) if first.remote is None else first.num_to_hold
        needed = self.tables.num_blocks_for(first, num_tokens) + self._num_spare(first)
        return not self.running or 0 < needed - self.allocator.num_available <= lent

    def add(self, sequence: Sequence) -> None:
        assert len(sequence.token_ids) <= self.limits.max_model_len, (
            "it would wait for ever"
        )
        assert len(sequence.choices) <= self.limits.max_num_seqs, (
            "it would wait for ever"
        )
        sequence.phase = Phase.WAITING
        enqueue(self.waiting, sequence)

    # -- one round ---------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Decides the next step. An empty `scheduled` means nothing can be computed now."""
        plan = Plan(self.limits.max_num_batched_tokens)
        going_on = [
            s for s in self.running if not s.awaits_result(self.limits.max_model_len)
        ]
        decoding = [s for s in going_on if s.is_decoding]
        prefilling = [s for s in going_on if not s.is_decoding]
        self._go_on(decoding, plan)
        if self._pace is not None and (prefilling or self.waiting):
            if (
                plan.scheduled or self.receiving
            ):  # one that is pulled is a stream already
                load = load_of(plan.scheduled)
                room = self._pace.prompt_tokens(load.streams, load.held)
                plan.budget = min(plan.budget, room)
        kept = self._kept_for_short(prefilling, plan.budget)
        plan.budget -= kept
        self._go_on(prefilling, plan)
        plan.budget += kept
        if not plan.preempted:
            self._admit_waiting(plan)
        return plan

    def _kept_for_short(self, under_way: list[Sequence], budget: int) -> int:
        """Tokens of the step that long prompts leave to short ones, which get their blocks."""
        found = short_ones(
            self.waiting, sum(work_of(s, s.num_uncomputed) for s in under_way), budget
        )
        needed = sum(self.tables.num_blocks_for(s, len(s.token_ids)) for s in found)
        has_room = self.allocator.can_allocate(needed + len(self.running) + len(found))
        is_one_too_many = self._num_choices() + len(found) > self.limits.max_num_seqs
        return (
            sum(len(s.token_ids) for s in found)
            if has_room and not is_one_too_many
            else 0
        )

    def _go_on(self, sequences: list[Sequence], plan: Plan) -> None:
        for sequence in sequences:
            if plan.budget == 0:
                break
            if sequence.phase is not Phase.RUNNING:
                continue  # preempted earlier in this round
            num_tokens = min(sequence.num_uncomputed, plan.budget)
            if self._make_room(sequence, num_tokens, plan):
                plan.add(sequence, num_tokens)

    def admit_remote(self) -> Plan:
        """Admits whoever waits in front with KV to be pulled: that needs no step."""
        plan = Plan(budget=0)
        self._admit_waiting(plan)
        return plan

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Allocates blocks for the step, preempting if it must; False: the sequence itself."""
        places = self.tables.places_for_next(sequence, num_tokens)
        needed = len(places)
        while not self.allocator.can_allocate(needed):
            victim = self.running[-1]
            for item in [item for item in plan.scheduled if item.sequence is victim]:
                plan.scheduled.remove(item)
                plan.budget += item.num_tokens
            self._preempt(victim, plan)
            if victim is sequence:
                plan.stuck += [sequence] * self.allocator.is_all_available
                return False
        self.limits.groups.fill_entries(
            sequence.block_ids, places, self.allocator.allocate(needed)
        )
        return True

    def may_preempt(self) -> bool:
        """Whether the running sequences may need more blocks for the next step than there are.
        Then `schedule` wants every launched step finished: it takes blocks away."""
        budget = self.limits.max_num_batched_tokens
        next_ = ((s, min(s.num_uncomputed, budget)) for s in self.running)
        return not self.allocator.can_allocate(
            sum(len(self.tables.places_for_next(*one)) for one in next_)
        )

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        assert victim.last_step <= self._num_finished_steps, (
            "preempted under a launched step"
        )
        self.running.remove(victim)
        self._release_blocks(victim)
        self.requeue(victim)
        plan.preempted.append(victim)
        self.num_preemptions += 1

    def _admit_waiting(self, plan: Plan) -> None:
        passed, pulls_wait = 0, False
        room = self.limits.max_num_seqs - self._num_choices()
        while passed < len(self.waiting):
            sequence = self.waiting[passed]
            is_remote, is_locked_out = (
                sequence.remote is not None,
                self.is_locked_out(sequence),
            )
            num_choices = 1 + len(sequence.children)
            if num_choices > room or not (is_remote or plan.budget):
                return
            if is_remote and not (is_locked_out or pulls_wait):
                needed = self.tables.num_blocks_for(sequence, sequence.num_to_hold)
                pulls_wait = not self.allocator.can_receive(needed)
            if (
                is_locked_out
                or (is_remote and pulls_wait)
                or self._awaits_prefix(sequence)
            ):
                passed += 1
                continue
            if not self._admit(sequence, plan.budget):
                plan.stuck += [sequence] * self.allocator.is_all_available
                return
            del self.waiting[passed]
            room -= num_choices
            plan.admitted.append(sequence)
            if is_remote:
                plan.receiving.append(sequence)
            else:
                self._run(sequence)
                plan.add(sequence, min(sequence.num_uncomputed, plan.budget))

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence computes much of what this one would compute as well."""
        if self.prefix is None or sequence.remote is not None or sequence.is_scoring:
            return False
        if sequence.awaited is not None:  # each round, so this is all it takes
            owner, stop = sequence.awaited
            if owner.phase is Phase.RUNNING and owner.num_computed < stop:
                return True
            sequence.awaited = None
        owners = [s for s in self.running if s.num_computed < s.num_prompt_tokens]
        if not owners:
            return False
        start = self.tables.num_tokens(self._match(sequence))
        for owner in owners:
            shared = self._num_shared(sequence, owner, start)
            if shared and shared >= min(
                _MUCH_SHARED, (len(sequence.token_ids) - start) // 2
            ):
                sequence.awaited = owner, start + shared
                return True
        return False

    def _num_shared(self, sequence: Sequence, owner: Sequence, start: int) -> int:
        """Tokens of full blocks from `start` on that are the same, after the same ones. Sequences
        of different salts share none."""
        if sequence.request.cache_salt != owner.request.cache_salt:
            return 0
        size, mine, other = self.limits.block_size, sequence.token_ids, owner.token_ids
        at, limit = start, min(len(mine) - 1, owner.num_prompt_tokens) - size
        while at <= limit and mine[at : at + size] == other[at : at + size]:
            at += size
        return at - start if at > start and mine[:start] == other[:start] else 0

    def is_locked_out(self, sequence: Sequence) -> bool:
        """Whether only the end of READs that hang can give a waiting sequence its blocks."""
        quarantined = self.allocator.num_quarantined
        if not quarantined:
            return False
        needed = self.tables.num_blocks_for(sequence, len(sequence.token_ids))
        return needed > self.allocator.capacity - quarantined

    def _num_choices(self) -> int:
        """Those that run, are pulled, or are children of one that does."""
        return sum(
            1 + len(s.children) for s in (*self.running, *self.receiving.values())
        )

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Takes cached blocks and allocates the rest, or changes nothing and answers False."""
        is_remote = sequence.remote is not None  # what needs blocks now
        num_tokens = sequence.num_to_hold if is_remote else len(sequence.token_ids)
        table = self._match(sequence)
        start, hits = self.tables.num_tokens(table), without_null_blocks(table)
        idle = sum(self.allocator.state(block) is BlockState.CACHED for block in hits)
        room = self.allocator.num_available - idle - self._num_spare(sequence)
        if room < self.tables.num_blocks_for(sequence, num_tokens) - len(hits):
            return False  # each round, so this is all that a long one takes
        places = self.tables.places_to_admit(sequence, table, num_tokens, budget)
        if room < len(places):
            return False
        self.allocator.share(hits)
        fresh = self.allocator.allocate(len(places))
        self.limits.groups.fill_entries(table, places, fresh)
        sequence.block_ids, sequence.num_computed = table, start
        if self.limits.groups.drops_blocks:
            sequence.prefix_cursor = PrefixCursor()  # it has gaps to fill
        sequence.count_skipped()
        if sequence.remote is not None:
            self.allocator.receive(fresh)
            sequence.phase = Phase.RECEIVING
            self.receiving[sequence.request_id] = sequence
        return True

    def _num_spare(self, sequence: Sequence) -> int:
        """Blocks that are left when it is admitted: one for each running sequence, so that this
        causes no preemption."""
        return len(self.running) and len(self.running) + len(sequence.children)

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached blocks to start from. The last token is always computed: its logits are wanted,
        like those of each token before one whose logprobs are still to be had."""
        if self.prefix is None:
            return []
        max_tokens = len(sequence.token_ids) - 1
        if sequence.remote is not None:
            max_tokens = min(max_tokens, sequence.num_to_hold)
        elif sequence.children:  # they fork off what it computes
            max_tokens = min(max_tokens, sequence.num_prompt_tokens - 1)
        if sequence.is_scoring:
            max_tokens = len(sequence.prompt_logprobs or ()) - 1
        reach = self.tables.reach(sequence, len(sequence.token_ids))
        how = {"max_tokens": max_tokens, "reach": reach}
        return self.prefix.match(
            sequence.token_ids,
            **how,
            cursor=sequence.prefix_cursor,
            salt=sequence.request.cache_salt,
        )

    def _run(self, sequence: Sequence) -> None:
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)

    # -- receiving ---------------------------------------------------------------------------

    def received(self, sequence: Sequence, *, is_converted: bool = False) -> None:
        """The pull is done and fenced: the bytes are the prompt's, and may be used.

        Of KV that was converted, several choices use the blocks that they share only. Each computes
        the rest of the prompt itself, so that equal choices stay equal.
        """
        num_cached = sequence.num_computed
        num_received = max(sequence.num_to_receive, num_cached)
        if is_converted and sequence.children:
            shared = min(
                self._num_forked(sequence, child) for child in sequence.children
            )
            num_received = max(min(num_received, shared), num_cached)
        self.tables.pulled(sequence)
        self.recompute_in_place(sequence)
        ends = [min(n, sequence.num_prompt_tokens) for n in (num_cached, num_received)]
        sequence.num_transferred = ends[1] - ends[0]
        sequence.num_computed = num_received
        self._publish(sequence, num_cached)
        self.fork_choices(sequence)

    def recompute_in_place(self, sequence: Sequence) -> None:
        """The pull failed and all its reads have ended: the sequence is computed here, in the
        blocks it holds."""
        self.allocator.received(self.tables.fresh(sequence))
        del self.receiving[sequence.request_id]
        sequence.remote = None
        self._run(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """A sequence without blocks waits again, at the head of the queue."""
        sequence.phase, sequence.num_overtaken = Phase.WAITING, MAX_OVERTAKEN
        self.waiting.appendleft(sequence)

    def abandon(self, sequence: Sequence, *, quarantine: bool = False) -> list[int]:
        """Ends a receiving sequence whose reads may go on. Its fresh blocks stay RECEIVING, or
        become QUARANTINED, and are returned; their owner frees them when the reads have ended."""
        fresh, blocks = (
            self.tables.fresh(sequence),
            without_null_blocks(sequence.block_ids),
        )
        if quarantine:
            self.allocator.quarantine(fresh)
        self.allocator.release(blocks[: len(blocks) - len(fresh)])
        del self.receiving[sequence.request_id]
        sequence.forget_blocks()
        return fresh

    # -- choices -----------------------------------------------------------------------------

    def fork_choices(self, parent: Sequence) -> None:
        """Lets the children go their own ways, if the KV of the whole prompt is there. A
        parent that has ended itself ends with that."""
        if parent.num_computed < parent.num_prompt_tokens:
            return
        for child in parent.children:
            self._fork(parent, child)
        if parent.is_parent_only and parent.phase is Phase.RUNNING:
            self.finish(parent)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """What the prompt holds of its last block the child computes by itself, and the last token
        where it has no output yet while its parent has."""
        child.fork_from(parent)
        size = self.limits.block_size
        child.num_computed = self._num_forked(parent, child)
        child.block_ids = self.limits.groups.prefix_table(
            parent.block_ids, child.num_computed, size
        )
        self.allocator.share(without_null_blocks(child.block_ids))
        child.whole_from = parent.whole_from
        self._run(child)

    def _num_forked(self, parent: Sequence, child: Sequence) -> int:
        """Returns the prompt tokens whose blocks a choice shares with the first one."""
        num_tokens = parent.num_prompt_tokens - (not child.num_outputs)
        return num_tokens // self.limits.block_size * self.limits.block_size

    # -- around a step -----------------------------------------------------------------------

    def launched(self, scheduled: Sequenceable[Scheduled]) -> None:
        """The step was launched; steps finish in the order of their launches."""
        self._loads.append(load_of(scheduled))
        row, number = 0, self._num_finished_steps + len(self._loads)
        for item in scheduled:
            sequence = item.sequence
            sequence.last_step = number
            sequence.num_launched += item.num_tokens
            if item.draws:
                sequence.num_awaited += 1
                sequence.awaited_row = row
                row += len(item.draws)

    def step_finished(self, seconds: float | None = None) -> None:
        """The oldest launched step, which took so long, reads and writes no block any more, on any
        rank."""
        self._num_finished_steps += 1
        load = self._loads.popleft()
        if self._pace is not None and seconds is not None:
            self._pace.measured(load, seconds)
        deferred, self._deferred = self._deferred, []
        for due, blocks in deferred:
            if due <= self._num_finished_steps:
                self.allocator.release(blocks)
            else:
                self._deferred.append((due, blocks))

    def step_undrawn(self, scheduled: Sequenceable[Scheduled]) -> None:
        """The only launched step has ended without its tokens: it shall be taken again."""
        self.step_finished()
        for item in scheduled:
            item.sequence.unlaunch(item.num_tokens, drew=bool(item.draws))

    def computed(self, item: Scheduled) -> None:
        """A finished step wrote the KV of what was scheduled."""
        sequence = item.sequence
        before, length = sequence.num_computed, sequence.num_prompt_tokens
        sequence.unlaunch(item.num_tokens, drew=bool(item.draws))
        sequence.num_computed += item.num_tokens
        if before < length <= sequence.num_computed:
            found = sequence.num_skipped + sequence.num_transferred
            sequence.num_recomputed = length - found
        self._publish(sequence, before)

    def _publish(self, sequence: Sequence, num_before: int) -> None:
        """Offers blocks that are full now, and were not with so many tokens, to the prefix index
        (I4); gives back what is needed no more."""
        num_full = sequence.num_computed // self.limits.block_size
        if self.prefix is not None and num_full != num_before // self.limits.block_size:
            full = self.tables.published(sequence, num_full)
            self.prefix.publish(
                sequence.token_ids,
                full,
                cursor=sequence.prefix_cursor,
                salt=sequence.request.cache_salt,
            )
        self._release(sequence, self.tables.take_passed(sequence))

    def finish(self, sequence: Sequence) -> None:
        """Takes a waiting or running sequence out and releases its blocks."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        self._release_blocks(sequence)
        sequence.phase = Phase.FINISHED

    def withdraw(self, sequence: Sequence) -> None:
        """Takes a waiting sequence, which holds no block, out of the queue."""
        self.waiting.remove(sequence)
        sequence.phase = Phase.NEW

    def _release_blocks(self, sequence: Sequence) -> None:
        self._release(sequence, without_null_blocks(sequence.block_ids))
        sequence.forget_blocks()

    def _release(self, sequence: Sequence, blocks: list[int]) -> None:
        """The blocks' uses end now, or with the last launched step that refers to them."""
        if blocks and sequence.last_step > self._num_finished_steps:
            self._deferred.append((sequence.last_step, blocks))
        else:
            self.allocator.release(blocks)

    def stats(self) -> dict[str, float]:
        """Values by series (protocol.metrics)."""
        counts = self.allocator.counts()
        states = {
            stat_key("baton_kv_blocks", state=s.name.lower()): counts[s]
            for s in BlockState
        }
        values = {
            **states,
            "baton_kv_blocks_capacity": self.allocator.capacity,
            "baton_kv_block_size_tokens": self.limits.block_size,
            "baton_requests_running": len(self.running),
            "baton_requests_waiting": len(self.waiting),
            "baton_requests_receiving": len(self.receiving),
            "baton_preemptions": self.num_preemptions,
        }
        return {name: float(value) for name, value in values.items()}

    def check_integrity(self) -> None:
        """Blocks add up, and an idle scheduler leaves none in use."""
        self.allocator.check_integrity()
        if self.prefix is not None:
            self.prefix.check_integrity()
