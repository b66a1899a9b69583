"""READs that are posted before there is a plan: what they may read, and what becomes of them."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.pool import KVPool
from kvcache.transfer import plan, whole_blocks
from kvcache.transfer.job_maker import JobMaker
from kvcache.transfer.mapped import MappedPath
from kvcache.transfer.mapper import MappedMemory, MemoryMapper, NotMappable
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.opening import Opening
from kvcache.transfer.plan import DEFAULT_COSTS, Endpoint, Planner
from kvcache.transfer.pull import AddPeer, RankEnded, StopPull, pull_command
from kvcache.transfer.pull_worker import PullWorker
from kvcache.transfer.rank_links import InsideLink
from kvcache.transfer.runs import RankRead
from protocol.handshake import RankMetadata
from tests.e2e.cluster import wait_until
from tests.kvcache.transfer.geometry import DTYPES, Case, leased_bytes, with_dtypes
from tests.kvcache.transfer.test_plan import side, simple
from tests.kvcache.transfer.test_planner import pulls

sys.path.insert(0, str(Path(__file__).parent))
from pull_rig import DEADLINE_S, HEADS, LAYERS, Prefill, expected, layout


def _bytes_of(read: RankRead) -> tuple[Any, ...]:
    return read.remote_rank, *(array.tolist() for array in read[1:])


def _places(reads: tuple[RankRead, ...]) -> list[tuple[int, int, int, int]]:
    """Every byte that is read, as runs as long as they can be: places must occur once."""
    rows = sorted(
        (read.remote_rank, to, at, size)
        for read in reads
        for at, to, size in zip(*(array.tolist() for array in read[1:]), strict=True)
    )
    found: list[tuple[int, int, int, int]] = []
    for rank, to, at, size in rows:
        if found and found[-1][0] == rank:
            _, target, source, before = found[-1]
            assert target + before <= to, "read twice"
            if (target + before, source + before) == (to, at):
                found[-1] = (rank, target, source, before + size)
                continue
        found.append((rank, to, at, size))
    return found


def _check_openings(all_pulls: list[Case], d_rank: int, staging_blocks: int) -> tuple[int, int]:
    """How many pulls were opened, and how many of these as their plans want."""
    first = all_pulls[0]
    block_bytes = max(first.layout(first.p, rank).block_bytes for rank in range(first.p.tp))
    planner = Planner(
        first.endpoints(first.d)[d_rank % first.d.tp],
        first.endpoints(first.p),
        first.heads,
        staging_bytes=staging_blocks * (block_bytes + 64) * 4 * first.p.tp,
        convert=True,
        allow_mixed=True,
    )
    opened = wanted = 0
    for case in all_pulls:
        tokens, p, d = (case.start, case.stop), list(case.p.blocks), list(case.d.blocks)
        opening = planner.opening(tokens, d, p, lease_hash=case.lease_hash)
        transfer = planner.take(tokens, d, p, lease_hash=case.lease_hash)
        made = planner.plan(transfer, DEFAULT_COSTS["cuda"])
        if opening is None:
            continue
        leased, read = leased_bytes(case, opening.read.remote_rank), opening.read
        bound = opening.slot_bytes if opening.is_staged else planner._local.layout.nbytes
        for at, to, length in zip(*read[1:], strict=True):
            assert leased[at : at + length].all()
            assert 0 <= to <= to + length <= bound
        opened += 1
        if not opening.is_staged:
            begun = planner.plan(transfer, DEFAULT_COSTS["cuda"], opening)
            assert begun.reads[0] is read and opening.rest(begun.reads) == begun.reads[1:]
            assert _places(begun.reads) == _places(made.reads)
            wanted += 1
        elif made.chunks and opening.slot_bytes == made.slot_bytes:
            wanted += _bytes_of(made.chunks[0].reads[0]) == _bytes_of(read)
    return opened, wanted


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=250)
@given(pulls(), st.integers(0, 7), st.integers(1, 6), DTYPES)
def test_an_opening_stays_inside_leased_blocks_and_its_slot(
    all_pulls, d_rank, staging_blocks, dtypes
) -> None:
    _check_openings([with_dtypes(case, *dtypes) for case in all_pulls], d_rank, staging_blocks)


def test_whole_blocks_are_opened_where_their_plans_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_LONG_RUN_BYTES", 1)
    counts = Counter[str]()

    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=250)
    @given(pulls(), st.integers(0, 7), st.integers(1, 6), DTYPES, st.integers(1, 4))
    def check(all_pulls, d_rank, staging_blocks, dtypes, most) -> None:
        monkeypatch.setattr(whole_blocks, "_FIRST_BLOCKS", most)
        cases = [with_dtypes(case, *dtypes) for case in all_pulls for _ in range(2)]
        counts["wanted"] += _check_openings(cases, d_rank, staging_blocks)[1]

    check()
    assert counts["wanted"] >= 50


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)
@given(pulls(), st.integers(0, 7), st.integers(1, 6))
def test_a_pull_like_the_last_one_is_opened_as_its_plan_wants(
    all_pulls, d_rank, staging_blocks
) -> None:
    case = with_dtypes(all_pulls[0], "float32", "float16")  # converted: always staged, all of it
    is_ragged = case.start % case.p.block_size or case.stop % case.p.block_size
    opened, wanted = _check_openings([case] * 3, d_rank, staging_blocks)
    assert opened == wanted
    if not is_ragged and case.start < case.stop and case.d.dcp == 1 and case.p.tp <= case.heads:
        assert opened == 2  # of a head's copies the first one in turn may have none of few blocks


@pytest.mark.parametrize("lease_hash", range(3))
def test_what_is_opened_of_few_blocks_is_read_from_the_copy_whose_turn_it_is(lease_hash) -> None:
    case = simple(side(3, tokens=16), side(1, tokens=16), heads=1, stop=16, lease_hash=lease_hash)
    assert _check_openings([with_dtypes(case, "float32", "float16")] * 3, 0, 4) == (2, 2)


def test_blocks_that_are_not_there_are_not_opened() -> None:
    p, d = layout(order="LBCNHD", block_size=16), layout()
    planner = Planner(
        Endpoint(d, 0, 1), [Endpoint(p, 0, 1)], HEADS, staging_bytes=4 * 16 * p.token_bytes
    )
    costs, blocks = DEFAULT_COSTS["cuda"], [8, 6, 4, 2, 1, 3, 5, 7]
    planner.plan(planner.take((0, 64), blocks, [5, 2, 9, 7]), costs)
    assert planner.opening((0, 64), blocks, [1, 4, 3, 8]) is not None
    for wrong in ([32, 4, 3, 8], [-1, 4, 3, 8], []):
        assert planner.opening((0, 64), blocks, wrong) is None
    assert planner.opening((0, 60), blocks, [1, 4, 3, 8]) is None  # nothing like it was planned


def test_whole_blocks_of_which_the_first_copy_has_none_are_not_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "_LONG_RUN_BYTES", 1)
    one_head = layout(num_heads=1)
    remote = [Endpoint(one_head, rank, 4) for rank in range(4)]  # two for each head
    planner = Planner(Endpoint(one_head, 0, 2), remote, 2)
    planner.plan(planner.take((0, 16), [1, 2], [3, 4]), DEFAULT_COSTS["cuda"])
    openings = [planner.opening((0, 8), [1], [5], lease_hash=turn) for turn in range(4)]
    assert [found and found.num_blocks for found in openings] == [1, None, 1, None]


def test_whole_blocks_that_are_not_there_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_LONG_RUN_BYTES", 1)
    planner = Planner(Endpoint(layout(), 0, 1), [Endpoint(layout(), 0, 1)], HEADS)
    costs, ours, theirs = DEFAULT_COSTS["cuda"], [8, 6, 4], [5, 2, 9]
    assert planner.opening((0, 24), ours, theirs) is None  # nothing was planned
    planner.plan(planner.take((0, 24), ours, theirs), costs)
    opened = planner.opening((0, 24), ours, theirs)
    assert opened is not None and opened.num_blocks == 3
    assert planner.opening((0, 24), ours, [9, 8, 7, 6]) is not None
    for wrong in ([32, 4, 3], [-1, 4, 3], [4, 3], []):
        assert planner.opening((0, 24), wrong, theirs) is None
        assert planner.opening((0, 24), ours, wrong) is None
    for tokens in ((0, 20), (4, 24), (16, 16), (24, 8), (-8, 16)):
        assert planner.opening(tokens, ours, theirs) is None


def test_ranks_that_share_tokens_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks and tokens are others than the sequence's, and an opening is not compared with
    the plan."""
    monkeypatch.setattr(plan, "_LONG_RUN_BYTES", 1)
    sharing = Endpoint(layout(2, 0, dcp=2), 0, 2, dcp=2)
    planner = Planner(sharing, [Endpoint(layout(), 0, 1)], HEADS)
    ours, theirs = [8, 6, 4, 2, 1, 3, 5, 7], [5, 2, 9, 7, 12, 14, 1, 3]
    made = planner.plan(planner.take((0, 64), ours, theirs), DEFAULT_COSTS["cuda"])
    assert made.path == "direct" and made.descriptors == 4
    assert planner.opening((0, 64), ours, theirs) is None


class Rank:
    """A worker that opens, with what its agent was doing when each pull was planned."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, mapper: type[MemoryMapper] | None = None
    ) -> None:
        self.link, self._told = InsideLink(), threading.Event()
        self.link.on_report = self._told.set
        self.pool, self.agent = KVPool(layout()), MemoryAgent()
        self.when_planned: list[int] = []
        self.planned = threading.Event()
        self.worker = PullWorker(
            0,
            1,
            HEADS,
            self.agent,
            self.pool,
            "",
            inside=self.link,
            opens=True,
            staging_bytes=4 * 16 * layout().token_bytes,
            costs=DEFAULT_COSTS["cuda"],
            mapped=MappedPath(mapper(self.pool)) if mapper is not None else None,
        )
        self._reports: list[Any] = []
        make = JobMaker.make

        def seen(*args: Any) -> Any:
            self.when_planned.append(self.agent.active)
            try:
                return make(*args)
            finally:
                self.planned.set()

        monkeypatch.setattr(JobMaker, "make", seen)
        self.worker.start()

    def order(self, name: str, lease: Any, table: list[int]) -> None:
        self.planned.clear()
        self.link.send(pull_command(name, lease, 0, 64, table))

    def ended(self, *, within_s: float = DEADLINE_S) -> RankEnded | None:
        """The next end of a pull; None if there is none within that time."""
        while True:
            self._reports += self.link.reports()
            for report in self._reports:
                if isinstance(report, RankEnded):
                    self._reports.remove(report)
                    return report
            if not self._told.wait(within_s):
                return None
            self._told.clear()

    def holds(self, lease: Any, table: list[int]) -> bool:
        rows = self.pool.canonical[table].float().permute(0, 4, 1, 2, 3, 5)
        found = rows.reshape(64, HEADS, LAYERS, 2, -1).numpy()
        return np.array_equal(found, expected(lease, 0, 64, HEADS, 2))


TABLES = (
    [8, 6, 4, 2, 1, 3, 5, 7],
    [18, 16, 14, 12, 11, 13, 15, 17],
    [20, 9, 22, 21, 19, 24, 23, 10],
)


@pytest.fixture
def prefill(rig: Any) -> Any:
    return rig(Prefill, order="LBCNHD", block_size=16)


@pytest.fixture
def rank(prefill: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """It has pulled once: TABLES[0]."""
    rank = Rank(monkeypatch)
    rank.link.send(AddPeer(prefill.metadata))
    lease = prefill.lease([5, 2, 9, 7], 64)
    rank.order("first", lease, TABLES[0])
    ended = rank.ended()
    assert ended is not None and ended.complete and ended.path == "staged"
    assert rank.when_planned == [0] and rank.holds(lease, TABLES[0])
    yield rank
    rank.agent.resume()
    rank.worker.close()


def test_the_next_pull_is_read_before_it_is_planned(prefill: Any, rank: Rank) -> None:
    posts = rank.worker.counters["posts"]
    for name, blocks, table in (("a", [3, 8, 1, 4], TABLES[1]), ("b", [9, 7, 5, 2], TABLES[2])):
        lease = prefill.lease(blocks, 64)
        rank.order(name, lease, table)
        ended = rank.ended()
        assert ended is not None and ended.complete and ended.path == "staged", ended
        assert rank.holds(lease, table)
    assert rank.when_planned == [0, 1, 1]
    assert rank.worker.counters["posts"] == 3 * posts  # nothing was read twice
    assert rank.worker.counters["internal_errors"] == 0


def test_a_pull_that_cannot_be_planned_ends_when_its_opening_has(prefill: Any, rank: Rank) -> None:
    lease = prefill.lease([3, 8, 1, 4], 64)
    lease.block_ids[-1] = 99  # the first chunk has it not
    rank.agent.stall()
    rank.order("wrong", lease, TABLES[1])
    assert rank.planned.wait(DEADLINE_S)
    assert rank.agent.active == 1 and rank.ended(within_s=0.05) is None
    rank.agent.resume()
    ended = rank.ended()
    assert ended is not None and not ended.complete and ended.error is not None
    assert ended.error.message == "remote_block_ids names block 99; the pool has blocks 0 to 31"
    lease = prefill.lease([3, 8, 1, 4], 64)
    rank.order("right", lease, TABLES[1])
    ended = rank.ended()
    assert ended is not None and ended.complete and rank.holds(lease, TABLES[1])


def test_a_pull_that_is_stopped_ends_when_its_opening_has(prefill: Any, rank: Rank) -> None:
    rank.agent.stall()
    rank.order("stopped", prefill.lease([3, 8, 1, 4], 64), TABLES[1])
    assert rank.planned.wait(DEADLINE_S)
    rank.link.send(StopPull("stopped"))
    assert rank.ended(within_s=0.05) is None and rank.agent.active > 0
    rank.agent.resume()
    ended = rank.ended()
    assert ended == RankEnded(pull_id="stopped", rank=0, complete=False, path="staged")
    lease = prefill.lease([3, 8, 1, 4], 64)
    rank.order("next", lease, TABLES[2])
    ended = rank.ended()
    assert ended is not None and ended.complete and rank.holds(lease, TABLES[2])


@pytest.mark.parametrize("direct", [False, True])
def test_what_the_plan_does_not_want_is_thrown_away_and_its_slot_not_used_before(
    prefill: Any, rank: Rank, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """As when two pulls that look alike are planned in different ways."""
    find, make = Planner.opening, Planner.plan

    def other(
        self: Any, tokens: Any, ours: list[int], blocks: list[int], **options: Any
    ) -> Opening | None:
        return find(self, tokens, ours, [block + 1 for block in blocks], **options)

    def planned(self: Any, transfer: Any, costs: Any, opened: Any) -> Any:
        self._staging_bytes = None if direct else self._staging_bytes
        self._decisions.clear()
        return make(self, transfer, costs, opened)

    monkeypatch.setattr(Planner, "opening", other)
    monkeypatch.setattr(Planner, "plan", planned)
    lease = prefill.lease([3, 8, 1, 4], 64)
    rank.agent.stall()
    rank.order("other", lease, TABLES[1])
    assert rank.planned.wait(DEADLINE_S)
    assert rank.ended(within_s=0.05) is None
    rank.agent.resume()
    ended = rank.ended()
    assert ended is not None and ended.complete, ended
    assert ended.path == ("direct" if direct else "staged") and rank.holds(lease, TABLES[1])
    assert rank.when_planned == [0, 1]


def test_a_pull_beside_another_waits_for_its_plan(
    prefill: Any, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    opening = JobMaker.opening

    def seen(self: Any, pull: Any, peer: Any) -> Opening | None:
        asked.append(pull.pull_id)
        return opening(self, pull, peer)

    monkeypatch.setattr(JobMaker, "opening", seen)
    rank.agent.stall()
    leases = [prefill.lease(blocks, 64) for blocks in ([3, 8, 1, 4], [9, 7, 5, 2])]
    rank.order("a", leases[0], TABLES[1])
    assert rank.planned.wait(DEADLINE_S)
    rank.order("b", leases[1], TABLES[2])
    assert rank.planned.wait(DEADLINE_S)
    rank.agent.resume()
    assert {rank.ended().pull_id, rank.ended().pull_id} == {"a", "b"}  # type: ignore[union-attr]
    assert rank.holds(leases[0], TABLES[1]) and rank.holds(leases[1], TABLES[2])
    assert asked == ["a"] and rank.when_planned[:2] == [0, 1]


def test_an_opening_that_fails_is_the_failure_of_its_pull(prefill: Any, rank: Rank) -> None:
    rank.agent.fail()
    rank.order("a", prefill.lease([3, 8, 1, 4], 64), TABLES[1])
    ended = rank.ended()
    assert ended is not None and not ended.complete and ended.error is not None
    assert "a READ from" in ended.error.message


@pytest.fixture
def whole(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Rank]]:
    """P, and a rank that has pulled whole blocks from it once: each is a run that counts as long,
    and the first two are opened."""
    monkeypatch.setattr(plan, "_LONG_RUN_BYTES", 1)
    monkeypatch.setattr(whole_blocks, "_FIRST_BLOCKS", 2)
    prefill, rank = rig(Prefill), Rank(monkeypatch)
    rank.link.send(AddPeer(prefill.metadata))
    lease = prefill.lease([5, 2, 9, 7, 12, 14, 1, 3], 64)
    rank.order("first", lease, TABLES[0])
    ended = rank.ended()
    assert ended is not None and ended.complete and ended.path == "direct"
    assert rank.when_planned == [0] and rank.holds(lease, TABLES[0])
    yield prefill, rank
    rank.agent.resume()
    rank.worker.close()


def test_whole_blocks_are_read_before_they_are_planned(whole: tuple[Any, Rank]) -> None:
    prefill, rank = whole
    posts = rank.worker.counters["posts"]
    lease = prefill.lease([3, 8, 1, 4, 6, 11, 10, 2], 64)
    rank.order("a", lease, TABLES[1])
    ended = rank.ended()
    assert ended is not None and ended.complete and ended.path == "direct", ended
    assert ended.descriptors == 8 and rank.holds(lease, TABLES[1])
    assert rank.when_planned == [0, 1] and rank.worker.counters["posts"] == posts + 2


def test_whole_blocks_that_are_opened_leave_staging_memory_to_others(
    whole: tuple[Any, Rank],
) -> None:
    prefill, rank = whole
    rank.agent.stall()
    lease = prefill.lease([3, 8, 1, 4, 6, 11, 10, 2], 64)
    rank.order("a", lease, TABLES[1])
    wait_until(lambda: rank.agent.active == 2)  # the opening, and what its plan adds
    assert rank.worker._staging is not None and rank.worker._staging.owner is None
    rank.agent.resume()
    ended = rank.ended()
    assert ended is not None and ended.complete and rank.holds(lease, TABLES[1])


def test_whole_blocks_for_a_table_that_is_wrong_behind_the_first_end_with_these(
    whole: tuple[Any, Rank],
) -> None:
    prefill, rank = whole
    lease = prefill.lease([3, 8, 1, 4, 6, 11, 10, 2], 64)
    rank.agent.stall()
    rank.order("wrong", lease, [*TABLES[1][:-1], TABLES[1][0]])
    assert rank.planned.wait(DEADLINE_S)
    assert rank.agent.active == 1 and rank.ended(within_s=0.05) is None
    rank.agent.resume()
    ended = rank.ended()
    assert ended is not None and not ended.complete and ended.error is not None
    assert "local_block_ids" in ended.error.message
    rank.order("right", lease, TABLES[1])
    ended = rank.ended()
    assert ended is not None and ended.complete and rank.holds(lease, TABLES[1])


class MapsLater(MemoryMapper):
    """Refuses at first contact, as where there was no room."""

    refused = False

    def map(self, rank: RankMetadata) -> MappedMemory:
        if not self.refused:
            self.refused = True
            raise NotMappable("there is no room")
        return super().map(rank)


def test_a_peer_that_can_be_mapped_after_all_is_not_opened_any_more(
    prefill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch, MapsLater)
    try:
        rank.link.send(AddPeer(prefill.metadata))
        paths = []
        for name in ("a", "opened", "fails", "met anew", "mapped"):
            if name == "fails":
                rank.agent.fail()
            lease = prefill.lease([3, 8, 1, 4], 64)
            rank.order(name, lease, TABLES[0])
            ended = rank.ended()
            assert ended is not None and ended.complete == (name != "fails"), ended
            assert name == "fails" or rank.holds(lease, TABLES[0])
            paths.append(ended.path)
        assert paths == ["staged", "staged", "staged", "mapped", "mapped"]
        assert rank.when_planned == [0, 1, 1, 0, 0]
    finally:
        rank.worker.close()
