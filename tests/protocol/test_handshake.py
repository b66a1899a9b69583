import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.errors import PeerIncompatible
from protocol.handshake import (
    PROTOCOL_VERSION,
    AbortLease,
    CompatRecord,
    Complete,
    EngineMetadata,
    GetMetadata,
    LayoutRecord,
    LeaseEnded,
    MessageError,
    Metadata,
    Ok,
    RankMetadata,
    Refused,
    Renew,
    Reply,
    Request,
    check_compatible,
    open_reply,
    open_request,
    seal_reply,
    seal_request,
)
from protocol.metadata_rules import check_consistent
from protocol.pairing import kv_digest, may_pair, same_model

SECRET = b"cluster secret"


COMPAT = CompatRecord(
    model_fingerprint="m", kv_dtype="bfloat16", num_layers=3, total_kv_heads=5,
    num_components=2, head_dim=64, rope='{"theta":10000.0}',
)  # fmt: skip
LAYOUT = LayoutRecord(
    order="BHLCND", num_blocks=10, num_heads=5, num_layers=3, num_components=2,
    block_size=16, head_dim=64, dtype="bfloat16",
)  # fmt: skip


def compat(**changes: Any) -> CompatRecord:
    return replace(COMPAT, **changes)


def fp8_compat(**changes: Any) -> CompatRecord:
    return compat(**{"kv_dtype": "float8_e4m3fn", "kv_scales": (1.0,) * 6, **changes})


def layout(num_heads: int = 5, **changes: Any) -> LayoutRecord:
    return replace(LAYOUT, num_heads=num_heads, **changes)


def rank(number: int = 0, num_heads: int = 5, **changes: Any) -> RankMetadata:
    record = layout(num_heads)
    values: dict[str, Any] = {
        "rank": number,
        "agent_metadata": b"agent",
        "base_address": 1 << 40,
    }
    values |= {
        "nbytes": record.nbytes,
        "device_id": 0,
        "device_kind": "cpu",
        "layout": record,
    }
    return RankMetadata(**{**values, **changes})


def engine(**changes: Any) -> EngineMetadata:
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "engine_id": "P",
        "tp_size": 1,
    }
    values |= {"incarnation": "i", "compat": COMPAT, "ranks": [rank()]}
    return EngineMetadata(**{**values, **changes})


# For each field of COMPAT, a different value.
DIFFERENT_VALUES = {
    "model_fingerprint": "x",
    "kv_dtype": "float32",
    "num_layers": 4,
    "total_kv_heads": 4,
    "num_components": 1,
    "head_dim": 128,
    "rope": "{}",
}
LONGROPES = [
    compat(
        model_fingerprint=name,
        rope=f'{{"rope_type": "longrope", "divisors": "{name}"}}',
    )
    for name in ("short", "long")
]
SCALED, DIFFERENTLY_SCALED = (
    fp8_compat(kv_scales=(1.0, 0.5, 1.0, *s)) for s in ((0.25, 1, 1), (0.125, 1, 2))
)
# Rows: local record, remote record, and words that the error must contain. The first
# word is the field.
DIFFERENCES = [
    *((COMPAT, compat(**{field: value}), (field, json.dumps(getattr(COMPAT, field)),
       json.dumps(value))) for field, value in DIFFERENT_VALUES.items()),
    (SCALED, DIFFERENTLY_SCALED,
     ("kv_scales", "differs at index 3", "0.25 here", "0.125 on the", "--kv-convert")),
    (*LONGROPES,
     ("model_fingerprint", "the same --max-model-len, which selects longrope")),
]  # fmt: skip


@pytest.mark.parametrize(("local", "remote", "words"), DIFFERENCES)
def test_difference_is_reported_with_field_both_values_and_fix(local, remote, words):
    with pytest.raises(PeerIncompatible) as caught:
        check_compatible(local, remote)
    assert caught.value.param == words[0]
    assert all(word in caught.value.message for word in words), caught.value.message


def test_only_dtype_and_scales_may_differ_if_the_reader_converts():
    check_compatible(COMPAT, COMPAT)
    check_compatible(COMPAT, compat(kv_dtype="float32"), allow_convert=True)
    check_compatible(COMPAT, fp8_compat(), allow_convert=True)
    check_compatible(fp8_compat(kv_scales=(2.0,) * 6), fp8_compat(), allow_convert=True)
    with pytest.raises(PeerIncompatible):
        check_compatible(COMPAT, compat(rope="{}"), allow_convert=True)


@pytest.mark.parametrize("field", DIFFERENT_VALUES)
@pytest.mark.parametrize("converts", [False, True])
def test_kv_digests_pair_exactly_the_compatible_engines(field, converts):
    for prefill, decode in (
        (COMPAT, COMPAT),
        (fp8_compat(), COMPAT),
        (compat(**{field: DIFFERENT_VALUES[field]}), COMPAT),
    ):
        try:
            check_compatible(decode, prefill, allow_convert=converts)
        except PeerIncompatible:
            is_compatible = False
        else:
            is_compatible = True
        prefill_digest = kv_digest(prefill)
        decode_digest = kv_digest(decode, converts)
        assert may_pair(prefill_digest, decode_digest) is is_compatible
        assert same_model(prefill_digest, decode_digest) is (
            prefill.model_fingerprint == decode.model_fingerprint
        )
        assert same_model("vllm", decode_digest) and same_model("", decode_digest)
        assert (
            may_pair("", decode_digest)
            and may_pair(prefill_digest, "")
            and not may_pair("vllm", decode_digest)
        )
        assert (
            may_pair("vllm", "vllm")
            and not may_pair("vllm", "")
            and not may_pair("", "vllm")
        )


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8, 10])
def test_consistent_metadata_passes_for_any_parallelism(tp):
    counts = [max(r * 5 // tp + 1, (r + 1) * 5 // tp) - r * 5 // tp for r in range(tp)]
    check_consistent(engine(tp_size=tp, ranks=[rank(r, counts[r]) for r in range(tp)]))


def ranks(**changes: Any) -> EngineMetadata:
    return engine(ranks=[rank(**changes)])


INCONSISTENT = [
    (engine(protocol_version=PROTOCOL_VERSION + 1), "protocol_version"),
    (engine(tp_size=0, ranks=[]), "ranks"),
    (engine(tp_size=2), "ranks"),
    (engine(tp_size=2, ranks=[rank(0, 2), rank(0, 3)]), "ranks"),
    (engine(tp_size=2, ranks=[rank(1, 3), rank(0, 2)]), "ranks"),
    (engine(compat=compat(kv_dtype="int8")), "compat.kv_dtype"),
    (engine(compat=compat(kv_scales=(1.0,) * 6)), "compat.kv_scales' length"),
    *(
        (engine(compat=fp8_compat(kv_scales=(1.0,) * n)), "compat.kv_scales' length")
        for n in (0, 5)
    ),
    *(
        (engine(compat=fp8_compat(kv_scales=(s,) * 6)), "compat.kv_scales")
        for s in (0.0, math.nan)
    ),
    (ranks(device_kind="tpu"), "ranks[0].device_kind"),
    (ranks(device_id=-1), "ranks[0].device_id"),
    *(
        (ranks(base_address=address), "ranks[0].base_address")
        for address in (0, 2**64 - 8)
    ),
    (ranks(nbytes=0), "ranks[0].nbytes"),
    (ranks(nbytes=rank().nbytes - 1), "ranks[0].layout"),
    (ranks(layout=layout(num_blocks=11)), "ranks[0].layout"),
    *(
        (ranks(layout=layout(block_size=n)), "ranks[0].layout.block_size")
        for n in (0, 512)
    ),
    *(
        (ranks(layout=layout(dtype=name)), "ranks[0].layout.dtype")
        for name in ("float32", "x")
    ),
    *(
        (ranks(layout=layout(order=o)), "ranks[0].layout.order")
        for o in ("BHLCDN", "BBLCND")
    ),
    (ranks(layout=layout(num_blocks=-5)), "ranks[0].layout.num_blocks"),
]


@pytest.mark.parametrize(
    ("metadata", "field"), INCONSISTENT, ids=[f for _, f in INCONSISTENT]
)
def test_error_about_contradictory_metadata_names_the_field(metadata, field):
    with pytest.raises(PeerIncompatible) as caught:
        check_consistent(metadata)
    assert str(caught.value.param).startswith(field)


REQUESTS: list[Request] = [
    GetMetadata(nonce="n"),
    Renew(nonce="n", incarnation="i", lease_id="l"),
    Complete(nonce="n", incarnation="i", lease_id="l", attempt_id="a"),
    AbortLease(nonce="n", incarnation="i", lease_id="l"),
]
REPLIES: list[Reply] = [
    Metadata(nonce="n", engine=engine()),
    Ok(nonce="n"),
    LeaseEnded(nonce="n", reason="r"),
    Refused(nonce="n", reason="r"),
]


def test_messages_survive_the_wire():
    for request in REQUESTS:
        assert open_request(seal_request(request, SECRET), SECRET) == request
    for reply in REPLIES:
        assert open_reply(seal_reply(reply, SECRET), SECRET) == reply


def test_unknown_fields_are_ignored_and_optional_fields_have_defaults():
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(engine()))
    newer["new_field"] = newer["ranks"][0]["layout"]["new_field"] = 1
    del newer["dcp_size"], newer["ranks"][0]["extra"]
    assert msgspec.convert(newer, EngineMetadata) == engine()

    class Newer(GetMetadata, frozen=True, tag="get_metadata"):
        new_field: int = 1

    assert open_request(seal_request(Newer(nonce="n"), SECRET), SECRET) == GetMetadata(
        nonce="n"
    )


@given(st.data())
def test_property_message_with_a_changed_bit_is_refused(data):
    changed = bytearray(seal_request(REQUESTS[2], SECRET))
    bit = data.draw(st.integers(0, len(changed) * 8 - 1))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MessageError):
        open_request(bytes(changed), SECRET)


@given(st.binary(max_size=200))
def test_property_random_bytes_are_a_frame_error(message):
    for open_message in (open_request, open_reply):
        with pytest.raises(MessageError):
            open_message(message, SECRET)


def test_mac_of_a_request_is_not_valid_for_a_reply():
    with pytest.raises(MessageError):
        open_request(seal_reply(Ok(nonce="n"), SECRET), SECRET)
    ok = Ok(nonce="n")
    reflected = seal_request(ok, SECRET)  # type: ignore[arg-type]
    with pytest.raises(MessageError):
        open_reply(reflected, SECRET)


def test_only_a_refusal_is_accepted_without_a_valid_mac():
    assert isinstance(open_reply(seal_reply(Refused(), b"other"), SECRET), Refused)
    for reply in REPLIES[:3]:
        with pytest.raises(MessageError, match="secret"):
            open_reply(seal_reply(reply, b"other"), SECRET)


@pytest.mark.parametrize("text", ["", "x" * 129])
def test_length_of_ids_is_limited(text):
    sealed = seal_request(Renew(nonce="n", incarnation="i", lease_id=text), SECRET)
    with pytest.raises(MessageError, match="lease_id"):
        open_request(sealed, SECRET)
