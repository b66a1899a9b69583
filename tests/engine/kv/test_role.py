"""A prefill engine (P) and a decode engine (D) in one process, with many faults.

After any fault, the output must still be the continuation of the request's own prompt.
"""

import time

import msgspec
import pytest

from kvcache.blocks import BlockState
from kvcache.transfer.pulls.messages import PullSettings
from protocol import kv_params
from protocol.messages import AbortRequest, AddRequest, FirstToken, ReleaseRemote
from protocol.metrics import TABLE, stat_key
from tests.rigs.engine_pair import Pair
from tests.rigs.engines import COMPAT, OTHER_COMPAT, SECRET
from tests.rigs.shadow import VOCAB, add, expected_output

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
# Metric series that the cores of these engines lack. Rank 0 measures most of them.
RANK_SERIES = {
    "baton_kernels_loaded_late",
    "baton_engine_memory_used_bytes",
    "baton_engine_memory_total_bytes",
    "baton_kv_transports",
    # These engines have no drafters.
    "baton_speculative_proposed_tokens",
    "baton_speculative_accepted_tokens",
    "baton_speculative_accepted_length",
}
# A hung pull times out only when Pair.skip advances the clock.
LONG_PULL_TIMEOUT = PullSettings(pull_timeout_s=100.0, drain_grace_s=0.01)


def test_every_series_is_exposed_before_its_first_event(pair):
    stats = pair.d.core.stats()
    paths = [
        f"outcome=done,path={path}"
        for path in ("direct", "staged", "mapped", "mixed", "none")
    ]
    peer = ["peer_unreachable", "peer_incompatible", "lease_gone"]
    codes = "transfer_failed kv_corrupt pull_withheld pull_timeout internal_error"
    labels = {
        "baton_kv_transfers": [*paths, "outcome=failed,path=none"],
        "baton_kv_recoveries": ["policy=recompute"],
        "baton_handshakes": [f"outcome={outcome}" for outcome in ("ok", *peer)],
        "baton_kv_transfer_failures": [
            f"code={code}" for code in (*peer, *codes.split())
        ],
    }
    for name, values in labels.items():
        exposed = {key: stats[key] for key in stats if key.startswith(name + "{")}
        assert exposed == {f"{name}{{{value}}}": 0 for value in values}
    stats |= pair.p.core.stats()  # only P's connector has the metrics of a lender
    for spec in TABLE:
        if spec.origin == "engine" and spec.name not in RANK_SERIES:
            assert any(key.startswith(spec.name) for key in stats), spec


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_corrupt_kv_is_never_used(make_pair, policy):
    pair = make_pair(verify="all", policy=policy)
    pair.d.movers.agents[0].spoil()
    corrupt = pair.submit(PROMPT)
    if policy == "fail":
        pair.wait_for_failure(corrupt, "kv_corrupt")
    else:
        assert pair.answer(corrupt) == expected_output(PROMPT, 6)
    intact = pair.submit(PROMPT[::-1])
    assert pair.answer(intact) == expected_output(PROMPT[::-1], 6)
    stats = pair.d.core.stats()
    assert stats["baton_kv_verify_failures"] == 1
    assert stats["baton_kv_verified_tokens"] == len(PROMPT)


@pytest.mark.parametrize(
    "make_message",
    [
        lambda remote: ReleaseRemote(remote),
        lambda remote: add(
            "a", PROMPT[::-1], 6, kv_rejected="of another", kv_unused=remote
        ),
    ],
)
def test_lease_on_unused_kv_ends_immediately(pair, make_message):
    remote = kv_params.to_remote_prefill(kv_params.parse(pair.prefill(PROMPT)))
    message = make_message(remote)
    pair.d.core.round([message])
    if isinstance(message, AddRequest):
        assert pair.answer("a") == expected_output(PROMPT[::-1], 6)
    pair.settle()  # P's clock does not advance, so no lease expires
    assert pair.leases.counters()["aborted"] == 1


def test_lease_ends_immediately_if_its_reference_cannot_be_built(pair, monkeypatch):
    def fail_to_build(*_: object, **__: object) -> None:
        raise ValueError("the reference is too large")

    with monkeypatch.context() as patched:
        patched.setattr(kv_params, "build", fail_to_build)
        pair.p.core.round([add("a", PROMPT, 1, retain_kv=True, num_choices=2)])
        end = pair.end_of(pair.p, "a")
    assert end.error is not None and end.error.code == "internal_error"
    pair.until(pair.p.has_all_blocks_free)
    assert pair.answer(pair.submit(PROMPT))


def test_phase_times_of_a_request_are_reported_in_order(pair):
    name = pair.submit(PROMPT)
    assert pair.answer(name)
    pair.d.core.round([add("local", [1, 2, 3], 2)])
    assert pair.answer("local")
    pulled = pair.terminal_delta(name).times
    local = pair.terminal_delta("local").times
    assert pulled is not None and local is not None
    order = ["queued", "admitted", "read", "pulled", "drawn"]
    phases = pulled.since(0.0)
    assert list(phases) == order
    assert sorted(phases, key=lambda phase: phases[phase]) == order
    assert list(local.since(0.0)) == ["queued", "admitted", "drawn"]


def test_prompt_that_another_request_computed_during_a_hung_pull_counts_as_recomputed(
    make_pair,
):
    pair = make_pair(settings=LONG_PULL_TIMEOUT)
    full_blocks = PROMPT[:12]
    params = pair.prefill(full_blocks)
    pair.d.movers.stall()
    name = pair.submit(full_blocks, params)
    pair.until(lambda: pair.d.movers.active > 0)
    pair.d.core.round([add("other", full_blocks, 6)])
    pair.terminal_delta("other")
    pair.skip(LONG_PULL_TIMEOUT.pull_timeout_s)
    assert pair.answer(name) == expected_output(full_blocks, 6)
    assert pair.d.kv(name) == (0, 12, 0)


@pytest.mark.parametrize("pull_fails", [False, True])
@pytest.mark.parametrize(
    ("cached_on_p", "cached_on_d"), [(8, 4), (8, 0), (0, 4), (4, 8)]
)
def test_cached_tokens_are_those_that_neither_server_computed(
    pair, cached_on_p, cached_on_d, pull_fails
):
    for side, num_cached in ((pair.p, cached_on_p), (pair.d, cached_on_d)):
        if num_cached:
            side.core.round([add("warm", PROMPT[: num_cached + 1], 1)])
            pair.end_of(side, "warm")
    params = pair.prefill(PROMPT)
    if pull_fails:
        pair.d.movers.fail(1)
    name = pair.submit(PROMPT, params)
    assert pair.answer(name) == expected_output(PROMPT, 6)
    num_uncached = len(PROMPT) - cached_on_d
    usage = pair.terminal_delta(name).usage
    assert usage is not None
    if pull_fails:
        assert pair.d.kv(name) == (0, num_uncached, cached_on_d)
        assert usage.cached_tokens == min(cached_on_p, cached_on_d)
    else:
        assert pair.d.kv(name) == (num_uncached, 0, cached_on_d)
        assert usage.cached_tokens == cached_on_p
    assert usage.prefill_recomputed == len(PROMPT) - cached_on_p
    assert usage.prefill_skipped == cached_on_p


@pytest.mark.parametrize("aborted", [False, True])
def test_hung_peer_takes_only_a_part_of_the_pool(make_pair, aborted):
    """A part of the pool stays free, even if the clients of hung pulls disconnect."""
    pair = make_pair(p_block_size=8, settings=LONG_PULL_TIMEOUT)
    pair.d.movers.stall()
    names = {}
    for first in range(12):  # all together need 48 blocks, but the pool has 39
        prompt = [first, *PROMPT, 7]
        names[pair.submit(prompt)] = prompt
    counts = pair.d.core.scheduler.allocator.counts
    # Each pull needs 4 blocks, and all pulls together may hold 3/4 of the pool.
    pair.until(lambda: counts()[BlockState.RECEIVING] == 28)
    # Aborts before the first READ would quarantine no block.
    pair.until(lambda: pair.workers[0].counters["posts"] > 0)
    if aborted:
        pair.d.core.round([AbortRequest(name) for name in names])
        pair.until(lambda: _num_quarantined(pair) > 0)
        names = {pair.submit(PROMPT): PROMPT}
    else:
        pair.skip(0.0)  # begins the remaining pulls
        pair.skip(100.0)
    for name, prompt in names.items():
        assert pair.answer(name) == expected_output(prompt, 6)
    assert 4 <= _num_quarantined(pair) <= 28


def test_pull_without_capacity_during_a_hung_read_is_left_to_another_server(make_pair):
    pair = make_pair(
        p_block_size=8, settings=LONG_PULL_TIMEOUT, policy="fail", max_model_len=160
    )
    pair.d.movers.stall()
    hung = _begin_read(pair, [*PROMPT, 7, 7])
    large = list(range(1, 109))  # 27 of 39 blocks
    pair.skip(LONG_PULL_TIMEOUT.pull_timeout_s)
    pair.wait_for_failure(hung, "pull_timeout")
    pair.restart_prefill()  # because D does not pull from a server with hung READs
    params = {**pair.prefill(large), "sender_releases": True}
    assert "exceed the limit on blocks" in pair.wait_for_failure(
        pair.submit(large, params), "pull_withheld"
    )
    pair.d.movers.resume()
    pair.until(lambda: _num_quarantined(pair) == 0)
    again = pair.submit(large, params)  # as the proxy would send it to another server
    assert pair.answer(again) == expected_output(large, 6)
    assert pair.d.kv(again) == (108, 0, 0)


def test_hung_pull_into_a_large_part_of_the_pool_leaves_the_other_blocks(make_pair):
    pair = make_pair(p_block_size=8, settings=LONG_PULL_TIMEOUT, max_model_len=160)
    pair.d.movers.stall()
    large = list(range(1, 61)) + list(range(1, 41))  # 25 of 39 blocks
    hung = pair.submit(large, max_tokens=2)
    pair.until(lambda: pair.workers[0].counters["posts"] > 0)
    pair.skip(LONG_PULL_TIMEOUT.pull_timeout_s)
    pair.until(lambda: _num_quarantined(pair) == 25)
    for first in range(3):
        name = pair.submit([first, *PROMPT])
        assert pair.answer(name) == expected_output([first, *PROMPT], 6)
        assert pair.d.kv(name)[0] == 0  # D pulls nothing from a hung peer
    circuit_open = stat_key("baton_kv_transfer_failures", code="pull_withheld")
    assert pair.d.core.stats()[circuit_open] == 3
    pair.d.movers.resume()
    assert pair.answer(hung) == expected_output(large, 2)


@pytest.mark.parametrize("failed_before", [False, True])
def test_blocks_of_an_aborted_pull_are_free_once_its_reads_end(
    make_pair, failed_before
):
    pair = make_pair(settings=LONG_PULL_TIMEOUT)
    pair.d.movers.stall()
    name = _begin_read(pair, [*PROMPT, 7, 7])
    if failed_before:
        pair.skip(LONG_PULL_TIMEOUT.pull_timeout_s)
    while failed_before and not pair.coordinator.counters()["pulls_failed"]:
        time.sleep(0.001)  # the engine handles the failure only after the abort
    pair.d.core.round([AbortRequest(name)])
    pair.until(lambda: _num_quarantined(pair) == 4)
    pair.d.movers.resume()
    pair.settle()
    assert _num_quarantined(pair) == 0


def _begin_read(pair: Pair, prompt: list[int]) -> str:
    """Submits a request, waits for its first READ, and returns its name."""
    posts = pair.workers[0].counters["posts"]
    name = pair.submit(prompt)
    pair.until(lambda: pair.workers[0].counters["posts"] > posts)
    return name


def _num_quarantined(pair: Pair) -> int:
    return pair.d.core.scheduler.allocator.counts()[BlockState.QUARANTINED]


@pytest.mark.parametrize(
    "event", ["reads end", "timeout", "timeout with a lease for another server"]
)
def test_request_blocked_on_quarantine_waits_until_the_reads_end_or_the_timeout(
    make_pair, event
):
    """Smaller requests are served while the blocked request waits."""
    timeout_s = 60.0 if event == "reads end" else 0.2
    pair = make_pair(
        p_block_size=8,
        settings=LONG_PULL_TIMEOUT,
        quarantine_timeout_s=timeout_s,
        max_model_len=160,
    )
    pair.d.movers.stall()
    hung = _begin_read(pair, [*PROMPT, 7, 7])
    pair.skip(LONG_PULL_TIMEOUT.pull_timeout_s)
    assert pair.answer(hung) == expected_output([*PROMPT, 7, 7], 6)
    assert _num_quarantined(pair) == 4
    pair.restart_prefill()  # because D does not pull from a server with hung READs
    large = list(range(1, 145))  # 36 of 39 blocks
    pulled_prompt = list(range(2, 146))  # 36 of 39 blocks
    pair.d.core.round([add("large", large, 2)])
    params = pair.prefill(pulled_prompt)
    if event == "timeout with a lease for another server":
        params["sender_releases"] = True
    other = pair.submit(pulled_prompt, params, max_tokens=2)
    pair.d.core.round([add("small", [1, 2, 3], 8)])
    assert pair.answer("small") == expected_output([1, 2, 3], 8)
    if event == "reads end":
        pair.d.movers.resume()
        assert pair.answer("large") == expected_output(large, 2)
        assert pair.answer(other) == expected_output(pulled_prompt, 2)
    else:
        for name in ("large", other):
            message = pair.wait_for_failure(name, "overloaded")
            assert "4 of 39" in message and "--quarantine-timeout-s" in message
        # Only the hung pull is still open.
        pair.until(lambda: pair.coordinator.counters()["pulls_open"] == 1)
        if event == "timeout":
            # No server will pull this KV.
            pair.until(lambda: pair.leases.counters()["aborted"] == 1)
        pair.d.movers.resume()
        if event == "timeout with a lease for another server":
            pair.until(lambda: _num_quarantined(pair) == 0)
            assert pair.leases.counters()["held"] == 1
            again = pair.submit(pulled_prompt, params, max_tokens=2)
            assert pair.answer(again) == expected_output(pulled_prompt, 2)
            assert pair.d.kv(again) == (144, 0, 0)


@pytest.mark.parametrize(
    "compat", [COMPAT, OTHER_COMPAT], ids=["compatible", "incompatible"]
)
def test_abort_during_the_handshake_ends_only_the_aborted_request(make_pair, compat):
    pair = make_pair(p_compat=compat)
    aborted = pair.submit(PROMPT, aborted=True)
    pair.until(lambda: any(pair.coordinator.handshake_counts().values()))
    name = pair.submit(PROMPT)
    assert pair.answer(name) == expected_output(PROMPT, 6)
    assert pair.d.kv(name)[0] == (len(PROMPT) if compat is COMPAT else 0)
    assert pair.terminal_delta(aborted).finish_reason == "abort"


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_first_token_of_another_model_is_not_used(make_pair, max_tokens):
    pair = make_pair(p_compat=OTHER_COMPAT)
    params = kv_params.parse(pair.prefill(PROMPT))
    wrong = FirstToken((expected_output(PROMPT, 1)[0] + 1) % VOCAB)
    forged = (
        msgspec.structs.replace(params, first_tokens=(wrong,)).sign(SECRET).to_json()
    )
    name = pair.submit(PROMPT, forged, max_tokens)
    assert pair.answer(name) == expected_output(PROMPT, max_tokens)
    assert pair.d.kv(name) == (0, 14, 0)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_pull_of_blocks_that_ranks_cannot_share_follows_the_policy(make_pair, policy):
    pair = make_pair(p_block_size=8, coordinator_dcp=2, policy=policy)
    name = pair.submit(PROMPT)
    if policy == "recompute":
        assert pair.answer(name) == expected_output(PROMPT, 6)
        assert pair.d.kv(name) == (0, 14, 0)
    else:
        message = pair.wait_for_failure(name, "peer_incompatible")
        assert "block_size is 4 here and 8 on the peer" in message
        assert "--block-size 8, or without --dcp" in message
    assert pair.workers[0].counters["posts"] == 0


def test_address_of_a_timed_out_peer_is_in_the_log_but_not_in_the_error(
    make_pair, caplog
):
    pair = make_pair(policy="fail")
    pair.d.movers.stall()
    params = pair.prefill(PROMPT)
    name = pair.submit(PROMPT, params)
    pair.until(lambda: bool(pair.workers[0].counters["posts"]))
    pair.skip(1000.0)
    message = pair.wait_for_failure(name, "pull_timeout")
    address = f"{params['remote_host']}:{params['remote_port']}"
    assert "from its address took longer than" in message
    assert address not in message
    assert address in caplog.text
