"""`baton plan`: what would move between two KV geometries, how, and why.

Plans a prompt with scattered blocks for every rank of D; moves nothing, and needs neither torch nor
a server.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ByteSize, ConfigDict, Field

from engine.geometry import kv_groups
from kvcache.groups import KVGroups
from kvcache.layout import KVLayout
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import Endpoint, IntArray, PlanError, heads_of
from kvcache.transfer.plan.plan import Planner, TransferPlan, joined
from model.config import load_config
from model.sizes import check_parallelism
from protocol.settings.options import (
    DType,
    GeometryOptions,
    LinkOptions,
    ModelName,
    PartOfRanks,
)
from protocol.settings.settings import BatonSettings, parse


class Model(NamedTuple):
    """The part of a model that its KV cache shows."""

    num_layers: int  # of each group that shares blocks
    total_kv_heads: int  # 1 for MLA
    num_components: int  # 2 (K and V) or 1 (MLA latent)
    head_dim: int  # elements; for MLA kv_lora_rank + rope
    windows: tuple[int | None, ...] = (None,)  # of each group, see KVGroups


class Geometry(GeometryOptions):
    """How one engine lays out its KV."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    dtype: Literal[DType, "float8_e4m3fn"] = Field(
        "auto", description="type of the KV; auto: as `baton up` on --device"
    )

    @property
    def shared_by(self) -> int:
        """Ranks that share the tokens of every sequence."""
        return int(getattr(self, "dcp", 1))

    def endpoints(self, model: Model, tokens: int) -> list[Endpoint]:
        """All ranks of such an engine, with room for `tokens` tokens; `dtype` is not auto."""
        heads, groups = model.total_kv_heads, self.tp // self.shared_by
        blocks = self.num_blocks(tokens) * len(model.windows) + 1
        sizes = model.num_layers, model.num_components, self.block_size, model.head_dim
        held = [len(heads_of(rank // self.shared_by, groups, heads)) for rank in range(self.tp)]
        layouts = [KVLayout(self.kv_layout, blocks, count, *sizes, self.dtype) for count in held]
        rest = self.tp, (), self.shared_by, KVGroups(model.windows)
        return [Endpoint(each, n, *rest) for n, each in enumerate(layouts)]

    def num_blocks(self, tokens: int) -> int:
        """That a sequence of so many tokens takes; every rank has its part of each."""
        return -(-tokens // (self.block_size * self.shared_by))

    def __str__(self) -> str:
        ranks = f"tp {self.tp}" + (f", dcp {self.shared_by}" if self.shared_by > 1 else "")
        return f"{ranks}, {self.kv_layout}, {self.block_size}-token blocks, {self.dtype}"


class DecodeGeometry(Geometry):
    """How the engine that reads lays out its KV."""

    dcp: PartOfRanks = Field(1, description="ranks that share tokens, a part of --decode.tp")


class PlanSettings(LinkOptions, ModelName, BatonSettings):
    """What would move from a prefill to a decode server, how, and why."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="whose links and dtype to assume")
    tokens: int = Field(1000, ge=1, description="length of the prompt (tokens)")
    hit_tokens: int = Field(0, ge=0, description="prefix already on the decode server (tokens)")
    as_json: bool = Field(False, description="print one JSON line instead of text")
    prefill: Geometry = Field(Geometry(), description="geometry of the prefill server")
    decode: DecodeGeometry = Field(DecodeGeometry(), description="geometry of the decode server")


def explain(settings: PlanSettings, model: Model, auto_dtype: str) -> dict[str, Any]:
    """The plan of every rank of D for one prompt, and what it costs, as JSON types.

    Raises:
        PlanError: the two cannot be bridged.
    """
    hit, tokens = settings.hit_tokens, settings.tokens
    if hit > tokens:
        raise PlanError(f"hit_tokens is {hit} of {tokens} tokens; use 0 to {tokens}")
    sides: dict[str, Geometry] = {"prefill": settings.prefill, "decode": settings.decode}
    ends, tables = {}, {}
    for name, side in sides.items():
        if side.dtype == "auto":
            sides[name] = side.model_copy(update={"dtype": auto_dtype})
        ends[name] = sides[name].endpoints(model, tokens)
        tables[name] = _scattered(side.num_blocks(tokens) * len(model.windows))
    configured = CostModel.configured(settings.transfer_costs, settings.device)
    costs, groups = configured or DEFAULT_COSTS[settings.device], KVGroups(model.windows)
    ranks = []
    for end in ends["decode"]:
        planner = Planner(
            *(end, ends["prefill"], model.total_kv_heads),
            staging_bytes=settings.staging_bytes,
            convert=settings.kv_convert,
        )
        plans = []
        for group, span in enumerate(groups.spans(hit, tokens, tokens)):
            own = (tables[name][group :: groups.count] for name in ("decode", "prefill"))
            plans.append(planner.plan(planner.take((span.start, span.stop), *own), costs))
        plan = joined(plans)
        before, whole = end.stripe.num_local(np.array([hit, tokens])).tolist()
        heads = _listed(end.heads(model.total_kv_heads))
        ranks.append({"rank": end.rank, "heads": heads, "tokens": whole - before} | _facts(plan))
    used = {number for rank in ranks for number in rank["remote_ranks"]}
    per_1000 = max(rank["estimated_s"] for rank in ranks) * 1000 / max(tokens - hit, 1)
    return {
        "model": model._asdict(),
        "p": sides["prefill"].model_dump(),
        "d": sides["decode"].model_dump(),
        "tokens": tokens,
        "hit_tokens": hit,
        "idle_p_ranks": [end.rank for end in ends["prefill"] if end.rank not in used],
        "ranks": ranks,
        "estimated_s_per_1000_tokens": per_1000,  # of the slowest
    }


def _facts(plan: TransferPlan) -> dict[str, Any]:
    reads = list(plan.reads)
    lengths = np.concatenate([read.lengths for read in reads]) if reads else np.zeros(1, np.int64)
    told = ("path", "descriptors", "bytes_read", "useful_bytes", "estimated_s", "why")
    return {
        "remote_ranks": sorted({read.remote_rank for read in reads}),
        "run_bytes_min": int(lengths.min()),
        "run_bytes_median": int(np.median(lengths)),
        "run_bytes_max": int(lengths.max()),
        "chunks": sum(step.slot is not None for step in plan.steps),  # of the staged path
        **{name: getattr(plan, name) for name in told},
    }


def text(found: dict[str, Any]) -> str:
    """What `explain` found, for people."""
    windows = [window or "all" for window in found["model"]["windows"]]
    lines = [
        f"P      {DecodeGeometry(**found['p'])}",
        f"D      {DecodeGeometry(**found['d'])}",
        f"model  {len(windows)} group(s), which see {', '.join(map(str, windows))} tokens, of "
        "{num_layers} layers, {total_kv_heads} KV heads of {head_dim} elements, "
        "{num_components} component(s)".format(**found["model"]),
        f"prompt {found['tokens']} tokens, {found['hit_tokens']} of them already on D; blocks "
        "scattered on both sides",
        "",
    ]
    for rank in found["ranks"]:
        sized = {name: value for name, value in rank.items() if "bytes" in name}
        sizes = {n: ByteSize(v).human_readable(separator=" ") for n, v in sized.items()}
        lines.append(_RANK.format(**{**rank, **sizes}, owners=_listed(rank["remote_ranks"])))
    if idle := found["idle_p_ranks"]:
        lines.append(f"P ranks without a reader: {_listed(idle)}")
    lines.append(f"{found['estimated_s_per_1000_tokens'] * 1e3:.3g} ms per 1,000 tokens")
    return "\n".join(lines)


_RANK = """\
D rank {rank}: {tokens} tokens of head(s) {heads} from P rank(s) {owners}, {path}
  {descriptors} descriptors, {bytes_read} read for {useful_bytes} wanted; runs of \
{run_bytes_min} / {run_bytes_median} / {run_bytes_max} (min / median / max)
  why: {why}"""


def _scattered(count: int) -> IntArray:
    """A block table in which no two neighbours are next to each other, as after long use."""
    odd_then_even = np.concatenate((np.arange(1, count, 2), np.arange(0, count, 2)))
    return odd_then_even.astype(np.int64) + 1


def _listed(numbers: range | list[int]) -> str:
    if isinstance(numbers, range) and len(numbers) > 1:
        return f"{numbers.start}-{numbers.stop - 1}"
    return ", ".join(str(number) for number in numbers) or "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; returns the exit status."""
    settings = parse(PlanSettings, argv, prog="baton plan")
    try:
        config = load_config(settings.model, settings.revision)
        for side in (settings.prefill, settings.decode):
            check_parallelism(config, side.tp, side.shared_by)
        groups, dealt = kv_groups(config)
        sizes = max(map(len, dealt)), config.kv_heads_total, config.kv_components, config.kv_dim
        model = Model(*sizes, groups.windows)
        found = explain(settings, model, "float32" if settings.device == "cpu" else config.dtype)
    except ValueError as error:
        print(f"baton plan: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found) if settings.as_json else text(found))
    return 0
