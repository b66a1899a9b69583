"""`baton plan`: what would move between two KV geometries, how, and why.

Plans a prompt with scattered blocks for every rank of D; moves nothing, and needs neither torch nor
a server.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

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

    option_prefix: ClassVar[str] = "prefill."
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
        heads = len(heads_of(0, self.tp // self.shared_by, model.total_kv_heads))
        blocks = sum(map(len, self.tables(model, tokens))) + 1
        sizes = model.num_layers, model.num_components, self.block_size, model.head_dim
        layout = KVLayout(self.kv_layout, blocks, heads, *sizes, self.dtype)
        rest = self.tp, (), self.shared_by, KVGroups(model.windows)
        return [Endpoint(layout, rank, *rest) for rank in range(self.tp)]

    def tables(self, model: Model, tokens: int) -> list[IntArray]:
        """A block table of so many tokens for each group of layers, in which no two neighbours are
        next to each other, as after long use."""
        groups = len(model.windows)
        count = -(-tokens // (self.block_size * self.shared_by)) * groups
        odd_then_even = np.concatenate(
            (np.arange(2, count + 1, 2), np.arange(1, count + 1, 2))
        )
        return [odd_then_even[group::groups] for group in range(groups)]


class DecodeGeometry(Geometry):
    """How the engine that reads lays out its KV."""

    option_prefix: ClassVar[str] = "decode."

    dcp: PartOfRanks = Field(
        1, description="ranks that share tokens, a part of --decode.tp"
    )


class PlanSettings(LinkOptions, ModelName, BatonSettings):
    """What would move from a prefill to a decode server, how, and why."""

    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="whose links and dtype to assume"
    )
    tokens: int = Field(1000, ge=1, description="length of the prompt (tokens)")
    hit_tokens: int = Field(
        0, ge=0, description="prefix already on the decode server (tokens)"
    )
    as_json: bool = Field(False, description="print one JSON line instead of text")
    prefill: Geometry = Field(Geometry(), description="geometry of the prefill server")
    decode: DecodeGeometry = Field(
        DecodeGeometry(), description="geometry of the decode server"
    )


def explain(settings: PlanSettings, model: Model, auto_dtype: str) -> dict[str, Any]:
    """The plan of every rank of D for one prompt, and what it costs, as JSON types.

    Raises:
        PlanError: the two cannot be bridged.
    """
    hit, tokens, heads = settings.hit_tokens, settings.tokens, model.total_kv_heads
    if hit > tokens:
        raise PlanError(f"--hit-tokens is {hit} of {tokens} tokens; use 0 to {tokens}")
    p, d = (
        side.model_copy(update={"dtype": auto_dtype}) if side.dtype == "auto" else side
        for side in (settings.prefill, settings.decode)
    )
    owners, tables = (
        p.endpoints(model, tokens),
        (d.tables(model, tokens), p.tables(model, tokens)),
    )
    configured = CostModel.configured(settings.transfer_costs, settings.device)
    costs = configured or DEFAULT_COSTS[settings.device]
    ranks = []
    for end in d.endpoints(model, tokens):
        nbytes, converts = settings.staging_bytes, settings.kv_convert
        planner = Planner(end, owners, heads, staging_bytes=nbytes, convert=converts)
        parts = zip(end.groups.token_ranges(hit, tokens, tokens), *tables, strict=True)
        transfers = (
            planner.make_transfer((span.start, span.stop), *own) for span, *own in parts
        )
        plan = joined([planner.plan(each, costs) for each in transfers])
        before, whole = end.stripe.num_local(np.array([hit, tokens])).tolist()
        told = {
            "rank": end.rank,
            "heads": _listed(end.heads(heads)),
            "tokens": whole - before,
        }
        ranks.append(told | _facts(plan))
    used = {number for rank in ranks for number in rank["remote_ranks"]}
    per_1000 = max(rank["estimated_s"] for rank in ranks) * 1000 / max(tokens - hit, 1)
    return {
        "model": model._asdict(),
        "p": p.model_dump(),
        "d": d.model_dump(),
        "tokens": tokens,
        "hit_tokens": hit,
        "idle_p_ranks": [end.rank for end in owners if end.rank not in used],
        "ranks": ranks,
        "estimated_s_per_1000_tokens": per_1000,  # of the slowest
    }


def _facts(plan: TransferPlan) -> dict[str, Any]:
    reads = list(plan.reads)
    lengths = (
        np.concatenate([read.lengths for read in reads])
        if reads
        else np.zeros(1, np.int64)
    )
    return {
        "remote_ranks": sorted({read.remote_rank for read in reads}),
        "run_bytes_min": int(lengths.min()),
        "run_bytes_median": int(np.median(lengths)),
        "run_bytes_max": int(lengths.max()),
        # Only the staged path has chunks.
        "chunks": sum(step.slot is not None for step in plan.steps),
        "path": plan.path,
        "descriptors": plan.descriptors,
        "bytes_read": plan.bytes_read,
        "useful_bytes": plan.useful_bytes,
        "estimated_s": plan.estimated_s,
        "why": plan.explanation,
    }


def text(found: dict[str, Any]) -> str:
    """What `explain` found, for people."""
    windows = [window or "all" for window in found["model"]["windows"]]
    lines = [
        *(
            _SIDE.format(**{"name": name.upper(), "dcp": 1, **found[name]})
            for name in "pd"
        ),
        f"model  {len(windows)} group(s), which see {', '.join(map(str, windows))} tokens, of "
        "{num_layers} layers, {total_kv_heads} KV heads of {head_dim} elements, "
        "{num_components} component(s)".format(**found["model"]),
        f"prompt {found['tokens']} tokens, {found['hit_tokens']} of them already on D; blocks "
        "scattered on both sides\n",
    ]
    for rank in found["ranks"]:
        sized = {name: value for name, value in rank.items() if "bytes" in name}
        sizes = {n: ByteSize(v).human_readable(separator=" ") for n, v in sized.items()}
        lines.append(
            _RANK.format(**{**rank, **sizes}, owners=_listed(rank["remote_ranks"]))
        )
    idle = f"P ranks without a reader: {_listed(found['idle_p_ranks'])}"
    took = f"{found['estimated_s_per_1000_tokens'] * 1e3:.3g} ms per 1,000 tokens"
    return "\n".join([*lines, idle, took])


_SIDE = (
    "{name}      tp {tp}, dcp {dcp}, {kv_layout}, {block_size}-token blocks, {dtype}"
)
_RANK = """\
D rank {rank}: {tokens} tokens of head(s) {heads} from P rank(s) {owners}, {path}
  {descriptors} descriptors, {bytes_read} read for {useful_bytes} wanted; runs of \
{run_bytes_min} / {run_bytes_median} / {run_bytes_max} (min / median / max)
  why: {why}"""


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
        sizes = (
            max(map(len, dealt)),
            config.kv_heads_total,
            config.kv_components,
            config.kv_dim,
        )
        model = Model(*sizes, groups.windows)
        found = explain(
            settings, model, "float32" if settings.device == "cpu" else config.dtype
        )
    except ValueError as error:
        print(f"baton plan: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found) if settings.as_json else text(found))
    return 0
