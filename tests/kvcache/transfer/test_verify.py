"""Pulls whose KV is compared with its lender's: what is wrong is caught, named, and never told as
done."""

from typing import Any

import pytest

from protocol.errors import KVCorrupt, LeaseGone, TransferFailed
from tests.rigs.memory_pair import Decode, Prefill
from tests.rigs.memory_placer import MemoryPlacer

LATENT = {"heads": 1, "num_components": 1}
GEOMETRIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alike": ({}, {}),
    "more ranks, some alike": ({"tp": 2}, {"tp": 8}),
    "fewer ranks": ({"tp": 4, "order": "LBCNHD"}, {"tp": 2, "staging_bytes": 1 << 20}),
    "shared tokens": ({"block_size": 4}, {"tp": 4, "dcp": 2, "order": "LCBHND"}),
    "other blocks": ({"block_size": 24}, {"block_size": 16}),
    "latents": ({"tp": 2, **LATENT}, {"tp": 2, **LATENT}),
    "mapped": ({"tp": 2}, {"make_placer": MemoryPlacer}),
}


def lease(prefill: Prefill) -> Any:
    """24 tokens."""
    return prefill.lease(
        [5, 2, 9, 4, 7, 6][: -(-24 // prefill.layouts[0].block_size)], 24
    )


@pytest.mark.parametrize("verify", ["sample", "all"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_what_is_right_passes_in_any_geometry(rig, name, verify):
    of_p, of_d = GEOMETRIES[name]
    prefill, decode = (
        rig(Prefill, digests=True, **of_p),
        rig(Decode, verify=verify, **of_d),
    )
    done = decode.pull("a", lease(prefill), 3, 23, [3, 1, 7])
    assert (done.verified, done.num_tokens) == (verify, 20)
    assert prefill.outcomes() == ["completed"]


@pytest.mark.parametrize("name", [name for name in GEOMETRIES if name != "mapped"])
def test_a_wrong_bit_fails_the_pull_and_the_next_one_is_right(rig, name):
    of_p, of_d = GEOMETRIES[name]
    prefill, decode = (
        rig(Prefill, digests=True, **of_p),
        rig(Decode, verify="all", **of_d),
    )
    decode.agents[-1].spoil()
    decode.coordinator.pull("a", lease(prefill), 0, 20, [3, 1, 7])
    error = decode.failed("a")
    assert (
        isinstance(error, KVCorrupt) and "tokens 0 to 19 in KV heads" in error.message
    )
    assert prefill.outcomes() == ["aborted"]
    decode.pull("b", lease(prefill), 0, 20, [3, 1, 7])


@pytest.mark.parametrize(
    ("of_p", "of_d", "reason"),
    [
        ({}, {}, "peer"),
        (
            {"digests": True, "dtype": "float16"},
            {"convert": True, "staging_bytes": 1 << 20},
            "converted",
        ),
    ],
)
def test_what_cannot_be_verified_is_told_as_such(rig, of_p, of_d, reason, caplog):
    prefill, decode = rig(Prefill, **of_p), rig(Decode, verify="all", **of_d)
    decode.coordinator.pull("a", lease(prefill), 0, 20, [3, 1, 7])
    assert decode.done("a").verified == reason
    assert "KV of P is not verified" in caplog.text


def test_a_lease_that_ends_while_its_digest_is_computed_is_gone(rig):
    prefill, decode = rig(Prefill, digests=True), rig(Decode, verify="all")
    remote = lease(prefill)
    begin = prefill.digest

    def too_late(*asked: Any) -> None:
        prefill.server.abort(remote.lease_id)
        begin(*asked)

    prefill.digest = too_late
    decode.coordinator.pull("a", remote, 0, 20, [3, 1, 7])
    assert isinstance(decode.failed("a"), LeaseGone)


def test_a_lease_that_ends_once_its_digest_is_told_is_gone_and_not_corrupt(rig):
    """Who suspends D, say, for longer than a lease has broken nothing."""
    prefill, decode = rig(Prefill, digests=True), rig(Decode, verify="all")
    decode.agents[0].stall()
    decode.coordinator.pull("a", remote := lease(prefill), 0, 20, [3, 1, 7])
    decode.until(lambda: any(state._sums for state in decode.pulls()))
    prefill.server.abort(remote.lease_id)
    prefill.pools[0].tensor.fill_(-1.0)  # the blocks are others'
    decode.agents[0].resume()
    assert isinstance(decode.failed("a"), LeaseGone)


def test_a_digest_that_is_lost_is_asked_for_again_and_computed_once_at_a_time(rig):
    prefill = rig(Prefill, digests=True)
    decode = rig(Decode, verify="all", settings={"fence_retry_s": 0.1})
    begin, begun, asked = prefill.digest, [], []
    answer = prefill.server._answer
    prefill.digest = lambda *of: begun.append(of)
    prefill.server._answer = lambda *of: asked.append(of) or answer(*of)
    decode.coordinator.pull("a", lease(prefill), 0, 20, [3, 1, 7])
    decode.until(lambda: begun)
    num_before = len(asked)
    decode.until(lambda: len(asked) > num_before + 1)
    begin(*begun[0])
    assert decode.done("a").verified == "all" and len(begun) == 1


def test_a_rank_that_cannot_compute_its_part_fails_the_pull(rig):
    prefill, decode = rig(Prefill, digests=True, tp=2), rig(Decode, verify="all")
    prefill.lending.workers[1].digester._words = None
    decode.coordinator.pull("a", lease(prefill), 0, 20, [3, 1, 7])
    assert isinstance(decode.failed("a"), TransferFailed)
