"""Options about KV that both servers, `baton up` and `baton plan` share."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator

from protocol.handshake import FP8
from protocol.settings import sources
from protocol.short_repr import short_repr

KV_LAYOUT_AXES = "BHLCND"


class GeometryOptions(BaseModel):
    """How an engine's KV lies: prefill and decode servers may differ in all of it."""

    tp: int = Field(1, ge=1, le=64, description="tensor parallelism (ranks, one process each)")
    block_size: int = Field(64, ge=1, le=256, description="KV block (tokens, 1 to 256)")
    kv_layout: str = Field(
        "BHLCND",
        description="order of the KV axes: B block, H head, L layer, C K/V, N token, D element; "
        "any order that ends in D",
    )

    @field_validator("kv_layout")
    @classmethod
    def _layout_is_a_permutation(cls, order: str) -> str:
        given = short_repr(order)
        missing = [axis for axis in KV_LAYOUT_AXES if axis not in order]
        if missing:
            raise ValueError(f"{given} lacks {_axes(missing)}; use an order of {KV_LAYOUT_AXES}")
        unknown = sorted(set(order) - set(KV_LAYOUT_AXES))
        if unknown:
            raise ValueError(f"{given} has unknown {_axes(unknown)}; known: {KV_LAYOUT_AXES}")
        if len(order) != len(KV_LAYOUT_AXES):
            raise ValueError(f"{given} repeats an axis; use each of {KV_LAYOUT_AXES} once")
        if not order.endswith("D"):
            raise ValueError(f"{given} must end in D: elements of a head stay together")
        return order


def _shares_of(dcp: int, info: ValidationInfo) -> int:
    tp = info.data.get("tp", dcp)
    if tp % dcp:
        raise ValueError(f"{dcp} does not divide --tp {tp}: use a divisor of it")
    of_server = "kv_cache_dtype" in info.data
    kv_dtype = info.data.get("kv_cache_dtype" if of_server else "dtype")
    if dcp > 1 and kv_dtype == FP8:
        fix = "--kv-cache-dtype auto" if of_server else "another --dtype"
        raise ValueError(
            f"{dcp} ranks cannot share tokens stored as {kv_dtype}: use {fix}, or no --dcp"
        )
    return dcp


# Of a class that has the fields of GeometryOptions before it.
ContextParallelism = Annotated[int, Field(ge=1, le=64), AfterValidator(_shares_of)]


class LinkOptions(BaseModel):
    """How KV of another geometry is read, and what that costs, where it is not to be measured."""

    transfer_costs: sources.Listed[float] = Field(
        (),
        description="costs of every link: us per descriptor, GB/s of reading, GB/s of placing, "
        "such as 3,8,7 (none: measured at first contact; of `baton plan`: usual ones of --device)",
    )
    staging_bytes: int = Field(
        512 * 2**20, ge=1, le=2**40, description="staging memory for KV in another geometry (bytes)"
    )
    kv_convert: bool = Field(
        False, description="convert KV of another dtype or other scales instead of refusing"
    )

    @field_validator("transfer_costs")
    @classmethod
    def _costs_are_three(cls, costs: tuple[float, ...]) -> tuple[float, ...]:
        if costs and (len(costs) != 3 or not all(0 < cost < float("inf") for cost in costs)):
            raise ValueError(
                f"{short_repr(costs)} are not three numbers above 0; write such as 3,8,7"
            )
        return costs


def _axes(names: list[str]) -> str:
    return ("axis " if len(names) == 1 else "axes ") + ", ".join(names)
