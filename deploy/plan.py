"""`baton plan`: what would move between two KV geometries, how, and why. Moves nothing."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import PlanError
from kvcache.transfer.plan.explain import Explanation, Geometry, Model, explain
from model.config import load_config
from protocol.handshake import FP8
from protocol.settings import DEFAULT_MODEL, BatonSettings, DType, parse
from protocol.settings_kv import ContextParallelism, GeometryOptions, LinkOptions
from protocol.settings_sources import Listed


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
