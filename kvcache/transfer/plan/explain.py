"""What would move between two geometries, and why: the answer of `baton plan`.

Plans a prompt with scattered blocks for every rank of D, moves nothing, and needs neither torch nor
a server.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvcache.layout import DEFAULT_ORDER, KVLayout
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import Endpoint, IntArray, PlanError, heads_of
from kvcache.transfer.plan.plan import TransferPlan, plan_transfer

_KEYS = {"tp": "tp", "layout": "order", "block": "block_size", "dtype": "dtype", "dcp": "dcp"}


@dataclass(frozen=True)
class Model:
    """The part of a model that its KV cache shows."""

    num_layers: int
    total_kv_heads: int  # 1 for MLA
    num_components: int  # 2 (K and V) or 1 (MLA latent)
    head_dim: int  # elements; for MLA kv_lora_rank + rope


@dataclass(frozen=True)
class Geometry:
    """How one engine lays out its KV."""

    tp: int = 1
    order: str = DEFAULT_ORDER
    block_size: int = 64  # tokens
    dtype: str = "bfloat16"
    dcp: int = 1  # of D: ranks that share the tokens of every sequence

    @classmethod
    def parse(cls, text: str) -> "Geometry":
        """From `tp=2,layout=BHLCND,block=64,dtype=bfloat16,dcp=1`; what is left out keeps its
        default.

        Raises:
            PlanError: names the part that is not understood.
        """
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key.strip() not in _KEYS or not value:
                raise PlanError(f"geometry has {part!r}; use KEY=VALUE with {', '.join(_KEYS)}")
            values[_KEYS[key.strip()]] = value.strip()
        for name in values.keys() & {"tp", "block_size", "dcp"}:
            if not values[name].isdecimal():
                raise PlanError(f"geometry has {name} {values[name]!r}; use a whole number")
            values[name] = int(values[name])
        return cls(**values)

    def endpoints(self, model: Model, tokens: int) -> list[Endpoint]:
        """All ranks of such an engine, with room for `tokens` tokens.

        Raises:
            PlanError: the heads cannot be spread over tp / dcp groups of ranks.
            LayoutError: sizes, order or dtype are impossible.
        """
        heads = model.total_kv_heads
        if self.dcp < 1 or self.tp % self.dcp:
            raise PlanError(f"dcp is {self.dcp}; use a divisor of tp, which is {self.tp}")
        groups = self.tp // self.dcp
        if groups < 1 or (groups % heads and heads % groups):
            what = f"tp is {self.tp}" if self.dcp == 1 else f"tp / dcp is {groups}"
            raise PlanError(f"{what}; use a divisor or a multiple of the {heads} KV heads")
        blocks = self.num_blocks(tokens) + 1 if self.block_size > 0 else 1
        return [
            Endpoint(
                KVLayout(
                    self.order,
                    blocks,
                    len(heads_of(rank // self.dcp, groups, heads)),
                    model.num_layers,
                    model.num_components,
                    self.block_size,
                    model.head_dim,
                    self.dtype,
                ),
                rank,
                self.tp,
                dcp=self.dcp,
            )
            for rank in range(self.tp)
        ]

    def num_blocks(self, tokens: int) -> int:
        """That a sequence of so many tokens takes; every rank has its part of each."""
        return -(-tokens // (self.block_size * self.dcp))

    def __str__(self) -> str:
        ranks = f"tp {self.tp}" if self.dcp == 1 else f"tp {self.tp}, dcp {self.dcp}"
        return f"{ranks}, {self.order}, {self.block_size}-token blocks, {self.dtype}"


@dataclass(frozen=True)
class RankExplanation:
    """What one rank of D would do."""

    rank: int
    heads: str  # of the model, "0-3"
    tokens: int  # of the prompt, that it reads
    remote_ranks: tuple[int, ...]
    path: str
    descriptors: int
    bytes_read: int
    useful_bytes: int
    run_bytes_min: int
    run_bytes_median: int
    run_bytes_max: int
    chunks: int  # of the staged path
    estimated_s: float
    why: str


@dataclass(frozen=True)
class Explanation:
    """The plan of every rank of D for one prompt."""

    model: Model
    p: Geometry
    d: Geometry
    tokens: int
    hit_tokens: int  # the prefix that D already has
    idle_p_ranks: tuple[int, ...]  # nobody reads from them
    ranks: tuple[RankExplanation, ...] = field(default_factory=tuple)

    @property
    def estimated_s_per_1000_tokens(self) -> float:
        """Of the slowest rank."""
        slowest = max(rank.estimated_s for rank in self.ranks)
        return slowest * 1000 / max(self.tokens - self.hit_tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        estimate = {"estimated_s_per_1000_tokens": self.estimated_s_per_1000_tokens}
        return asdict(self) | estimate

    def __str__(self) -> str:
        model = self.model
        lines = [
            f"P      {self.p}",
            f"D      {self.d}",
            f"model  {model.num_layers} layers, {model.total_kv_heads} KV heads of "
            f"{model.head_dim} elements, {model.num_components} component(s)",
            f"prompt {self.tokens} tokens, {self.hit_tokens} of them already on D; "
            f"blocks scattered on both sides",
            "",
        ]
        for rank in self.ranks:
            lines += _rank_lines(rank)
        if self.idle_p_ranks:
            lines.append(f"P ranks without a reader: {_listed(self.idle_p_ranks)}")
        lines.append(f"{self.estimated_s_per_1000_tokens * 1e3:.3g} ms per 1,000 tokens")
        return "\n".join(lines)


def explain(
    model: Model,
    p: Geometry,
    d: Geometry,
    *,
    tokens: int = 1000,
    hit_tokens: int = 0,
    costs: CostModel = DEFAULT_COSTS["cpu"],
    staging_bytes: int | None = 512 << 20,
    convert: bool = False,
) -> Explanation:
    """Plans a prompt of `tokens` tokens from P to every rank of D.

    Raises:
        PlanError: the two cannot be bridged, or a tp or dcp does not fit the heads.
        LayoutError: one of the layouts cannot exist.
    """
    if not 0 <= hit_tokens <= tokens:
        raise PlanError(f"hit_tokens is {hit_tokens} of {tokens} tokens; use 0 to {tokens}")
    remote, local = p.endpoints(model, tokens), d.endpoints(model, tokens)
    ranks, used = [], set[int]()
    for end in local:
        plan = plan_transfer(
            end,
            remote,
            model.total_kv_heads,
            hit_tokens,
            tokens,
            _scattered(d.num_blocks(tokens)),
            _scattered(p.num_blocks(tokens)),
            costs=costs,
            staging_bytes=staging_bytes,
            convert=convert,
        )
        hit, whole = end.stripe.num_local(np.array([hit_tokens, tokens])).tolist()
        ranks.append(_explain_rank(end, model, plan, whole - hit))
        used.update(ranks[-1].remote_ranks)
    idle = tuple(end.rank for end in remote if end.rank not in used)
    return Explanation(model, p, d, tokens, hit_tokens, idle, tuple(ranks))


def _explain_rank(end: Endpoint, model: Model, plan: TransferPlan, tokens: int) -> RankExplanation:
    reads = [*plan.reads, *(read for chunk in plan.chunks for read in chunk.reads)]
    lengths = np.concatenate([read.lengths for read in reads]) if reads else np.zeros(1, np.int64)
    heads = end.heads(model.total_kv_heads)
    return RankExplanation(
        rank=end.rank,
        heads=_listed(heads),
        tokens=tokens,
        remote_ranks=tuple(sorted({read.remote_rank for read in reads})),
        path=plan.path,
        descriptors=plan.descriptors,
        bytes_read=plan.bytes_read,
        useful_bytes=plan.useful_bytes,
        run_bytes_min=int(lengths.min()),
        run_bytes_median=int(np.median(lengths)),
        run_bytes_max=int(lengths.max()),
        chunks=len(plan.chunks),
        estimated_s=plan.estimated_s,
        why=plan.why,
    )


def _rank_lines(rank: RankExplanation) -> list[str]:
    runs = " / ".join(
        _size(count) for count in (rank.run_bytes_min, rank.run_bytes_median, rank.run_bytes_max)
    )
    return [
        f"D rank {rank.rank}: {rank.tokens} tokens of head(s) {rank.heads} from P rank(s) "
        f"{_listed(rank.remote_ranks)}, {rank.path}",
        f"  {rank.descriptors} descriptors, {_size(rank.bytes_read)} read for "
        f"{_size(rank.useful_bytes)} wanted; runs of {runs} (min / median / max)",
        f"  why: {rank.why}",
    ]


def _scattered(count: int) -> IntArray:
    """A block table in which no two neighbours are next to each other, as after long use."""
    odd_then_even = np.concatenate((np.arange(1, count, 2), np.arange(0, count, 2)))
    return odd_then_even.astype(np.int64) + 1


def _listed(numbers: range | tuple[int, ...]) -> str:
    if isinstance(numbers, range) and len(numbers) > 1:
        return f"{numbers.start}-{numbers.stop - 1}"
    return ", ".join(str(number) for number in numbers) or "none"


def _size(nbytes: int) -> str:
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if unit != "B" else f"{nbytes} B"
        amount /= 1024
    return f"{amount:.3g} GiB"
