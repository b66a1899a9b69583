"""The planner turns two geometries and a range of tokens into the steps of a transfer.

- Tensor parallelism decides which heads a rank of D reads from each rank of P
  (endpoint.py).
- Context parallelism decides which blocks of P a rank of D reads (kvcache/stripe.py).
- The tokens are cut at the block borders of both sides. The strides of the two layouts
  decide how long the runs are (block_copy.py).
- The cheaper of two paths is taken (strategy.py):

    direct   READ every run into its final place in the pool
    staged   READ the long runs of the peer's layout into staging memory, then copy
             ("place") the KV into the pool

A mapped pull needs no plan, because it copies out of P's mapped memory instead of
posting READs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np

from kvcache.transfer.plan.block_copy import ReadDescriptors, Transfer, check_blocks
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import (
    Endpoint,
    HeadGroup,
    IntArray,
    PlanError,
    check_endpoints,
    head_groups,
    scale_factors,
)
from kvcache.transfer.plan.steps import Step
from kvcache.transfer.plan.strategy import (
    Estimate,
    TransferStrategy,
    cheapest_direct,
    cheapest_staged,
    describe_runs,
    steps,
)

# Limit on the number of remembered decisions, one for each kind of pull; see
# `Planner._decide`. The pulls from one peer have only a few dozen kinds.
_MAX_DECISIONS = 1024


@dataclass(frozen=True)
class TransferPlan:
    """The steps by which one rank of the decode server reads its share of the KV."""

    path: str  # "direct", "staged", or "mixed" for steps of both paths
    transfer: Transfer  # the transfer of the first layer group that has steps
    steps: tuple[Step, ...]
    estimated_s: float
    reason: str  # why this path was chosen, for the operator

    @property
    def reads(self) -> Iterator[ReadDescriptors]:
        """Yields the READs of all steps. A step computes its READs on first use."""
        return (read for step in self.steps for read in step.reads)

    @cached_property
    def num_descriptors(self) -> int:
        return sum(len(read.lengths) for read in self.reads)

    @property
    def useful_bytes(self) -> int:
        """Bytes of the wanted tokens, in the peer's dtype."""
        return sum(step.transfer.useful_bytes for step in self.steps)

    @property
    def bytes_read(self) -> int:
        return sum(step.bytes_read for step in self.steps)

    @property
    def slot_bytes(self) -> int:
        """The size of a slot: the staging memory of the largest step; 0 if direct."""
        return max((step.slot.nbytes for step in self.steps if step.slot), default=0)

    @property
    def explanation(self) -> str:
        """A text for the operator: the path, its cost, and why it was chosen.

        Computes the READs of all steps.
        """
        if not self.num_descriptors:
            return f"{self.path}: {self.reason}"
        runs = describe_runs(self.num_descriptors, self.bytes_read, self.estimated_s)
        return f"{self.path}: {runs}; {self.reason}"


def join_plans(plans: Sequence[TransferPlan]) -> TransferPlan:
    """Joins the plans of a pull's layer groups into one plan."""
    nonempty_plans = [plan for plan in plans if plan.steps]
    if not nonempty_plans:
        return plans[0]
    first = nonempty_plans[0]
    if len(nonempty_plans) == 1:
        return first
    paths = {plan.path for plan in nonempty_plans}
    return TransferPlan(
        path=first.path if len(paths) == 1 else "mixed",
        transfer=first.transfer,
        steps=tuple(step for plan in plans for step in plan.steps),
        estimated_s=sum(plan.estimated_s for plan in plans),
        reason=first.reason,
    )


class _Decision(NamedTuple):
    """The chosen strategy for one kind of pull."""

    strategy: TransferStrategy
    seconds_per_token: float
    reason: str


class Planner:
    """Plans the pulls of one rank of the decode server (D) from one prefill engine (P).

    The strategy for each kind of pull is chosen once and remembered.

    Args:
        local: this rank of D.
        remote: all ranks of P, by rank.
        total_kv_heads: KV heads of the model.
        staging_bytes: size of the staging memory; None: there is no staging memory, so
            all paths are direct.
        convert: allow the staged path to change the dtype and the scales.

    Raises:
        PlanError: no plan can bridge the geometries.
    """

    def __init__(
        self,
        local: Endpoint,
        remote: Sequence[Endpoint],
        total_kv_heads: int,
        *,
        staging_bytes: int | None = None,
        convert: bool = False,
    ) -> None:
        check_endpoints(local, remote, total_kv_heads, convert=convert)
        self._local = local
        self._remote = tuple(remote)
        self._total_kv_heads = total_kv_heads
        self._staging_bytes = staging_bytes
        self._period = lcm(local.layout.block_size, remote[0].layout.block_size)
        self._scale_factors = scale_factors(remote[0], local)
        heads = local.heads(total_kv_heads)
        self._groups = head_groups(heads, len(remote), total_kv_heads, remote[0].dcp)
        self._decision_costs: CostModel | None = None
        self._decisions: dict[tuple[int, ...], _Decision] = {}  # by kind of pull

    @property
    def head_groups(self) -> tuple[HeadGroup, ...]:
        """The heads of this rank, grouped by the ranks of P that own them."""
        return self._groups

    def make_transfer(
        self,
        tokens: tuple[int, int],
        local_block_ids: Sequence[int] | IntArray,
        remote_block_ids: Sequence[int] | IntArray,
        *,
        lease_hash: int = 0,
    ) -> Transfer:
        """Makes the transfer of a pull; checks that its blocks exist on both sides.

        Args:
            tokens: (start, stop): tokens [start, stop) of the sequence are pulled.
            local_block_ids: D's blocks from token 0 of the sequence on. A block has
                (D's block size) x (D's dcp) tokens; this rank stores a part of them.
            remote_block_ids: P's leased blocks from token 0 on, each of P's block size.
                If P's dcp is above 1, each id occurs dcp times in a row, once per rank.
            lease_hash: selects the rank of P for heads that several ranks hold, so that
                the pulls of different leases spread the load over these ranks.

        Raises:
            PlanError: the token range is impossible, or a block table does not fit it.
        """
        start, stop = tokens
        if not 0 <= start <= stop:
            raise PlanError(f"token range is [{start}, {stop}); use 0 <= start <= stop")
        local = self._local
        if local.dcp > 1:
            start, stop = local.stripe.num_local(np.array([start, stop])).tolist()
        remote_block_ids, lanes = self._split_remote_table(remote_block_ids)
        token_range = range(start, stop)
        # With windows, tables have null blocks (id 0), but never for tokens to pull.
        min_block = int(local.groups.drops_blocks)
        local_blocks = check_blocks(
            "local_block_ids",
            local_block_ids,
            local.layout.num_blocks,
            local.layout.block_size,
            token_range,
            min_block,
        )
        remote_blocks = check_blocks(
            "remote_block_ids",
            remote_block_ids,
            min(end.layout.num_blocks for end in self._remote),
            self._remote[0].layout.block_size,
            token_range,
            min_block,
        )
        return Transfer(
            local=local,
            remote=self._remote,
            total_kv_heads=self._total_kv_heads,
            groups=self._groups,
            tokens=token_range,
            local_blocks=local_blocks,
            remote_blocks=remote_blocks,
            lanes=lanes,
            shift=local.rank + lease_hash,
            scale_factors=self._scale_factors,
        )

    def _split_remote_table(
        self, block_ids: Sequence[int] | IntArray
    ) -> tuple[Sequence[int] | IntArray, IntArray]:
        """The part of P's block table that this rank reads, and the lane of each block.

        The lane is as in Transfer: the number of the rank that stores the block, within
        P's context-parallel group.
        """
        peer = self._remote[0]
        lanes = np.arange(len(block_ids)) % peer.dcp
        if self._local.dcp == 1:
            return block_ids, lanes
        stripe = self._local.stripe
        size = peer.layout.block_size
        return stripe.remote_blocks(block_ids, size), stripe.remote_blocks(lanes, size)

    def plan(self, transfer: Transfer, costs: CostModel) -> TransferPlan:
        """The cheapest plan of a transfer from `make_transfer`.

        Raises:
            PlanError: the KV has to be converted, but there is not enough staging
                memory.
        """
        if not transfer.tokens:
            return TransferPlan("direct", transfer, (), 0.0, "there is nothing to read")
        decision = self._decide(transfer, costs)
        strategy = decision.strategy
        return TransferPlan(
            path="staged" if strategy.staged else "direct",
            transfer=transfer,
            steps=tuple(steps(transfer, strategy, costs, self._staging_bytes or 0)),
            estimated_s=decision.seconds_per_token * len(transfer.tokens),
            reason=decision.reason,
        )

    def _decide(self, transfer: Transfer, costs: CostModel) -> _Decision:
        """The cheapest strategy, chosen once for each kind of pull.

        All pulls of one kind begin and end at the same offsets in a block. They have
        about the same length, and about the same share of blocks that are neighbors in
        memory.
        """
        if costs is not self._decision_costs or len(self._decisions) >= _MAX_DECISIONS:
            self._decision_costs = costs
            self._decisions.clear()
        start = transfer.tokens.start
        stop = transfer.tokens.stop
        num_periods = max(stop // self._period + -start // self._period, 0)
        size = self._local.layout.block_size
        local_blocks = transfer.local_blocks[start // size : -(-stop // size)]
        ordinals = transfer.remote_ordinals
        remote_blocks = transfer.remote_blocks[ordinals.start : ordinals.stop]
        kind = (
            start % self._period,
            stop % self._period,
            num_periods.bit_length() if num_periods else start - stop,
            _neighbour_quarters(local_blocks),
            _neighbour_quarters(remote_blocks),
        )
        if kind not in self._decisions:
            best, reason = self._find_cheapest(transfer, costs)
            seconds_per_token = best.seconds / len(transfer.tokens)
            decision = _Decision(best.strategy, seconds_per_token, reason)
            self._decisions[kind] = decision
        return self._decisions[kind]

    def _find_cheapest(
        self, transfer: Transfer, costs: CostModel
    ) -> tuple[Estimate, str]:
        """The estimate of the cheapest strategy, and the reason for its path."""
        staging_bytes = self._staging_bytes
        if transfer.converts:
            if staging_bytes is None:
                raise PlanError(
                    "converting KV dtype or scales needs staging memory, but there is "
                    "none: set --staging-bytes"
                )
            local_dtype = self._local.layout.dtype
            remote_dtype = self._remote[0].layout.dtype
            scales = "" if transfer.scale_factors is None else " with different scales"
            reason = f"KV is converted from {remote_dtype} to {local_dtype}{scales}"
            return cheapest_staged(transfer, costs, staging_bytes), reason
        direct = cheapest_direct(transfer, costs)
        if staging_bytes is None:
            return direct, "there is no staging memory"
        try:
            staged = cheapest_staged(transfer, costs, staging_bytes)
        except PlanError as error:
            # The peer's blocks are too large for the staging memory.
            return direct, str(error)
        if direct.seconds <= staged.seconds:
            return direct, f"the staged path would read {staged}"
        return staged, f"the direct path would read {direct}"


def _neighbour_quarters(blocks: IntArray) -> int:
    """The share of blocks that follow the table's previous block directly in memory.

    Returns:
        The share in quarters, rounded down: 0 to 4.
    """
    if len(blocks) < 2:
        return 0
    return 4 * int(np.count_nonzero(np.diff(blocks) == 1)) // (len(blocks) - 1)
