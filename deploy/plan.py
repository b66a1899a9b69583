"""`baton plan` prints which transfer moves KV between two KV geometries, and why.

It plans the pull of a prompt with scattered blocks for every rank of the decode server.
It moves no data, and needs neither torch nor a server. P is the prefill server, D is
the decode server.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import ByteSize, ConfigDict, Field

from engine.geometry import kv_groups
from kvcache.groups import KVGroups
from kvcache.layout import KVLayout
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import Endpoint, IntArray, PlanError, heads_of
from kvcache.transfer.plan.plan import Planner, TransferPlan, join_plans
from model.config import load_config
from model.sizes import check_parallelism
from protocol.settings.options import (
    DivisorOfTp,
    DType,
    GeometryOptions,
    LinkOptions,
    ModelName,
)
from protocol.settings.settings import BatonSettings, parse


class Model(NamedTuple):
    """The properties of a model that determine the shape of its KV cache."""

    num_layers: int  # layers of the KV group that has the most layers
    total_kv_heads: int  # KV heads of all ranks; 1 for MLA
    num_components: int  # 2 (K and V) or 1 (MLA latent)
    head_dim: int  # elements of a head; for MLA, kv_lora_rank plus the RoPE part
    # Attention window of each KV group, in tokens; None: the group sees all tokens.
    windows: tuple[int | None, ...] = (None,)


class Geometry(GeometryOptions):
    """The KV geometry of one engine."""

    option_prefix: ClassVar[str] = "prefill."
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    dtype: Literal[DType, "float8_e4m3fn"] = Field(
        "auto", description="type of the KV (auto: as in `baton up` on --device)"
    )

    @property
    def dcp_size(self) -> int:
        """Number of ranks that each sequence's tokens are divided among (DCP)."""
        return int(getattr(self, "dcp", 1))

    def endpoints(self, model: Model, tokens: int) -> list[Endpoint]:
        """Returns the ranks of an engine with this geometry, for `tokens` tokens of KV.

        The `dtype` of the geometry must not be "auto".
        """
        heads = len(heads_of(0, self.tp // self.dcp_size, model.total_kv_heads))
        blocks = sum(map(len, self.tables(model, tokens))) + 1
        layout = KVLayout(
            self.kv_layout,
            blocks,
            heads,
            model.num_layers,
            model.num_components,
            self.block_size,
            model.head_dim,
            self.dtype,
        )
        groups = KVGroups(model.windows)
        return [
            Endpoint(layout, rank, self.tp, (), self.dcp_size, groups)
            for rank in range(self.tp)
        ]

    def tables(self, model: Model, tokens: int) -> list[IntArray]:
        """Returns a block table of `tokens` tokens for each KV group.

        In memory, no block directly follows its predecessor in the table. This models
        the fragmented pool of a busy server.
        """
        num_groups = len(model.windows)
        num_blocks = -(-tokens // (self.block_size * self.dcp_size)) * num_groups
        even_then_odd = np.concatenate(
            (np.arange(2, num_blocks + 1, 2), np.arange(1, num_blocks + 1, 2))
        )
        return [even_then_odd[group::num_groups] for group in range(num_groups)]


GeometryT = TypeVar("GeometryT", bound=Geometry)


class DecodeGeometry(Geometry):
    """The KV geometry of the decode server's engine, which reads the KV."""

    option_prefix: ClassVar[str] = "decode."

    dcp: DivisorOfTp = Field(
        1, description="ranks that divide each sequence's tokens (divides --decode.tp)"
    )


class PlanSettings(LinkOptions, ModelName, BatonSettings):
    """Which transfer moves KV from a prefill to a decode server, and why."""

    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="device of both servers: sets link costs and auto dtype"
    )
    tokens: int = Field(1000, ge=1, description="length of the prompt (tokens)")
    hit_tokens: int = Field(
        0, ge=0, description="length of the prefix that the decode server has (tokens)"
    )
    as_json: bool = Field(
        False, alias="json", description="print one JSON line instead of text"
    )
    prefill: Geometry = Field(Geometry(), description="geometry of the prefill server")
    decode: DecodeGeometry = Field(
        DecodeGeometry(), description="geometry of the decode server"
    )


def explain(settings: PlanSettings, model: Model, auto_dtype: str) -> dict[str, Any]:
    """Returns each decode rank's transfer plan for one prompt, with estimated costs.

    All values are JSON-serializable.

    Args:
        auto_dtype: The dtype of a geometry with `dtype` "auto".

    Raises:
        PlanError: `hit_tokens` exceeds `tokens`, or no transfer between the two
            geometries is possible.
    """
    hit = settings.hit_tokens
    tokens = settings.tokens
    heads = model.total_kv_heads
    if hit > tokens:
        raise PlanError(f"--hit-tokens is {hit}, but the prompt has {tokens} tokens")
    p = _with_dtype(settings.prefill, auto_dtype)
    d = _with_dtype(settings.decode, auto_dtype)
    prefill_ranks = p.endpoints(model, tokens)
    decode_tables = d.tables(model, tokens)
    prefill_tables = p.tables(model, tokens)
    configured = CostModel.configured(settings.transfer_costs, settings.device)
    costs = configured or DEFAULT_COSTS[settings.device]
    ranks = []
    for decode_rank in d.endpoints(model, tokens):
        planner = Planner(
            decode_rank,
            prefill_ranks,
            heads,
            staging_bytes=settings.staging_bytes,
            convert=settings.kv_convert,
        )
        plans = []
        token_ranges = decode_rank.groups.token_ranges(hit, tokens, tokens)
        tables = zip(token_ranges, decode_tables, prefill_tables, strict=True)
        for token_range, decode_table, prefill_table in tables:
            span = (token_range.start, token_range.stop)
            transfer = planner.make_transfer(span, decode_table, prefill_table)
            plans.append(planner.plan(transfer, costs))
        token_counts = decode_rank.stripe.num_local(np.array([hit, tokens]))
        rank: dict[str, Any] = {
            "rank": decode_rank.rank,
            "heads": _listed(decode_rank.heads(heads)),
            "tokens": int(token_counts[1] - token_counts[0]),
        }
        ranks.append(rank | _plan_values(join_plans(plans)))
    used_p_ranks = {number for rank in ranks for number in rank["remote_ranks"]}
    per_1000 = max(rank["estimated_s"] for rank in ranks) * 1000 / max(tokens - hit, 1)
    return {
        "model": model._asdict(),
        "p": p.model_dump(),
        "d": d.model_dump(),
        "tokens": tokens,
        "hit_tokens": hit,
        "idle_p_ranks": sorted(set(range(p.tp)) - used_p_ranks),
        "ranks": ranks,
        "estimated_s_per_1000_tokens": per_1000,  # of the slowest rank
    }


def _with_dtype(side: GeometryT, auto_dtype: str) -> GeometryT:
    """Returns the geometry, with `auto_dtype` instead of "auto"."""
    return (
        side.model_copy(update={"dtype": auto_dtype}) if side.dtype == "auto" else side
    )


def _plan_values(plan: TransferPlan) -> dict[str, Any]:
    """Returns what `baton plan` reports about a plan, as JSON-serializable values.

    These are the P ranks, the path, the number and sizes of the reads, the number of
    staged chunks, the estimated cost and the reason.
    """
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
        # Each chunk of the staged path is one step. Direct steps have no slot.
        "chunks": sum(step.slot is not None for step in plan.steps),
        "path": plan.path,
        "descriptors": plan.num_descriptors,
        "bytes_read": plan.bytes_read,
        "useful_bytes": plan.useful_bytes,
        "estimated_s": plan.estimated_s,
        "why": plan.explanation,
    }


def text(report: dict[str, Any]) -> str:
    """Returns the text of a report. The report is the result of `explain`."""
    windows = [window or "all" for window in report["model"]["windows"]]
    lines = [
        *(
            _SIDE.format(**{"name": name.upper(), "dcp": 1, **report[name]})
            for name in "pd"
        ),
        f"model  {len(windows)} group(s), which see {', '.join(map(str, windows))} "
        "tokens, of {num_layers} layers, {total_kv_heads} KV heads of {head_dim} "
        "elements, {num_components} component(s)".format(**report["model"]),
        f"prompt {report['tokens']} tokens, {report['hit_tokens']} of them already on "
        "D; blocks scattered on both sides\n",
    ]
    for rank in report["ranks"]:
        sized = {name: value for name, value in rank.items() if "bytes" in name}
        sizes = {n: ByteSize(v).human_readable(separator=" ") for n, v in sized.items()}
        lines.append(
            _RANK.format(**{**rank, **sizes}, owners=_listed(rank["remote_ranks"]))
        )
    idle = f"P ranks that no D rank reads from: {_listed(report['idle_p_ranks'])}"
    cost = f"{report['estimated_s_per_1000_tokens'] * 1e3:.3g} ms per 1,000 tokens"
    return "\n".join([*lines, idle, cost])


_SIDE = (
    "{name}      tp {tp}, dcp {dcp}, {kv_layout}, {block_size}-token blocks, {dtype}"
)
_RANK = """\
D rank {rank}: {tokens} tokens of head(s) {heads} from P rank(s) {owners}, {path}
  {descriptors} descriptors, {bytes_read} read for {useful_bytes} needed; runs of \
{run_bytes_min} / {run_bytes_median} / {run_bytes_max} (min / median / max)
  why: {why}"""


def _listed(numbers: range | list[int]) -> str:
    if isinstance(numbers, range) and len(numbers) > 1:
        return f"{numbers.start}-{numbers.stop - 1}"
    return ", ".join(str(number) for number in numbers) or "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan. Returns the exit status."""
    settings = parse(PlanSettings, argv, prog="baton plan")
    try:
        config = load_config(settings.model, settings.revision)
        for side in (settings.prefill, settings.decode):
            check_parallelism(config, side.tp, side.dcp_size)
        groups, layers_by_group = kv_groups(config)
        model = Model(
            num_layers=max(map(len, layers_by_group)),
            total_kv_heads=config.kv_heads_total,
            num_components=config.kv_components,
            head_dim=config.kv_dim,
            windows=groups.windows,
        )
        auto_dtype = "float32" if settings.device == "cpu" else config.dtype
        report = explain(settings, model, auto_dtype)
    except (OSError, ValueError) as error:
        print(f"baton plan: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report) if settings.as_json else text(report))
    return 0
