"""Requests with an offer: D pulls the prompt's KV while P computes the prompt.

Both engines run in one process, with real connectors.
"""

import pytest

from kvcache.blocks import BlockState
from protocol.messages import AbortRequest, ResumedChoice, SamplingParams
from tests.rigs.engines import OTHER_COMPAT
from tests.rigs.shadow import VOCAB, add, expected_output

PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(45)]


@pytest.mark.parametrize("order", ["pd", "dp", "p.d"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p_block_size": 2, "block_size": 8, "p_order": "LCBNHD"},
        {"p_block_size": 8, "block_size": 3},
        {"p_block_size": 2, "block_size": 4, "dcp": 2},
        {"launch_bytes": 512},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_single_server(make_pair, options, order):
    pair = make_pair(**options)
    for length, request_fields in (
        (45, {}),
        (16, {"num_choices": 3}),
        (1, {}),
        (33, {"sampling": SamplingParams(temperature=0.0, presence_penalty=0.5)}),
        (40, {"max_tokens": 1}),  # the request ends with the token that P draws
    ):
        prompt = [length, *PROMPT[1:length]]
        request_options = {"max_tokens": 6, **request_fields}
        max_tokens = request_options["max_tokens"]
        _, name = pair.submit_to_both(prompt, order=order, **request_options)
        answers = pair.answers(name, request_options.get("num_choices", 1))
        for choice, answer in enumerate(answers):
            assert answer == expected_output(prompt, max_tokens, choice=choice)
        if max_tokens > 1:
            transferred, recomputed, skipped = pair.d.kv(name)
            assert (transferred + skipped, recomputed) == (length, 0)


def test_stream_begins_before_all_of_its_kv_has_been_pulled(pair):
    prefill_name, decode_name = pair.submit_to_both(PROMPT, order="dp")
    pair.until(lambda: pair.d.core.scheduler.receiving != {})
    pair.d.movers.stall()
    pair.until(lambda: len(pair.d.out.tokens(decode_name)) == 1)
    (first,) = [delta for delta in pair.d.out.deltas if delta.request_id == decode_name]
    # The HTTP process needs the usage with the first token, for a response header.
    assert first.usage is not None and first.usage.prefill_recomputed == 45
    assert pair.p.out.terminals(prefill_name)
    pair.d.movers.resume()
    assert pair.answer(decode_name) == expected_output(PROMPT, 6)


@pytest.mark.parametrize("fault", ["different sampling", "unreadable reference"])
def test_kv_is_used_even_if_the_first_token_is_not(pair, monkeypatch, fault):
    """A router has changed the body of P's leg, or P's version writes references that D
    cannot read."""
    options = {}
    if fault == "different sampling":
        options["p_sampling"] = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    else:
        monkeypatch.setattr(
            "engine.kv.lender.Lender._kv_transfer_params",
            lambda *_: {"remote_port": "http"},
        )
    _, name = pair.submit_to_both(PROMPT, **options)
    assert pair.answer(name) == expected_output(PROMPT, 6)
    assert pair.d.kv(name) == (44, 1, 0)
    assert pair.d.core.stats()["baton_kv_first_tokens_redrawn"] == 1


@pytest.mark.parametrize("num_resumed", [1, 3])
def test_resumed_stream_gets_no_first_token_again(pair, num_resumed):
    output = expected_output(PROMPT, 6)
    resumed = output[:num_resumed]
    _, name = pair.submit_to_both(PROMPT, resumed_choices=[ResumedChoice(resumed)])
    assert resumed + pair.answer(name) == output
    assert pair.d.kv(name) == (45, 0, 0)


@pytest.mark.parametrize("aborted_leg", ["p", "d"])
@pytest.mark.parametrize("num_rounds", range(6))
def test_abort_of_either_leg_ends_both_legs(make_pair, aborted_leg, num_rounds):
    """If P's leg is aborted, D computes the prompt. If D's leg is aborted, P retains no
    KV. The abort is sent after `num_rounds` rounds."""
    pair = make_pair()
    prefill_name, decode_name = pair.submit_to_both(PROMPT, order="dp")
    for _ in range(num_rounds):
        pair.p.core.round([])
        pair.until(lambda: True)
    if aborted_leg == "p":
        pair.p.core.round([AbortRequest(prefill_name)])
    else:
        pair.d.core.round([AbortRequest(decode_name)])
    pair.until(lambda: bool(pair.d.out.terminals(decode_name)))
    tokens = pair.d.out.tokens(decode_name)
    assert tokens == expected_output(PROMPT, 6)[: len(tokens)]
    assert aborted_leg == "d" or len(tokens) == 6
    pair.until(lambda: bool(pair.p.out.terminals(prefill_name)))
    # The proxy aborts P's leg when no server will pull the KV of this leg.
    pair.p.core.round([AbortRequest(prefill_name)])
    pair.settle()


@pytest.mark.parametrize(("policy", "num_leased"), [("recompute", 0), ("fail", 12)])
def test_kv_that_d_gives_up_stays_leased_only_if_another_server_may_pull_it(
    make_pair, policy, num_leased
):
    """D gives up the offer before P has leased a block."""
    pair = make_pair(policy=policy, p_compat=OTHER_COMPAT)
    prefill_name, decode_name = pair.submit_to_both(PROMPT, order="d")
    pair.until(lambda: bool(pair.d.out.terminals(decode_name)))
    # P has received the message with which D gives up the offer.
    pair.until(lambda: pair.leases.counters()["gone"] == 1)
    _add_prefill_leg(pair, prefill_name, PROMPT)
    pair.until(lambda: bool(pair.p.out.terminals(prefill_name)))
    pair.p.core.round([])
    assert pair.p.core.scheduler.allocator.counts()[BlockState.LEASED] == num_leased
    pair.p.core.round([AbortRequest(prefill_name)])


def _add_prefill_leg(pair, name, prompt):
    leg = add(name, prompt, 1, retain_kv=True, transfer_id=f"{name}-0")
    pair.p.core.round([leg])


def test_partly_leased_prompt_runs_before_a_stream_that_does_not_fit(make_pair):
    """P's pool has blocks for only one sequence. The stream preempts the prompt, and is
    preempted later."""
    pair = make_pair(p_num_blocks=17, p_block_size=4, max_num_batched_tokens=3)
    prompt = PROMPT[:40]
    prefill_name, decode_name = pair.submit_to_both(prompt, order="d")
    offers = pair.leases._offers
    pair.until(lambda: offers.num_leased_blocks(f"{prefill_name}-0") == 0)
    for messages in ([add("stream", [5] * 9, 55)], [], [], []):
        pair.p.core.round(messages)
    _add_prefill_leg(pair, prefill_name, prompt)
    assert pair.answer(decode_name) == expected_output(prompt, 6)
    assert pair.d.kv(decode_name) == (40, 0, 0)
    assert pair.p.core.scheduler.num_preemptions == 2
    pair.until(lambda: bool(pair.p.out.terminals("stream")))
    assert pair.p.out.tokens("stream") == expected_output([5] * 9, 55)


@pytest.mark.parametrize("order", ["pd", "dp"])
def test_transfer_id_belongs_to_the_latest_request_that_uses_it(pair, order):
    """A router may use a transfer id twice. Each reference names the blocks of its own
    prompt."""
    first = [9, *PROMPT[1:30]]
    second = PROMPT
    pair.p.core.round([add("first", first, 1, retain_kv=True, transfer_id="x-0")])
    prefill_name, decode_name = pair.submit_to_both(
        second, order=order, transfer_id="x"
    )
    assert pair.answer(decode_name) == expected_output(second, 6)
    for prompt, name in ((first, "first"), (second, prefill_name)):
        pair.until(lambda name=name: bool(pair.p.out.terminals(name)))
        params = pair.p.out.terminals(name)[0].kv_transfer_params
        pulled = pair.submit(prompt, params)
        assert pair.answer(pulled) == expected_output(prompt, 6)
    pair.settle()


def test_preempted_prompt_keeps_its_leased_blocks(make_pair):
    # A step fits two streams and two tokens of a prompt.
    pair = make_pair(max_num_batched_tokens=4)
    for name in ("a", "b"):
        pair.p.core.round([add(name, [1, 2, len(name)], 58)])
    pair.until(lambda: len(pair.p.out.tokens("b")) > 30)
    _, decode_name = pair.submit_to_both(PROMPT, order="dp")
    pair.until(lambda: bool(pair.p.core.scheduler.num_preemptions))
    assert not pair.d.out.tokens(decode_name)
    assert pair.answer(decode_name) == expected_output(PROMPT, 6)
    assert pair.d.kv(decode_name) == (45, 0, 0)


def test_reference_is_valid_after_the_lease_of_the_offer_has_expired(make_pair):
    """D hangs until its lease expires. Another server can still pull with P's
    reference."""
    pair = make_pair(max_num_batched_tokens=8, policy="fail")
    prefill_name, decode_name = pair.submit_to_both(PROMPT, order="d")
    offers = pair.leases._offers
    pair.until(lambda: offers.num_leased_blocks(f"{prefill_name}-0") == 0)
    _add_prefill_leg(pair, prefill_name, PROMPT)
    pair.p.core.round([])
    pair.now_s += 31
    assert pair.terminal_delta(decode_name).error.code == "lease_gone"
    params = pair.end_of(pair.p, prefill_name).kv_transfer_params
    pulled = pair.submit(PROMPT, params)
    assert pair.answer(pulled) == expected_output(PROMPT, 6)
    assert pair.d.kv(pulled) == (45, 0, 0)


def test_kv_of_a_prefill_server_counts_towards_the_threshold(pair):
    prefill_name, name = pair.submit_to_both(
        PROMPT, order="pd", cache_hit_threshold=1.0
    )
    assert pair.answer(name) == expected_output(PROMPT, 6)
    assert pair.p.out.terminals(prefill_name)[0].finish_reason == "length"
