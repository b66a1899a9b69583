"""One pull on one rank: which posts go out next, which READs are active, when it has ended."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvcache.transfer.link.read_throttle import Throttle
from kvcache.transfer.link.read_window import Post, ReadWindow, cut
from kvcache.transfer.move.staging import StagingBuffer
from kvcache.transfer.plan import plan as plans
from protocol.errors import BatonError

_HANGS_S = 1.0  # without the end of any READ


@dataclass
class Step:
    """Posts that go to one memory; staged ones are placed when the last of them has ended."""

    posts: Iterator[Post]
    base_address: int  # of the memory that local offsets count from
    chunk: plans.Step | None = None  # to place
    slot: int = -1  # of staging memory, where there is a chunk
    active: int = 0
    posted: bool = False  # all of them


class ReadJob:
    """Mutable; driven by the worker, which owns the agent."""

    def __init__(
        self,
        pull_id: str,
        plan: plans.TransferPlan,
        pool_address: int,
        staging: StagingBuffer | None,
        limits: ReadWindow,
        throttle: Throttle | None = None,
    ) -> None:
        self.pull_id = pull_id
        self.plan = plan
        self.error: BatonError | None = None
        self.failure_told = False
        self.began = time.perf_counter()
        self._pool_address = pool_address
        self._limits = limits
        self._most_now = throttle.post_bytes if throttle is not None else None
        self._slot_bytes = plan.slot_bytes
        self._staging = staging if self._slot_bytes else None
        self.stopping = False
        self._steps = enumerate(plan.steps)
        self._open: list[Step] = []  # begun, not yet all ended and placed
        self._posting: Step | None = None
        self._waiting: tuple[int, plans.Step] | None = None  # for its slot
        self._exhausted = False
        self._preparations = self._prepare_all()
        self._moved_at = time.monotonic()  # when a READ was posted or ended last
        self._num_slots = 0
        if self._staging is not None:
            self._num_slots = self._staging.num_slots(self._slot_bytes)
            self._staging.enter(pull_id)

    @property
    def active(self) -> int:
        """READs that have not ended."""
        return sum(step.active for step in self._open)

    @property
    def ended(self) -> bool:
        """No READ is active, no copy runs, and nothing more will be posted."""
        if self.active or not self._copies_finished():
            return False
        return self.stopping or (self._exhausted and not self._open)

    @property
    def complete(self) -> bool:
        """Every byte is in its place."""
        return self.ended and not self.stopping

    @property
    def hangs(self) -> bool:
        """READs of it are active, and none has ended for long."""
        return self.still_s >= _HANGS_S

    @property
    def still_s(self) -> float:
        """How long no READ of it has been posted or has ended, though some are active."""
        return time.monotonic() - self._moved_at if self.active else 0.0

    @property
    def awaits_staging(self) -> bool:
        """What is left of it needs the staging memory that another pull has."""
        staging = self._staging
        return staging is not None and not self.stopping and not staging.owned_by(self.pull_id)

    def pass_staging_by(self) -> bool:
        """Reads what awaits staging memory straight into the pool, in however many runs; False
        where that cannot be."""
        if self._staging is None or self.plan.transfer.converts:
            return False
        self._staging.leave(self.pull_id)
        self._staging = None
        return True

    def stop(self, error: BatonError | None = None) -> None:
        """Posts nothing more. The first error stays."""
        self.stopping = True
        self.error = self.error or error

    def next_post(self) -> tuple[Step, Post] | None:
        """What to post now; None when there is nothing, or nothing yet."""
        while not self.stopping:
            step = self._posting or self._next_step()
            if step is None:
                return None
            post = next(step.posts, None)
            if post is not None:
                return step, post
            step.posted, self._posting = True, None
            self._finish(step)
        return None

    def read_ended(self, step: Step) -> None:
        step.active -= 1
        self._moved_at = time.monotonic()
        self._finish(step)

    def leave(self) -> None:
        """The job has ended: others may have the staging memory."""
        if self._staging is not None:
            self._staging.leave(self.pull_id)

    def _begin(self, step: Step) -> Step:
        self._open.append(step)
        self._posting = step
        return step

    def _next_step(self) -> Step | None:
        self._waiting = self._waiting or next(self._steps, None)
        if self._waiting is None:
            self._exhausted = True
            return None
        index, step = self._waiting
        if step.slot is None or self._staging is None:
            self._waiting = None
            reads = step.unstaged.reads
            return self._begin(Step(cut(reads, self._limits, self._most_now), self._pool_address))
        slot = index % self._num_slots
        if not self._slot_is_free(self._staging, slot):
            return None
        self._waiting = None
        base = self._staging.base_address + slot * self._slot_bytes
        return self._begin(Step(cut(step.reads, self._limits, self._most_now), base, step, slot))

    def read_posted(self, step: Step) -> None:
        step.active += 1
        self._moved_at = time.monotonic()

    def prepare(self) -> bool:
        """Works out one thing that will soon be wanted, as nothing else is to be done; whether
        there was one."""
        return not self.stopping and next(self._preparations, False)

    def _prepare_all(self) -> Iterator[bool]:
        """True after each part. The last chunks are small: they are read sooner than made."""
        for step in self.plan.steps:
            yield bool(step.reads)
            yield bool(step.copies)
        yield self.plan.descriptors > 0  # the report of the end says it, for which the fence waits

    def _slot_is_free(self, staging: StagingBuffer, slot: int) -> bool:
        filling = any(step.slot == slot for step in self._open)
        return not filling and staging.owned_by(self.pull_id) and staging.is_free(slot)

    def _finish(self, step: Step) -> None:
        if not step.posted or step.active:
            return
        self._open.remove(step)
        if step.chunk is None or self._staging is None or self.stopping:
            return
        self._staging.place(step.chunk, step.slot, self._slot_bytes)

    def _copies_finished(self) -> bool:
        staging = self._staging
        if staging is None or not staging.owned_by(self.pull_id):
            return True
        return all(staging.is_free(slot) for slot in range(self._num_slots))
