"""`baton plan`: what would move between two KV geometries, how, and why.

Plans a prompt with scattered blocks for every rank of D; moves nothing, and needs neither torch nor
a server.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from kvcache.layout import DEFAULT_ORDER, KVLayout
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import Endpoint, IntArray, PlanError, heads_of
from kvcache.transfer.plan.plan import TransferPlan, plan_transfer
from model.config import load_config
from protocol.handshake import FP8
from protocol.settings.kv import ContextParallelism, GeometryOptions, LinkOptions
from protocol.settings.settings import DEFAULT_MODEL, BatonSettings, DType, parse
from protocol.settings.sources import Listed


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
        sizes = model.num_layers, model.num_components, self.block_size, model.head_dim
        held = [len(heads_of(rank // self.dcp, groups, heads)) for rank in range(self.tp)]
        layouts = [KVLayout(self.order, blocks, count, *sizes, self.dtype) for count in held]
        return [Endpoint(each, rank, self.tp, dcp=self.dcp) for rank, each in enumerate(layouts)]

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

    def __str__(self) -> str:
        runs = (self.run_bytes_min, self.run_bytes_median, self.run_bytes_max)
        return (
            f"D rank {self.rank}: {self.tokens} tokens of head(s) {self.heads} from P rank(s) "
            f"{_listed(self.remote_ranks)}, {self.path}\n"
            f"  {self.descriptors} descriptors, {_size(self.bytes_read)} read for "
            f"{_size(self.useful_bytes)} wanted; runs of {' / '.join(map(_size, runs))} "
            f"(min / median / max)\n"
            f"  why: {self.why}"
        )


@dataclass(frozen=True)
class Explanation:
    """The plan of every rank of D for one prompt."""

    model: Model
    p: Geometry
    d: Geometry
    tokens: int
    hit_tokens: int  # the prefix that D already has
    idle_p_ranks: tuple[int, ...]  # nobody reads from them
    ranks: tuple[RankExplanation, ...]

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
        lines += map(str, self.ranks)
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


def _scattered(count: int) -> IntArray:
    """A block table in which no two neighbours are next to each other, as after long use."""
    odd_then_even = np.concatenate((np.arange(1, count, 2), np.arange(0, count, 2)))
    return odd_then_even.astype(np.int64) + 1


def _listed(numbers: range | tuple[int, ...]) -> str:
    if isinstance(numbers, range) and len(numbers) > 1:
        return f"{numbers.start}-{numbers.stop - 1}"
    return ", ".join(str(number) for number in numbers) or "none"


def _size(nbytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.3g} {unit}"
    return f"{nbytes} B"


class PlanGroup(GeometryOptions):
    """The geometry of one side."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    dtype: Literal[DType, "float8_e4m3fn"] = Field(
        "auto", description="type of the KV; auto: as `baton up` on --device"
    )

    def geometry(self, auto_dtype: str) -> Geometry:
        dtype = auto_dtype if self.dtype == "auto" else self.dtype
        return Geometry(self.tp, self.kv_layout, self.block_size, dtype)


class DecodePlanGroup(PlanGroup):
    """The geometry of the side that reads."""

    dcp: ContextParallelism = Field(
        1, description="decode context parallelism (ranks, a divisor of --decode.tp)"
    )

    @field_validator("dcp")
    @classmethod
    def _shares_no_fp8(cls, dcp: int, info: ValidationInfo) -> int:
        dtype = info.data.get("dtype")
        if dcp > 1 and dtype == FP8:
            raise ValueError(
                f"{dcp} ranks cannot share tokens stored as {dtype}: use another --decode.dtype, "
                "or no --decode.dcp"
            )
        return dcp

    def geometry(self, auto_dtype: str) -> Geometry:
        return replace(super().geometry(auto_dtype), dcp=self.dcp)


class PlanSettings(LinkOptions, BatonSettings):
    """What would move from a prefill to a decode server, how, and why."""

    model: str = Field(
        DEFAULT_MODEL, min_length=1, description="a local directory, a GGUF file or a hub id"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    device: Literal["cpu", "cuda"] = Field("cpu", description="whose links and dtype to assume")
    transfer_costs: Listed[float] = Field(
        (),
        description="us per descriptor, GB/s of reading, GB/s of placing, such as 3,8,7 (none: "
        "usual values of --device; servers measure their own)",
    )
    tokens: int = Field(1000, ge=1, description="length of the prompt (tokens)")
    hit_tokens: int = Field(0, ge=0, description="prefix already on the decode server (tokens)")
    staging_bytes: int = Field(512 * 2**20, ge=1, description="staging memory (bytes)")
    kv_convert: bool = Field(False, description="convert KV of another dtype instead of refusing")
    as_json: bool = Field(False, description="print one JSON line instead of text")
    prefill: PlanGroup = Field(PlanGroup(), description="geometry of the prefill server")
    decode: DecodePlanGroup = Field(DecodePlanGroup(), description="geometry of the decode server")


def plan(settings: PlanSettings) -> Explanation:
    """Plans the transfer of one prompt.

    Raises:
        ValueError: the geometries cannot be, or cannot be bridged; names field, value and fix.
    """
    config = load_config(settings.model, settings.revision)
    model = Model(config.num_layers, config.kv_heads_total, config.kv_components, config.kv_dim)
    auto_dtype = "float32" if settings.device == "cpu" else config.dtype
    sides = {
        "prefill": settings.prefill.geometry(auto_dtype),
        "decode": settings.decode.geometry(auto_dtype),
    }
    for name, geometry in sides.items():
        try:
            geometry.endpoints(model, settings.tokens)
        except PlanError as error:
            raise PlanError(f"{name} server: {error}") from error
    return explain(
        model,
        sides["prefill"],
        sides["decode"],
        tokens=settings.tokens,
        hit_tokens=settings.hit_tokens,
        costs=CostModel.configured(settings.transfer_costs, settings.device)
        or DEFAULT_COSTS[settings.device],
        staging_bytes=settings.staging_bytes,
        convert=settings.kv_convert,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; returns the exit status."""
    settings = parse(PlanSettings, argv, prog="baton plan")
    try:
        explanation = plan(settings)
    except ValueError as error:
        print(f"baton plan: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(explanation.to_dict()) if settings.as_json else explanation)
    return 0


if __name__ == "__main__":
    sys.exit(main())
