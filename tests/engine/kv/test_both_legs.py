"""A prompt that P computes while D pulls it: both real connectors, both engines in one process."""

import pytest

from kvcache.blocks import BlockState
from protocol.messages import AbortRequest, ResumedChoice, SamplingParams
from tests.rigs.engines import ANOTHER
from tests.rigs.shadow import VOCAB, add, expected_output

PROMPT = [(7 * at * at + 3 * at) % VOCAB for at in range(45)]


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
def test_text_is_that_of_one_server(make_pair, options, order):
    pair = make_pair(**options)
    for length, members in (
        (45, {}),
        (16, {"num_choices": 3}),
        (1, {}),
        (33, {"sampling": SamplingParams(temperature=0.0, presence_penalty=0.5)}),
        (40, {"max_tokens": 1}),  # it ends with the token of P
    ):
        prompt, asked = [length, *PROMPT[1:length]], {"max_tokens": 6, **members}
        _, name = pair.both(prompt, order=order, **asked)
        answers = pair.answers(name, asked.get("num_choices", 1))
        for choice, answer in enumerate(answers):
            assert answer == expected_output(prompt, asked["max_tokens"], choice=choice)
        if asked["max_tokens"] > 1:
            transferred, recomputed, skipped = pair.d.kv(name)
            assert (transferred + skipped, recomputed) == (length, 0)


def test_a_stream_begins_before_the_rest_of_its_kv_is_there(pair):
    name, theirs = pair.both(PROMPT, order="dp")
    pair.until(lambda: pair.d.core.scheduler.receiving != {})
    pair.d.movers.stall()
    pair.until(lambda: len(pair.d.out.tokens(theirs)) == 1)
    (first,) = [delta for delta in pair.d.out.deltas if delta.request_id == theirs]
    assert (
        first.usage is not None and first.usage.prefill_recomputed == 45
    )  # as its head tells
    assert pair.p.out.terminals(name)
    pair.d.movers.resume()
    assert pair.answer(theirs) == expected_output(PROMPT, 6)


@pytest.mark.parametrize("is_read", [True, False])
def test_of_a_token_drawn_otherwise_or_told_unreadably_the_kv_is_used(
    pair, monkeypatch, is_read
):
    """A router has changed P's body. Or P has another version, which must not end all streams."""
    changed = {"p_sampling": SamplingParams(temperature=0.0, repetition_penalty=2.0)}
    if not is_read:
        monkeypatch.setattr(
            "engine.kv.lender.Lender._params", lambda *_: {"remote_port": "http"}
        )
    _, name = pair.both(PROMPT, **(changed if is_read else {}))
    assert pair.answer(name) == expected_output(PROMPT, 6)
    assert pair.d.kv(name) == (44, 1, 0)
    assert pair.d.core.stats()["baton_kv_first_tokens_redrawn"] == 1


@pytest.mark.parametrize("num_known", [1, 3])
def test_a_stream_that_goes_on_here_is_told_no_first_token_again(pair, num_known):
    said = expected_output(PROMPT, 6)
    _, name = pair.both(PROMPT, resumed_choices=[ResumedChoice(said[:num_known])])
    assert said[:num_known] + pair.answer(name) == said
    assert pair.d.kv(name) == (45, 0, 0)


@pytest.mark.parametrize("who", ["p", "d"])
@pytest.mark.parametrize("num_rounds", range(6))
def test_an_abort_of_either_leg_ends_both(make_pair, who, num_rounds):
    """After as many rounds: D computes what P gives up, P keeps nothing of what D gives up."""
    pair = make_pair()
    ours, theirs = pair.both(PROMPT, order="dp")
    for _ in range(num_rounds):
        pair.p.core.round([])
        pair.until(lambda: True)
    side, name = (pair.p, ours) if who == "p" else (pair.d, theirs)
    side.core.round([AbortRequest(name)])
    pair.until(lambda: bool(pair.d.out.terminals(theirs)))
    tokens = pair.d.out.tokens(theirs)
    assert tokens == expected_output(PROMPT, 6)[: len(tokens)]
    assert who == "d" or len(tokens) == 6
    pair.until(lambda: bool(pair.p.out.terminals(ours)))
    pair.p.core.round([AbortRequest(ours)])  # as the proxy's: nobody will come
    pair.settle()


@pytest.mark.parametrize(("policy", "held"), [("recompute", 0), ("fail", 12)])
def test_what_d_will_not_read_comes_home_unless_another_d_may(make_pair, policy, held):
    """D gives the offer up before P has leased anything; P's answer may serve another D."""
    pair = make_pair(policy=policy, p_compat=ANOTHER)
    ours, theirs = pair.both(PROMPT, order="d")
    pair.until(lambda: bool(pair.d.out.terminals(theirs)))
    pair.until(lambda: pair.leases.counters()["gone"] == 1)  # it has said so
    pair.p.core.round([add(ours, PROMPT, 1, retain_kv=True, transfer_id=f"{ours}-0")])
    pair.until(lambda: bool(pair.p.out.terminals(ours)))
    pair.p.core.round([])
    assert pair.p.core.scheduler.allocator.counts()[BlockState.LEASED] == held
    pair.p.core.round([AbortRequest(ours)])


def test_what_is_lent_by_half_goes_before_who_does_not_fit_beside_it(make_pair):
    """In a pool of one sequence: a stream has preempted it, and then itself."""
    pair, prompt = (
        make_pair(p_num_blocks=17, p_block_size=4, max_num_batched_tokens=3),
        PROMPT[:40],
    )
    ours, theirs = pair.both(prompt, order="d")
    pair.until(lambda: pair.leases._offers.num_leased_blocks(f"{ours}-0") == 0)
    for messages in ([add("stream", [5] * 9, 55)], [], [], []):
        pair.p.core.round(messages)
    pair.p.core.round([add(ours, prompt, 1, retain_kv=True, transfer_id=f"{ours}-0")])
    assert pair.answer(theirs) == expected_output(prompt, 6)
    assert (pair.d.kv(theirs), pair.p.core.scheduler.num_preemptions) == ((40, 0, 0), 2)
    pair.until(lambda: bool(pair.p.out.terminals("stream")))
    assert pair.p.out.tokens("stream") == expected_output([5] * 9, 55)


@pytest.mark.parametrize("order", ["pd", "dp"])
def test_a_transfer_id_is_the_latest_request_s(pair, order):
    """Another router's may come twice: neither reference names the other prompt's blocks."""
    first, second = [9, *PROMPT[1:30]], PROMPT
    pair.p.core.round([add("first", first, 1, retain_kv=True, transfer_id="x-0")])
    ours, theirs = pair.both(second, order=order, transfer_id="x")
    assert pair.answer(theirs) == expected_output(second, 6)
    for prompt, one in ((first, "first"), (second, ours)):
        pair.until(lambda one=one: bool(pair.p.out.terminals(one)))
        params = pair.p.out.terminals(one)[0].kv_transfer_params
        asked = pair.submit(prompt, params)
        assert pair.answer(asked) == expected_output(prompt, 6)
    pair.settle()


def test_preemption_of_half_a_prompt_keeps_what_is_leased(make_pair):
    pair = make_pair(max_num_batched_tokens=4)  # two of a prompt beside two streams
    for name in ("a", "b"):
        pair.p.core.round([add(name, [1, 2, len(name)], 58)])
    pair.until(lambda: len(pair.p.out.tokens("b")) > 30)
    _, theirs = pair.both(PROMPT, order="dp")
    pair.until(lambda: bool(pair.p.core.scheduler.num_preemptions))
    assert not pair.d.out.tokens(theirs)
    assert pair.answer(theirs) == expected_output(PROMPT, 6)
    assert pair.d.kv(theirs) == (45, 0, 0)


def test_a_lease_that_ends_before_its_prompt_does_leaves_a_reference_that_holds(
    make_pair,
):
    """D hung, and P's answer serves another one."""
    pair = make_pair(max_num_batched_tokens=8, policy="fail")
    ours, theirs = pair.both(PROMPT, order="d")
    pair.until(lambda: pair.leases._offers.num_leased_blocks(f"{ours}-0") == 0)
    for messages in (
        [add(ours, PROMPT, 1, retain_kv=True, transfer_id=f"{ours}-0")],
        [],
    ):
        pair.p.core.round(messages)
    pair.now_s += 31
    assert pair.end(theirs).error.code == "lease_gone"
    asked = pair.submit(PROMPT, pair.end_of(pair.p, ours).kv_transfer_params)
    assert (pair.answer(asked), pair.d.kv(asked)) == (
        expected_output(PROMPT, 6),
        (45, 0, 0),
    )
