"""One planner for many pulls: what it remembers of one must not leak into another's plan."""

import dataclasses
import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from tests.rigs.geometry import (
    COSTS,
    DTYPES,
    STAGE_ALL,
    Case,
    Side,
    cases,
    check_plan,
    staging_for,
    with_dtypes,
)

_SPARE_BLOCKS = 6


@st.composite
def pulls(draw) -> list[Case]:
    """Pulls between one pair of engines, of any tokens in any blocks."""
    first = draw(cases())
    roomy = [
        dataclasses.replace(side, num_blocks=side.num_blocks + _SPARE_BLOCKS)
        for side in (first.p, first.d)
    ]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for _ in range(draw(st.integers(2, 6))):
        stop = draw(st.integers(1, first.stop))
        start = draw(st.integers(0, stop))
        if draw(st.booleans()):  # whole blocks
            period = math.lcm(first.p.block_size, first.d.tokens_per_block)
            start, stop = start // period * period, max(stop // period * period, 1)
        is_scattered = draw(st.booleans())
        p, d = (_elsewhere(side, stop, rng, is_scattered) for side in roomy)
        lease_hash = draw(st.integers(0, 9))
        found.append(
            dataclasses.replace(
                first, p=p, d=d, start=min(start, stop), stop=stop, lease_hash=lease_hash
            )
        )
    return found


def _elsewhere(side: Side, stop: int, rng: np.random.Generator, is_scattered: bool) -> Side:
    count = -(-stop // side.tokens_per_block)
    ids = rng.permutation(side.num_blocks)[:count]
    if not is_scattered:
        first = int(rng.integers(0, side.num_blocks - count + 1))
        ids = np.arange(first, first + count)
    return dataclasses.replace(side, blocks=tuple(int(block) for block in ids))


# Between CPUs, where descriptors hurt, where copies do, and between GPUs, whose chunks taper.
_COSTS = [
    COSTS,
    STAGE_ALL,
    STAGE_ALL,
    CostModel(1e-9, 1e9, 1e9),
    DEFAULT_COSTS["cuda"],
    CostModel(1e-5, 1e6, 2e6),
]


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=250)
@given(
    pulls(),
    st.integers(0, 7),
    st.integers(1, 6),
    DTYPES,
    st.lists(st.sampled_from(_COSTS), min_size=1, max_size=3),
)
def test_a_planner_that_is_kept_plans_each_pull_exactly(
    pulls: list[Case], d_rank: int, staging_blocks: int, dtypes: tuple[str, str], costs: list
) -> None:
    pulls = [with_dtypes(case, *dtypes) for case in pulls]
    d_rank %= pulls[0].d.tp
    staging = staging_for(pulls[0], staging_blocks)
    planner = pulls[0].planner(d_rank, staging_bytes=staging, convert=True)
    plans = [
        planner.plan(case.pull(planner), costs[at % len(costs)]) for at, case in enumerate(pulls)
    ]
    for case, plan in zip(pulls, plans, strict=True):  # later pulls change nothing in earlier ones
        assert plan.slot_bytes <= staging
        check_plan(case, d_rank, plan)
