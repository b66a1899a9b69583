import json
import os
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.errors import PeerIncompatible
from protocol.handshake import (
    PROTOCOL_VERSION,
    AbortLease,
    CompatRecord,
    Complete,
    EngineMetadata,
    FrameError,
    GetMetadata,
    Gone,
    LayoutRecord,
    Metadata,
    Ok,
    RankMetadata,
    Refused,
    Renew,
    Reply,
    Request,
    check_compatible,
    check_consistent,
    open_reply,
    open_request,
    seal_reply,
    seal_request,
)

SECRET = b"cluster secret"


COMPAT = CompatRecord(
    model_fingerprint="m",
    kv_dtype="bfloat16",
    num_layers=3,
    total_kv_heads=5,
    num_components=2,
    head_dim=64,
    rope='{"theta":10000.0}',
)
LAYOUT = LayoutRecord(
    order="BHLCND",
    num_blocks=10,
    num_heads=5,
    num_layers=3,
    num_components=2,
    block_size=16,
    head_dim=64,
    dtype="bfloat16",
)


def compat(**changes: Any) -> CompatRecord:
    return replace(COMPAT, **changes)


def fp8(**changes: Any) -> CompatRecord:
    return compat(**{"kv_dtype": "float8_e4m3fn", "kv_scales": (1.0,) * 6, **changes})


def layout(num_heads: int, **changes: Any) -> LayoutRecord:
    return replace(LAYOUT, num_heads=num_heads, **changes)


def rank(number: int = 0, num_heads: int = 5, **changes: Any) -> RankMetadata:
    record = layout(num_heads)
    values: dict[str, Any] = {"rank": number, "agent_metadata": b"agent", "base_address": 1 << 40}
    values |= {"nbytes": record.nbytes, "device_id": 0, "device_kind": "cpu", "layout": record}
    return RankMetadata(**{**values, **changes})


def engine(**changes: Any) -> EngineMetadata:
    values: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "engine_id": "P", "tp_size": 1}
    values |= {"incarnation": "i", "compat": COMPAT, "ranks": [rank()]}
    return EngineMetadata(**{**values, **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "other"),
        ("kv_dtype", "float32"),
        ("num_layers", 4),
        ("total_kv_heads", 4),
        ("num_components", 1),
        ("head_dim", 128),
        ("rope", "{}"),
    ],
)
def test_a_difference_names_the_field_and_both_values(field: str, value: Any) -> None:
    with pytest.raises(PeerIncompatible) as caught:
        check_compatible(compat(), compat(**{field: value}))
    assert caught.value.param == field
    assert json.dumps(value) in caught.value.message
    assert json.dumps(getattr(compat(), field)) in caught.value.message


def test_unequal_scales_name_both_values_and_the_fix() -> None:
    ours = fp8(kv_scales=(1.0, 0.5, 1.0, 0.25, 1.0, 1.0))
    with pytest.raises(PeerIncompatible) as caught:
        check_compatible(ours, fp8(kv_scales=(1.0, 0.5, 1.0, 0.125, 1.0, 2.0)))
    assert caught.value.param == "kv_scales"
    for word in ("kv_scales differs at index 3", "0.25 here", "0.125 on the", "--kv-convert"):
        assert word in caught.value.message


def test_only_the_dtype_and_scales_may_differ_when_the_reader_converts() -> None:
    check_compatible(compat(), compat())
    check_compatible(compat(), compat(kv_dtype="float32"), allow_convert=True)
    check_compatible(compat(), fp8(), allow_convert=True)
    check_compatible(fp8(kv_scales=(2.0,) * 6), fp8(), allow_convert=True)
    with pytest.raises(PeerIncompatible):
        check_compatible(compat(), compat(rope="{}"), allow_convert=True)


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8, 10])
def test_consistent_metadata_passes_for_any_parallelism(tp: int) -> None:
    counts = [max(r * 5 // tp + 1, (r + 1) * 5 // tp) - r * 5 // tp for r in range(tp)]
    check_consistent(engine(tp_size=tp, ranks=[rank(r, counts[r]) for r in range(tp)]))


def with_layout(**changes: Any) -> EngineMetadata:
    return engine(ranks=[rank(layout=layout(5, **changes))])


INCONSISTENT = [
    (engine(protocol_version=PROTOCOL_VERSION + 1), "protocol_version"),
    (engine(engine_id=""), "engine_id"),
    (engine(incarnation="x" * 200), "incarnation"),
    (engine(tp_size=0, ranks=[]), "tp_size"),
    (engine(tp_size=2), "ranks"),
    (engine(tp_size=2, ranks=[rank(0, 2), rank(0, 3)]), "ranks"),
    (engine(tp_size=2, ranks=[rank(1, 3), rank(0, 2)]), "ranks"),
    (engine(tp_size=2, ranks=[rank(0, 3), rank(1, 2)]), "ranks[0].layout.num_heads"),
    (engine(dcp_size=2), "dcp_size"),
    (engine(compat=compat(num_layers=0)), "compat.num_layers"),
    (engine(compat=compat(num_components=3)), "compat.num_components"),
    (engine(compat=compat(kv_dtype="int8")), "compat.kv_dtype"),
    (engine(compat=compat(kv_scales=(1.0,) * 6)), "compat.kv_scales' length"),
    (engine(compat=fp8(kv_scales=())), "compat.kv_scales' length"),
    (engine(compat=fp8(kv_scales=(1.0,) * 5)), "compat.kv_scales' length"),
    (engine(compat=fp8(kv_scales=(0.0,) * 6)), "compat.kv_scales"),
    (engine(compat=fp8(kv_scales=(float("nan"),) * 6)), "compat.kv_scales"),
    (engine(ranks=[rank(agent_metadata=b"")]), "ranks[0].agent_metadata"),
    (engine(ranks=[rank(device_kind="tpu")]), "ranks[0].device_kind"),
    (engine(ranks=[rank(device_id=-1)]), "ranks[0].device_id"),
    (engine(ranks=[rank(base_address=0)]), "ranks[0].base_address"),
    (engine(ranks=[rank(base_address=2**64 - 8)]), "ranks[0].base_address"),
    (engine(ranks=[rank(nbytes=0)]), "ranks[0].nbytes"),
    (engine(ranks=[rank(nbytes=rank().nbytes - 1)]), "ranks[0].layout"),
    (with_layout(order="BHLCDN"), "ranks[0].layout.order"),
    (with_layout(order="BHLCND "), "ranks[0].layout.order"),
    (with_layout(order="BBLCND"), "ranks[0].layout.order"),
    (with_layout(dtype="float32"), "ranks[0].layout.dtype"),
    (with_layout(dtype="x"), "ranks[0].layout.dtype"),
    (with_layout(num_blocks=11), "ranks[0].layout"),
    (with_layout(num_blocks=-5), "ranks[0].layout.num_blocks"),
    (with_layout(block_size=0), "ranks[0].layout.block_size"),
    (with_layout(block_size=512), "ranks[0].layout.block_size"),
    (with_layout(num_layers=2), "ranks[0].layout.num_layers"),
    (with_layout(num_components=1), "ranks[0].layout.num_components"),
    (with_layout(head_dim=128), "ranks[0].layout.head_dim"),
    (engine(ranks=[rank(layout=layout(4))]), "ranks[0].layout.num_heads"),
]


@pytest.mark.parametrize(("metadata", "field"), INCONSISTENT, ids=[f for _, f in INCONSISTENT])
def test_metadata_that_contradicts_itself_names_the_field(
    metadata: EngineMetadata, field: str
) -> None:
    with pytest.raises(PeerIncompatible) as caught:
        check_consistent(metadata)
    assert str(caught.value.param).startswith(field)


def test_ranks_must_share_one_block_table() -> None:
    small = layout(3, num_blocks=9)
    ranks = [rank(0, 2), rank(1, 3, layout=small)]
    with pytest.raises(PeerIncompatible, match="num_blocks"):
        check_consistent(engine(tp_size=2, ranks=ranks))


REQUESTS: list[Request] = [
    GetMetadata(nonce="n"),
    Renew(nonce="n", incarnation="i", lease_id="l"),
    Complete(nonce="n", incarnation="i", lease_id="l", attempt_id="a"),
    AbortLease(nonce="n", incarnation="i", lease_id="l"),
]
REPLIES: list[Reply] = [
    Metadata(nonce="n", engine=engine()),
    Ok(nonce="n"),
    Gone(nonce="n", reason="r"),
    Refused(nonce="n", reason="r"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_survive_the_wire(request_: Request) -> None:
    assert open_request(seal_request(request_, SECRET), SECRET) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_replies_survive_the_wire(reply: Reply) -> None:
    assert open_reply(seal_reply(reply, SECRET), SECRET) == reply


def test_unknown_fields_are_ignored_and_optional_ones_have_defaults() -> None:
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(engine()))
    newer["new_field"] = newer["ranks"][0]["layout"]["new_field"] = 1
    del newer["dcp_size"], newer["ranks"][0]["extra"]
    assert msgspec.convert(newer, EngineMetadata) == engine()


@given(st.data())
@settings(deadline=None)
def test_property_no_changed_bit_is_accepted(data: st.DataObject) -> None:
    changed = bytearray(seal_request(REQUESTS[2], SECRET))
    bit = data.draw(st.integers(0, len(changed) * 8 - 1))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        open_request(bytes(changed), SECRET)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_property_garbage_is_a_frame_error(message: bytes) -> None:
    for opened in (open_request, open_reply):
        with pytest.raises(FrameError):
            opened(message, SECRET)


def test_requests_and_replies_are_not_each_others_proof() -> None:
    with pytest.raises(FrameError):
        open_request(seal_reply(Ok(nonce="n"), SECRET), SECRET)
    ok = Ok(nonce="n")
    reflected = seal_request(ok, SECRET)  # type: ignore[arg-type]
    with pytest.raises(FrameError):
        open_reply(reflected, SECRET)


def test_only_a_refusal_is_believed_without_proof() -> None:
    assert isinstance(open_reply(seal_reply(Refused(), b"other"), SECRET), Refused)
    for reply in REPLIES[:3]:
        with pytest.raises(FrameError, match="secret"):
            open_reply(seal_reply(reply, b"other"), SECRET)


def test_ids_are_bounded() -> None:
    for text in ("", "x" * 129):
        with pytest.raises(FrameError, match="lease_id"):
            open_request(
                seal_request(Renew(nonce="n", incarnation="i", lease_id=text), SECRET), SECRET
            )
    with pytest.raises(FrameError):
        open_request(os.urandom(232), SECRET)
