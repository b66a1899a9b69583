"""Pulls that compare digests of their KV with the lender's: wrong KV is never used."""

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
    """Returns a lease of 24 tokens."""
    return prefill.lease(
        [5, 2, 9, 4, 7, 6][: -(-24 // prefill.layouts[0].block_size)], 24
    )


@pytest.mark.parametrize("verify", ["sample", "all"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_correct_kv_is_verified_in_any_geometry(rig, name, verify):
    prefill_options, decode_options = GEOMETRIES[name]
    prefill = rig(Prefill, digests=True, **prefill_options)
    decode = rig(Decode, verify=verify, **decode_options)
    done = decode.pull("a", lease(prefill), 3, 23, [3, 1, 7])
    assert (done.verified, done.num_tokens) == (verify, 20)
    assert prefill.outcomes() == ["completed"]


@pytest.mark.parametrize("name", [name for name in GEOMETRIES if name != "mapped"])
def test_wrong_bit_fails_the_pull_and_the_next_pull_succeeds(rig, name):
    prefill_options, decode_options = GEOMETRIES[name]
    prefill = rig(Prefill, digests=True, **prefill_options)
    decode = rig(Decode, verify="all", **decode_options)
    decode.agents[-1].spoil()
    decode.coordinator.pull("a", lease(prefill), 0, 20, [3, 1, 7])
    error = decode.wait_for_error("a")
    assert (
        isinstance(error, KVCorrupt) and "tokens 0 to 19 in KV heads" in error.message
    )
    assert prefill.outcomes() == ["aborted"]
    decode.pull("b", lease(prefill), 0, 20, [3, 1, 7])


@pytest.mark.parametrize(
    ("prefill_options", "decode_options", "reason"),
    [
        ({}, {}, "peer"),
        (
            {"digests": True, "dtype": "float16"},
            {"convert": True, "staging_bytes": 1 << 20},
            "converted",
        ),
    ],
)
def test_unverifiable_pull_reports_the_reason(
    rig, prefill_options, decode_options, reason, caplog
):
    prefill = rig(Prefill, **prefill_options)
    decode = rig(Decode, verify="all", **decode_options)
    decode.coordinator.pull("a", lease(prefill), 0, 20, [3, 1, 7])
    assert decode.done("a").verified == reason
    assert "KV of P is not verified" in caplog.text


def test_pull_fails_if_the_lease_ends_while_the_digest_is_computed(rig):
    prefill = rig(Prefill, digests=True)
    decode = rig(Decode, verify="all")
    remote = lease(prefill)
    compute_digest = prefill.digest

    def too_late(*requests: Any) -> None:
        prefill.server.abort(remote.lease_id)
        compute_digest(*requests)

    prefill.digest = too_late
    decode.coordinator.pull("a", remote, 0, 20, [3, 1, 7])
    assert isinstance(decode.wait_for_error("a"), LeaseGone)


def test_lease_that_ends_after_the_digest_is_not_reported_as_corrupt_kv(rig):
    """The lease may end while D is suspended. Then the KV is not corrupt, but P has
    reused the blocks.
    """
    prefill = rig(Prefill, digests=True)
    decode = rig(Decode, verify="all")
    decode.agents[0].stall()
    decode.coordinator.pull("a", remote := lease(prefill), 0, 20, [3, 1, 7])
    decode.until(lambda: any(state._sums for state in decode.pulls()))
    prefill.server.abort(remote.lease_id)
    prefill.pools[0].tensor.fill_(-1.0)  # P has reused the blocks
    decode.agents[0].resume()
    assert isinstance(decode.wait_for_error("a"), LeaseGone)


def test_lost_digest_is_requested_again_and_computed_only_once(rig):
    prefill = rig(Prefill, digests=True)
    decode = rig(Decode, verify="all", settings={"fence_retry_s": 0.1})
    compute_digest = prefill.digest
    orders = []
    requests = []
    answer = prefill.server._answer
    prefill.digest = lambda *args: orders.append(args)
    prefill.server._answer = lambda *args: requests.append(args) or answer(*args)
    decode.coordinator.pull("a", lease(prefill), 0, 20, [3, 1, 7])
    decode.until(lambda: orders)
    num_before = len(requests)
    decode.until(lambda: len(requests) > num_before + 1)
    compute_digest(*orders[0])
    assert decode.done("a").verified == "all" and len(orders) == 1


def test_rank_that_cannot_compute_its_digest_fails_the_pull(rig):
    prefill = rig(Prefill, digests=True, tp=2)
    decode = rig(Decode, verify="all")
    prefill.lending.workers[1].digester._words = None
    decode.coordinator.pull("a", lease(prefill), 0, 20, [3, 1, 7])
    assert isinstance(decode.wait_for_error("a"), TransferFailed)
