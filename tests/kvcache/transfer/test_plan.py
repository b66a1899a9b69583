"""Plans of transfers, executed in memory where every element has a unique value."""

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvcache.groups import make_groups
from kvcache.layout import KVLayout
from kvcache.transfer.move.place import place
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import Endpoint, PlanError
from kvcache.transfer.plan.plan import Planner
from tests.rigs.examples import examples
from tests.rigs.geometry import (
    COSTS,
    DTYPES,
    STAGE_ALL,
    Case,
    Side,
    cases,
    check_plan,
    fewest_descriptors,
    rest_of_block,
    staging_for,
    with_dtypes,
)
from tests.rigs.memory_placer import place_units


def check_direct(case: Case, d_rank: int) -> None:
    d_rank %= case.d.tp
    plan = case.plan(d_rank)
    check_plan(case, d_rank, plan)
    assert plan.path == "direct"
    tokens = case.d.stored_tokens(d_rank, np.arange(case.start, case.stop))
    if plan.bytes_read > plan.useful_bytes:
        tokens = np.concatenate([tokens, rest_of_block(case, d_rank)])
    assert plan.num_descriptors == fewest_descriptors(case, d_rank, tokens)


@pytest.mark.parametrize(
    ("windows", "max_len", "heads", "head_dim", "window"),
    [
        ([128, None] * 12, 131_072, 8, 64, 128),  # gpt-oss-20b
        # Gemma 3 27B.
        (([1024] * 5 + [None]) * 10 + [1024] * 2, 131_072, 16, 128, 1024),
    ],
)
def test_local_layers_move_only_their_window_of_long_prompts(
    windows, max_len, heads, head_dim, window
):
    """The number of bytes that are moved for 131,072 tokens must not depend on block
    sizes.

    P has freed all blocks that are before the windows.
    """
    groups, dealt = make_groups(windows, max_len + 1)
    size = max(map(len, dealt))
    stop = max_len
    moved = []
    for p_size, d_size in ((16, 16), (64, 16), (16, 128)):
        ends = [
            Endpoint(
                KVLayout("BHLCND", 1 << 18, heads, size, 2, n, head_dim, "bfloat16"),
                0,
                1,
                (),
                1,
                groups,
            )
            for n in (p_size, d_size)
        ]
        tables = [
            groups.prefix_table(range(1, stop // n * groups.count + 1), stop, n)
            for n in (p_size, d_size)
        ]
        planner = Planner(ends[1], ends[:1], heads)
        num_bytes = 0
        for group, span in enumerate(groups.token_ranges(0, stop, stop)):
            local_table, remote_table = (
                groups.group_table(table, group) for table in reversed(tables)
            )
            plan = planner.plan(
                planner.make_transfer(
                    (span.start, span.stop), local_table, remote_table
                ),
                COSTS,
            )
            num_bytes += sum(read.nbytes for read in plan.reads)
        moved.append(num_bytes)
    of_layer = stop * heads * head_dim * 2 * 2
    local = sum(w is not None for w in groups.windows) * size
    whole = (groups.count * size - local) * of_layer
    assert moved == [whole + local * of_layer * window // stop] * 3
    assert moved[0] < (0.51 if window == 128 else 0.18) * len(windows) * of_layer


@st.composite
def pulls(draw: st.DrawFn) -> list[Case]:
    """Draw pulls of any tokens in any blocks, all between the same two engines."""
    first = draw(cases())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cases_of_pair = [first]
    for _ in range(draw(st.integers(0, 4))):
        stop = draw(st.integers(1, first.stop))
        start = draw(st.integers(0, stop))
        if draw(st.booleans()):  # `start` and `stop` at block boundaries
            period = math.lcm(first.p.block_size, first.d.tokens_per_block)
            stop = max(stop // period * period, 1)
            start = min(start // period * period, stop)
        p, d = (
            _elsewhere(side, stop, rng, draw(st.booleans()))
            for side in (first.p, first.d)
        )
        span = {"start": start, "stop": stop, "lease_hash": draw(st.integers(0, 9))}
        cases_of_pair.append(dataclasses.replace(first, p=p, d=d, **span))
    return cases_of_pair


def _elsewhere(
    side: Side, stop: int, rng: np.random.Generator, is_scattered: bool
) -> Side:
    count = -(-stop // side.tokens_per_block)
    first = int(rng.integers(0, side.num_blocks - count + 1))
    ids = (
        rng.permutation(side.num_blocks)[:count]
        if is_scattered
        else first + np.arange(count)
    )
    return dataclasses.replace(side, blocks=tuple(ids.tolist()))


# Costs between CPUs, with expensive descriptors, with expensive copies, between GPUs,
# and of a slow link.
_COSTS = [
    COSTS,
    STAGE_ALL,
    CostModel(1e-9, 1e9, 1e9),
    DEFAULT_COSTS["cuda"],
    CostModel(1e-5, 1e6, 2e6),
]


def check_remembered_plans(
    pulls: list[Case],
    d_rank: int,
    staging_blocks: int,
    dtypes: Any,
    costs: list,
    place_copy: Any,
) -> None:
    """Let one planner plan many pulls. The planner remembers decisions, but every plan
    must be correct for its own pull.
    """
    d_rank %= pulls[0].d.tp
    pulls = [with_dtypes(case, *dtypes) for case in pulls]
    staging = staging_for(pulls[0], staging_blocks)
    planner = pulls[0].planner(d_rank, staging_bytes=staging, convert=True)
    plans = [
        planner.plan(case.pull(planner), each)
        for case, each in zip(pulls, costs, strict=False)
    ]
    # Plans are checked only now, because later pulls must not change earlier plans.
    for case, plan in zip(pulls, plans, strict=True):
        assert plan.slot_bytes <= staging // 2
        check_plan(case, d_rank, plan, place_copy)
        assert plan.path == "staged" or dtypes[0] == dtypes[1] or not plan.useful_bytes


RANKS = st.integers(0, 7)
STAGING_BLOCKS = st.integers(1, 6)
COST_LISTS = st.lists(st.sampled_from(_COSTS), min_size=5, max_size=5)
DIRECT = partial(given(cases(), RANKS), check_direct)
# Functions that copy with torch, or with the kernel's arithmetic.
PLACE_FUNCTIONS = st.sampled_from([place, place_units])
REMEMBERED = partial(
    given(pulls(), RANKS, STAGING_BLOCKS, DTYPES, COST_LISTS, PLACE_FUNCTIONS),
    check_remembered_plans,
)


PROPERTIES = [(DIRECT, 500), (REMEMBERED, 150)]
PROPERTIES += [
    pytest.param(law, 10_000, marks=pytest.mark.slow) for law, _ in PROPERTIES
]


@pytest.mark.parametrize(("check_law", "count"), PROPERTIES)
def test_plans_move_exactly_the_tokens_and_direct_plans_are_minimal(check_law, count):
    examples(count, suppress_health_check=list(HealthCheck))(check_law())()


def make_case(p: Side, d: Side, **changes) -> Case:
    fields = {
        "heads": 8,
        "layers": 2,
        "components": 2,
        "head_dim": 4,
        "start": 0,
        "stop": 128,
    }
    return Case(p, d, **(fields | changes))


def side(
    tp: int, block_size: int = 16, order: str = "BHLCND", tokens: int = 128
) -> Side:
    """Return a side with the blocks for `tokens` tokens, in descending order."""
    count = -(-tokens // block_size)
    return Side(tp, order, block_size, tuple(range(count, 0, -1)), count + 1)


def scattered(dense_side: Side) -> Side:
    """Return the side with its even blocks followed by its odd blocks, so that no two
    consecutive blocks are adjacent.
    """
    count = len(dense_side.blocks)
    return dataclasses.replace(
        dense_side, blocks=(*range(2, count + 1, 2), *range(1, count + 1, 2))
    )


@pytest.mark.parametrize(
    ("dcp", "tokens"), [(4, 64), (2, 32)], ids=["one group", "two groups"]
)
def test_ranks_that_share_tokens_start_at_different_copies(dcp, tokens):
    """Every rank of P has a copy of the MLA latent. No two ranks of D may read from the
    same rank of P.
    """
    p = side(4, tokens=tokens)
    d = Side(4, "BHLCND", 16, (1,), 2, dcp=dcp)
    case = make_case(p, d, heads=1, components=1, stop=tokens, lease_hash=5)
    reads = [read for d_rank in range(4) for read in case.plan(d_rank).reads]
    assert sorted(read.remote_rank for read in reads) == [0, 1, 2, 3]


def test_chunks_fit_half_the_staging_memory_and_end_on_blocks_of_both_sides():
    case = make_case(side(1, 16), side(1, 24, tokens=144), stop=128)
    plan = case.plan(0, staging_bytes=2 * 3 * 16 * 8 * 2 * 2 * 4 * 4)
    assert plan.path == "staged" and len(plan.steps) == 3
    block_bytes = case.layout(case.d, 0).byte_strides["B"]
    written = [
        {int(place) // block_bytes for copy in step.copies for place in copy.targets}
        for step in plan.steps
    ]
    assert not any(a & b for i, a in enumerate(written) for b in written[:i])


def test_cheaper_path_wins_and_explanation_names_the_rejected_path():
    case = make_case(side(1, 16), side(1, 64))
    descriptors_cost = case.plan(
        0, costs=CostModel(1.0, 1e9, 1e9), staging_bytes=1 << 20
    )
    bytes_cost = case.plan(0, costs=CostModel(1e-12, 1e9, 1e3), staging_bytes=1 << 20)
    assert (descriptors_cost.path, bytes_cost.path) == ("staged", "direct")
    assert "direct path would read 256 runs" in descriptors_cost.explanation
    assert "staged path would read" in bytes_cost.explanation
    neighbours = make_case(side(1), side(1)).plan(0, costs=CostModel(1.0, 1e9, 1e9))
    assert neighbours.num_descriptors == round(neighbours.estimated_s) == 1


def test_staging_memory_below_two_peer_blocks_makes_the_path_direct():
    case = make_case(side(1, 16), side(1, 64))
    block = 16 * 8 * 2 * 2 * 4 * 4
    plan = case.plan(0, staging_bytes=2 * block - 1)
    assert plan.path == "direct"
    assert (
        f"staging_bytes is {2 * block - 1}; a block of the peer takes {block} bytes"
        in plan.explanation
    )
    assert case.plan(0, staging_bytes=2 * block).path == "staged"


ALIKE = make_case(side(1), side(1))
MIXED = with_dtypes(make_case(side(1, 16), side(1, 64)), "float32", "float16")
SHARING = Side(2, "BHLCND", 16, (1, 2, 3, 4), 5, dcp=2)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (MIXED, {"staging_bytes": 1 << 20}, "float16 here and float32 on the peer"),
        (MIXED, {"convert": True}, "set --staging-bytes"),
        (
            MIXED,
            {"convert": True, "staging_bytes": 1000},
            r"is 1000; .* use at least \d+",
        ),
        (make_case(side(1, 32), SHARING, heads=1), {}, "16 here and 32 on the peer"),
        (
            make_case(side(1, 12), SHARING, heads=1),
            {},
            "16 here and 12 on the peer.*--block-size 12",
        ),
        (
            make_case(side(1), side(1), start=-1, stop=4),
            {},
            r"token range is \[-1, 4\)",
        ),
        (make_case(side(1), side(1), start=5, stop=4), {}, r"token range is \[5, 4\)"),
    ],
)
def test_impossible_plans_are_refused(case, options, message):
    with pytest.raises(PlanError, match=message):
        case.plan(0, **options)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ((), "has 7 blocks of 16 tokens; 128 tokens need 8"),
        ((9,), "names block 9; the pool has blocks 0 to 8"),
        ((-1,), "names block -1"),
    ],
)
@pytest.mark.parametrize("which", ["p", "d"])
def test_block_tables_that_do_not_fit_are_refused(which, last, message):
    changed = dataclasses.replace(side(1), blocks=(1, 2, 3, 4, 5, 6, 7, *last))
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(ALIKE, **{which: changed}).plan(0)
