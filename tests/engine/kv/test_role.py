"""A prefill and a decode engine in one process, with faults of every kind.

Whatever goes wrong, the output must be the continuation of the request's own prompt.
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
from tests.rigs.engines import ANOTHER, COMPAT, SECRET
from tests.rigs.shadow import VOCAB, add, expected_output

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
HANGS = PullSettings(
    pull_timeout_s=100.0, drain_grace_s=0.01
)  # `skip` says when it is over


def test_every_series_is_there_before_its_first_event(pair):
    stats = pair.d.core.stats()
    paths = [
        f"outcome=done,path={way}"
        for way in ("direct", "staged", "mapped", "mixed", "none")
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
    stats |= pair.p.core.stats()  # its connector lends
    for spec in TABLE:
        assert spec.origin != "engine" or any(
            key.startswith(spec.name) for key in stats
        ), spec


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_kv_with_a_wrong_bit_is_never_decoded_from(make_pair, policy):
    pair = make_pair(verify="all", policy=policy)
    pair.d.movers.agents[0].spoil()
    spoilt = pair.submit(PROMPT)
    if policy == "fail":
        pair.failed(spoilt, "kv_corrupt")
    else:
        assert pair.answer(spoilt) == expected_output(PROMPT, 6)
    right = pair.submit(PROMPT[::-1])
    assert pair.answer(right) == expected_output(PROMPT[::-1], 6)
    stats = pair.d.core.stats()
    assert stats["baton_kv_verify_failures"] == 1
    assert stats["baton_kv_verified_tokens"] == len(PROMPT)


@pytest.mark.parametrize(
    "refused",
    [
        lambda remote: ReleaseRemote(remote),
        lambda remote: add(
            "a", PROMPT[::-1], 6, kv_rejected="of another", kv_unused=remote
        ),
    ],
)
def test_kv_that_is_of_no_use_goes_home_at_once(pair, refused):
    message = refused(
        kv_params.to_remote_prefill(kv_params.parse(pair.prefill(PROMPT)))
    )
    pair.d.core.round([message])
    if isinstance(message, AddRequest):
        assert pair.answer("a") == expected_output(PROMPT[::-1], 6)
    pair.settle()  # P's clock stands still: no lease expires
    assert pair.leases.counters()["aborted"] == 1


def test_kv_of_which_no_answer_can_tell_goes_home_at_once(pair, monkeypatch):
    def cannot(*_: object, **__: object) -> None:
        raise ValueError("too large to be told")

    with monkeypatch.context() as patched:
        patched.setattr(kv_params, "build", cannot)
        pair.p.core.round([add("a", PROMPT, 1, retain_kv=True, num_choices=2)])
        end = pair.end_of(pair.p, "a")
    assert end.error is not None and end.error.code == "internal_error"
    pair.until(pair.p.has_all_blocks_free)
    assert pair.answer(pair.submit(PROMPT))


def test_the_times_of_a_requests_phases_are_told_in_their_order(pair):
    name = pair.submit(PROMPT)
    assert pair.answer(name)
    pair.d.core.round([add("local", [1, 2, 3], 2)])
    assert pair.answer("local")
    pulled, local = (pair.end(each).times for each in (name, "local"))
    assert pulled is not None and local is not None
    order = ["admitted", "read", "pulled", "drawn"]
    told = pulled.since(0.0)
    assert list(told) == order and sorted(told, key=lambda phase: told[phase]) == order
    assert list(local.since(0.0)) == ["admitted", "drawn"], "nothing was pulled"


def test_a_prompt_that_another_request_computed_while_its_pull_hung_counts_as_recomputed(
    make_pair,
):
    pair = make_pair(settings=HANGS)
    whole = PROMPT[:12]
    params = pair.prefill(whole)
    pair.d.movers.stall()
    name = pair.submit(whole, params)
    pair.until(lambda: pair.d.movers.active > 0)
    pair.d.core.round([add("other", whole, 6)])
    pair.end("other")
    pair.skip(HANGS.pull_timeout_s)
    assert pair.answer(name) == expected_output(whole, 6)
    assert pair.d.kv(name) == (0, 12, 0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("on_p", "on_d"), [(8, 4), (8, 0), (0, 4), (4, 8)])
def test_cached_tokens_are_those_that_neither_server_computed(pair, on_p, on_d, fails):
    for side, seen in ((pair.p, on_p), (pair.d, on_d)):
        if seen:
            side.core.round([add("warm", PROMPT[: seen + 1], 1)])
            pair.end_of(side, "warm")
    params = pair.prefill(PROMPT)
    if fails:
        pair.d.movers.fail(1)
    name = pair.submit(PROMPT, params)
    assert pair.answer(name) == expected_output(PROMPT, 6)
    rest = len(PROMPT) - on_d
    assert pair.d.kv(name) == ((0, rest, on_d) if fails else (rest, 0, on_d))
    told = pair.end(name).usage
    assert told is not None and told.cached_tokens == (
        min(on_p, on_d) if fails else on_p
    )
    assert (told.prefill_recomputed, told.prefill_skipped) == (len(PROMPT) - on_p, on_p)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_peer_that_hangs_takes_no_more_than_a_part_of_the_pool(make_pair, aborted):
    """Nor do clients that leave."""
    pair = make_pair(p_block_size=8, settings=HANGS)
    pair.d.movers.stall()
    names = {}
    for first in range(12):  # which would need 48 of 39 blocks
        prompt = [first, *PROMPT, 7]
        names[pair.submit(prompt)] = prompt
    counts = pair.d.core.scheduler.allocator.counts
    pair.until(
        lambda: counts()[BlockState.RECEIVING] == 28
    )  # the most that 3/4 have room for
    pair.until(
        lambda: pair.workers[0].counters["posts"] > 0
    )  # else aborts leave nothing behind
    if aborted:
        pair.d.core.round([AbortRequest(name) for name in names])
        pair.until(lambda: _num_quarantined(pair) > 0)
        names = {pair.submit(PROMPT): PROMPT}
    else:
        pair.skip(0.0)  # all are begun
        pair.skip(100.0)
    for name, prompt in names.items():
        assert pair.answer(name) == expected_output(prompt, 6)
    assert 4 <= _num_quarantined(pair) <= 28


def test_what_has_no_room_beside_a_hung_read_is_left_to_another_server(make_pair):
    pair = make_pair(p_block_size=8, settings=HANGS, policy="fail", max_model_len=160)
    pair.d.movers.stall()
    hung, large = (
        _begin_read(pair, [*PROMPT, 7, 7]),
        list(range(1, 109)),
    )  # 27 of 39 blocks
    pair.skip(HANGS.pull_timeout_s)
    pair.failed(hung, "pull_timeout")
    pair.restart_prefill()  # from one whose READs hang nothing is pulled
    params = {**pair.prefill(large), "sender_releases": True}
    assert "exceed the limit on blocks" in pair.failed(
        pair.submit(large, params), "pull_withheld"
    )
    pair.d.movers.resume()
    pair.until(lambda: _num_quarantined(pair) == 0)
    again = pair.submit(large, params)  # as the proxy would another
    assert pair.answer(again) == expected_output(large, 6)
    assert pair.d.kv(again) == (108, 0, 0)


def test_a_pull_of_most_of_the_pool_that_hangs_leaves_the_rest(make_pair):
    pair = make_pair(p_block_size=8, settings=HANGS, max_model_len=160)
    pair.d.movers.stall()
    large = list(range(1, 61)) + list(range(1, 41))  # 25 of 39 blocks
    hung = pair.submit(large, max_tokens=2)
    pair.until(lambda: pair.workers[0].counters["posts"] > 0)
    pair.skip(HANGS.pull_timeout_s)
    pair.until(lambda: _num_quarantined(pair) == 25)
    for first in range(3):
        name = pair.submit([first, *PROMPT])
        assert pair.answer(name) == expected_output([first, *PROMPT], 6)
        assert pair.d.kv(name)[0] == 0  # nothing is pulled from there meanwhile
    withheld = stat_key("baton_kv_transfer_failures", code="pull_withheld")
    assert pair.d.core.stats()[withheld] == 3
    pair.d.movers.resume()
    assert pair.answer(hung) == expected_output(large, 2)


@pytest.mark.parametrize("failed_before", [False, True])
def test_an_aborted_pulls_blocks_come_home_when_its_reads_end(make_pair, failed_before):
    pair = make_pair(settings=HANGS)
    pair.d.movers.stall()
    name = _begin_read(pair, [*PROMPT, 7, 7])
    if failed_before:
        pair.skip(HANGS.pull_timeout_s)
    while failed_before and not pair.coordinator.counters()["pulls_failed"]:
        time.sleep(0.001)  # the engine has not heard of it when the client leaves
    pair.d.core.round([AbortRequest(name)])
    pair.until(lambda: _num_quarantined(pair) == 4)
    pair.d.movers.resume()
    pair.settle()
    assert _num_quarantined(pair) == 0


def _begin_read(pair: Pair, prompt: list[int]) -> str:
    """A request whose READ is under way; its name."""
    posts = pair.workers[0].counters["posts"]
    name = pair.submit(prompt)
    pair.until(lambda: pair.workers[0].counters["posts"] > posts)
    return name


def _num_quarantined(pair: Pair) -> int:
    return pair.d.core.scheduler.allocator.counts()[BlockState.QUARANTINED]


@pytest.mark.parametrize("ends", ["the read", "the wait", "the wait of a lent lease"])
def test_a_request_too_large_beside_a_hung_read_lets_others_pass_for_a_while(
    make_pair, ends
):
    wait_s = 60.0 if ends == "the read" else 0.2
    pair = make_pair(
        p_block_size=8, settings=HANGS, quarantine_timeout_s=wait_s, max_model_len=160
    )
    pair.d.movers.stall()
    hung = _begin_read(pair, [*PROMPT, 7, 7])
    pair.skip(HANGS.pull_timeout_s)
    assert pair.answer(hung) == expected_output([*PROMPT, 7, 7], 6)
    assert _num_quarantined(pair) == 4
    pair.restart_prefill()  # from one whose READs hang nothing is pulled
    large, remote = list(range(1, 145)), list(range(2, 146))  # 36 of 39 blocks each
    pair.d.core.round([add("large", large, 2)])
    params = pair.prefill(remote)
    if ends == "the wait of a lent lease":
        params["sender_releases"] = True
    other = pair.submit(remote, params, max_tokens=2)
    pair.d.core.round([add("small", [1, 2, 3], 8)])
    assert pair.answer("small") == expected_output([1, 2, 3], 8)
    if ends == "the read":
        pair.d.movers.resume()
        assert pair.answer("large") == expected_output(large, 2)
        assert pair.answer(other) == expected_output(remote, 2)
    else:
        for name in ("large", other):
            told = pair.failed(name, "overloaded")
            assert "4 of 39" in told and "--quarantine-timeout-s" in told
        pair.until(
            lambda: pair.coordinator.counters()["pulls_open"] == 1
        )  # the one that hangs
        if ends == "the wait":
            pair.until(
                lambda: pair.leases.counters()["aborted"] == 1
            )  # nobody will come for that
        pair.d.movers.resume()
        if ends == "the wait of a lent lease":  # another decode server may
            pair.until(lambda: _num_quarantined(pair) == 0)
            assert pair.leases.counters()["held"] == 1
            again = pair.submit(remote, params, max_tokens=2)
            assert pair.answer(again) == expected_output(remote, 2)
            assert pair.d.kv(again) == (144, 0, 0)


@pytest.mark.parametrize("compat", [COMPAT, ANOTHER], ids=["alike", "another"])
def test_an_abort_while_hands_are_shaken_ends_the_request_alone(make_pair, compat):
    pair = make_pair(p_compat=compat)
    gone = pair.submit(PROMPT, aborted=True)
    pair.until(lambda: any(pair.coordinator.handshakes().values()))
    name = pair.submit(PROMPT)
    assert pair.answer(name) == expected_output(PROMPT, 6)
    assert pair.d.kv(name)[0] == (len(PROMPT) if compat is COMPAT else 0)
    assert pair.end(gone).finish_reason == "abort"


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_first_token_of_another_model_is_not_used(make_pair, max_tokens):
    pair = make_pair(p_compat=ANOTHER)
    params = kv_params.parse(pair.prefill(PROMPT))
    wrong = FirstToken((expected_output(PROMPT, 1)[0] + 1) % VOCAB)
    forged = (
        msgspec.structs.replace(params, first_tokens=(wrong,)).sign(SECRET).to_json()
    )
    name = pair.submit(PROMPT, forged, max_tokens)
    assert pair.answer(name) == expected_output(PROMPT, max_tokens)
    assert pair.d.kv(name) == (0, 14, 0)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_blocks_that_ranks_cannot_share_out_are_up_to_the_policy(make_pair, policy):
    pair = make_pair(p_block_size=8, coordinator_dcp=2, policy=policy)
    name = pair.submit(PROMPT)
    if policy == "recompute":
        assert pair.answer(name) == expected_output(PROMPT, 6)
        assert pair.d.kv(name) == (0, 14, 0)
    else:
        told = pair.failed(name, "peer_incompatible")
        assert "block_size is 4 here and 8 on the peer" in told
        assert "--block-size 8, or without --dcp" in told
    assert pair.workers[0].counters["posts"] == 0


def test_a_client_is_told_of_a_late_pull_without_an_address(make_pair, caplog):
    pair = make_pair(policy="fail")
    pair.d.movers.stall()
    params = pair.prefill(PROMPT)
    name = pair.submit(PROMPT, params)
    pair.until(lambda: bool(pair.workers[0].counters["posts"]))
    pair.skip(1000.0)
    told = pair.failed(name, "pull_timeout")
    address = f"{params['remote_host']}:{params['remote_port']}"
    assert "from its address took longer than" in told
    assert address not in told and address in caplog.text
