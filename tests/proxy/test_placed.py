"""Placement by load estimates: with fake servers, and by the LoadTracker alone."""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.http.access import AccessGrant
from proxy.legs.upstreams import WARN_AFTER_DECODE_ONLY
from proxy.membership import Kind
from proxy.pd_request import PDRequest
from proxy.placement.assignment import Assignment
from proxy.placement.load_tracker import LoadTracker
from proxy.placement.request_profile import BLOCK_BYTES, RequestProfile, profile_prompt
from proxy.placement.speed import StepTotals
from proxy.relay import Reply
from tests.proxy.fakes import Fake, Rig, Waits, answers, decodes, prefills, until

LONG_PROMPT = "some words that many have in common " * 200
SERVERS = ("a", "b", "c")


def profile_text(num_bytes: int, letter: bytes = b"x") -> RequestProfile:
    """Return the profile of a request whose prompt is `num_bytes` times this letter. It
    generates up to 9 tokens.
    """
    return profile_prompt(b"", letter * num_bytes, 9)


async def test_prompt_goes_to_the_server_with_its_prefix_unless_that_is_busy():
    async with Rig([Fake(prefills), Fake(prefills)], [Fake(decodes)]) as rig:
        for turn in range(4):
            await rig.complete(prompt=LONG_PROMPT + f"turn {turn}")
        assert sorted(len(fake.calls) for fake in rig.prefill) == [0, 4]
        (cached,) = (fake for fake in rig.prefill if fake.calls)
        (other,) = (fake for fake in rig.prefill if not fake.calls)
        blocked = Waits(prefills)
        cached.behave = blocked
        much_longer = LONG_PROMPT + "and much more " * 10_000
        running = asyncio.create_task(rig.complete(prompt=much_longer))
        await until(lambda: len(cached.calls) == 5)
        await rig.complete(prompt=LONG_PROMPT + "short")
        assert len(other.calls) == 1
        blocked.go.set()
        await running
        await rig.complete(prompt=much_longer)
        assert len(cached.calls) == 6  # `cached` is idle again


async def test_cached_prefix_counts_only_for_requests_with_the_same_cache_salt():
    async with Rig([Fake(prefills), Fake(prefills)], [Fake(decodes)]) as rig:
        for salt in ("one", "two", "one", "two", "two", "one"):
            await rig.complete(prompt=LONG_PROMPT, cache_salt=salt)
        for fake in rig.prefill:
            assert len(fake.calls) == 3
            assert len({call.body["cache_salt"] for call in fake.calls}) == 1


async def test_equal_servers_take_turns():
    for routing in ("auto", "least_loaded", "round_robin"):
        prefill_fakes = [Fake(prefills), Fake(prefills)]
        decode_fakes = [Fake(decodes), Fake(decodes)]
        async with Rig(prefill_fakes, decode_fakes, routing=routing) as rig:
            for turn in range(4):
                await rig.complete(prompt=f"{turn} is short")
            for fake in (*rig.prefill, *rig.decode):
                assert len(fake.calls) == 2


async def test_decode_server_with_less_kv_gets_the_next_stream():
    blocked = Waits(decodes)
    decode_fakes = [Fake(blocked), Fake(blocked)]
    async with Rig([Fake(prefills)], decode_fakes, routing="least_loaded") as rig:
        long = asyncio.create_task(rig.complete(prompt=LONG_PROMPT))
        await until(lambda: sum(len(fake.calls) for fake in rig.decode) == 1)
        short = [asyncio.create_task(rig.complete(prompt="short")) for _ in range(3)]
        await until(lambda: sum(len(fake.calls) for fake in rig.decode) == 4)
        assert sorted(len(fake.calls) for fake in rig.decode) == [1, 3]
        blocked.go.set()
        await asyncio.gather(long, *short)


async def test_idle_decode_server_computes_prompts_itself():
    blocked = Waits(decodes)
    async with Rig([Fake(prefills)], [Fake(decodes)], disaggregate="auto") as rig:
        await rig.complete(prompt=LONG_PROMPT)
        assert (len(rig.prefill[0].calls), rig.decode_only("placed")) == (0, 1)
        rig.decode[0].behave = blocked
        first = asyncio.create_task(rig.complete(prompt=LONG_PROMPT + "1"))
        await until(lambda: len(rig.decode[0].calls) == 2)
        others = [
            asyncio.create_task(rig.complete(prompt="new " + LONG_PROMPT + "2"))
            for _ in range(2)
        ]
        await until(lambda: len(rig.decode[0].calls) == 4)
        assert len(rig.prefill[0].calls) >= 1
        blocked.go.set()
        await asyncio.gather(first, *others)


async def test_prompts_that_arrive_together_do_not_all_go_to_one_server():
    blocked_prefill = Waits(prefills)
    blocked_decode = Waits(decodes)
    async with Rig(
        [Fake(blocked_prefill)], [Fake(blocked_decode)], disaggregate="auto"
    ) as rig:
        host, port = rig.listener.getsockname()
        connections = [await asyncio.open_connection(host, port) for _ in range(64)]
        head = "POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
        # The proxy must read all requests before it forwards any of them.
        for number, (_, writer) in enumerate(connections):
            body = json.dumps({"model": "m", "prompt": f"{number:02} {LONG_PROMPT}"})
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await until(lambda: len(rig.prefill[0].calls) + len(rig.decode[0].calls) == 64)
        assert 32 <= len(rig.prefill[0].calls) < 64
        blocked_prefill.go.set()
        blocked_decode.go.set()
        for reader, writer in connections:
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()


@pytest.mark.parametrize("policy", ["always", "never"])
async def test_disaggregation_policy_is_followed(policy):
    async with Rig(disaggregate=policy) as rig:
        for _ in range(3):
            await rig.complete(prompt=LONG_PROMPT)
        num_prefills = 3 if policy == "always" else 0
        assert len(rig.prefill[0].calls) == num_prefills
        assert rig.decode_only("placed") == 3 - num_prefills


async def test_new_placement_of_a_request_ends_its_earlier_reservation():
    """A failover may place a request again before the leg of its first placement has
    started.
    """
    async with Rig(disaggregate="auto") as rig:
        tracker = rig.app.load_tracker
        request = PDRequest(
            upstreams=rig.app._upstreams,
            method="POST",
            path="/v1/completions",
            headers=(),
            reply=Reply(ignore_message, b"id"),
            grant=AccessGrant(None, is_admin=False),
            data=b"",
            deadline=None,
        )
        request._profile = profile_text(4000)
        for _ in range(3):
            assert request._place_decode_only(rig.app.fleet)
        (decode,) = rig.app.fleet.by_kind[Kind.DECODE]
        load = tracker.loads[decode]
        assert (load.streams, load.num_prompts) == (1, 1)
        tracker.cancel(request._reservation)
        assert (load.streams, load.num_prompts, load.kv_tokens) == (0, 0, 0)
        assert not tracker._pending_blocks


async def ignore_message(message: dict[str, Any]) -> None:
    pass


async def test_warns_when_no_request_is_disaggregated(caplog):
    without_kv = answers(200, {"choices": []})

    def warnings() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "not disaggregated" in message]

    async with Rig([Fake(without_kv)]) as rig:
        for _ in range(2 * WARN_AFTER_DECODE_ONLY - 1):
            await rig.complete()
        assert len(warnings()) == 1 and "no_kv_params" in warnings()[0]
        assert warnings()[0].endswith("see decode_only in docs/troubleshooting.md")
        rig.prefill[0].behave = prefills
        await rig.complete()
        rig.prefill[0].behave = without_kv
        for _ in range(WARN_AFTER_DECODE_ONLY):
            await rig.complete()
        assert len(warnings()) == 2


def test_prompts_of_text_and_of_token_ids_are_cut_into_chained_blocks():
    three_blocks = b'"' + b"x" * 3 * BLOCK_BYTES + b'"'
    five_blocks = b'"' + b"x" * 5 * BLOCK_BYTES + b'"'
    text = profile_prompt(b"m", three_blocks, 5)
    assert (len(text.hashes), text.max_output_tokens) == (3, 5)
    assert text.tokens == 3 * BLOCK_BYTES // 4
    token_ids = profile_prompt(b"m", b"[" + b"12345, " * 1000 + b"1]", 5)
    assert token_ids.tokens == 1001
    assert len(token_ids.hashes) == 7003 // BLOCK_BYTES
    assert profile_prompt(b"m", five_blocks, 5).hashes[:3] == text.hashes
    assert profile_prompt(b"other", five_blocks, 5).hashes[0] != text.hashes[0]


def add_totals(totals: StepTotals, increase: Sequence[float]) -> StepTotals:
    return StepTotals(*(a + b for a, b in zip(totals, increase, strict=True)))


def test_speed_of_a_server_follows_from_its_step_counters():
    tracker = LoadTracker("auto", "auto")
    for poll in range(60):
        steps = 10 * poll
        tokens = 10_000 * poll
        seconds = 0.5 * poll
        totals = StepTotals(steps, tokens, tokens, seconds, steps, tokens, seconds)
        tracker.on_report("p", 1000, totals)
    assert tracker.loads["p"].token_s == pytest.approx(5e-5, rel=0.01)
    for _ in range(8):
        profile = profile_prompt(b"", b"x" * 400, 1)
        stream = tracker.start("d", profile, computes=False, generates=True)
        tracker.on_answer(stream)
    rng = random.Random(1)
    totals = StepTotals()
    one_stream_s = 0.012 / (1 + 8 / 96)
    for _ in range(60):  # a step has up to 100 prompt tokens, and tokens of streams
        tokens = rng.randrange(100)
        # The number of streams changes between two reports.
        streams = rng.choice([2, 14])
        step_s = one_stream_s * (1 + streams / 96)
        mixed = [50, 50 * (streams + tokens), 50 * (step_s + tokens * 4e-4)]
        with_prompts = [mixed[0], mixed[1], 50 * tokens, mixed[2]]
        with_prompts += mixed if tokens else [0, 0, 0]
        streams_only = [7, 7 * streams, 0, 7 * step_s, 0, 0, 0]
        totals = add_totals(add_totals(totals, with_prompts), streams_only)
        tracker.on_report("d", 1000, totals)
    assert tracker.loads["d"].step_s() == pytest.approx(0.012, rel=0.01)
    assert tracker.loads["d"].token_s == pytest.approx(4e-4, rel=0.01)


def test_short_prompts_do_not_make_a_server_look_slow():
    """Each step has one prompt of random length and takes at least 13 ms, so a short
    prompt costs much more per token than a long one.
    """
    rng = random.Random(1)
    tracker = LoadTracker("auto", "auto")
    totals = StepTotals()
    for step in range(400):
        tokens = rng.choice([1, 1, 16, 128, 128, 2048, 8192]) if step < 200 else 1
        seconds = max(0.013, tokens * 25e-6)
        totals = add_totals(totals, [1, tokens, tokens, seconds, 1, tokens, seconds])
        tracker.on_report("p", 1000, totals)
        if 50 < step < 250:
            assert 20e-6 < tracker.loads["p"].token_s < 35e-6, step


def test_server_of_both_kinds_has_one_load():
    tracker = LoadTracker("auto", "auto", clock=lambda: 1.0)
    profile = profile_text(40_000)
    tracker.share_load("a as d", "a as p")
    prompts = [
        tracker.start("a as p", profile, computes=True, generates=False)
        for _ in range(9)
    ]
    other = profile_text(4000, b"y")
    decode_only = {"computes": True, "generates": True}
    prefill = {"computes": True, "generates": False}
    assert tracker.choose_server(["a as d", "b"], other, **decode_only) == "b"
    for assignment in prompts:
        tracker.on_answer(assignment)
        tracker.end(assignment)
    assert tracker.choose_server(["b", "a as d"], profile, **decode_only) == "a as d"
    for _ in range(9):
        stream = tracker.start(
            "a as d", profile_prompt(b"", b"", 9), computes=False, generates=True
        )
        tracker.on_answer(stream)
    assert tracker.choose_server(["a as p", "b"], other, **prefill) == "b"
    tracker.remove("a as p")
    assert tracker.choose_server(["b", "a as d"], profile, **prefill) == "a as d"


def test_server_that_does_not_answer_is_not_taken_for_idle():
    now = 1.0
    tracker = LoadTracker("auto", "auto", clock=lambda: now)
    stuck = tracker.start("stuck", profile_text(4000), computes=True, generates=False)
    now += 5.0
    servers = ["stuck", "b"]
    profile = profile_text(4000, b"y")
    for generates in (False, True):
        chosen = tracker.choose_server(
            servers, profile, computes=True, generates=generates
        )
        assert chosen == "b"
    tracker.on_answer(stuck)
    chosen = tracker.choose_server(servers, profile, computes=True, generates=False)
    assert chosen == "stuck"


def test_removed_member_lends_nothing_though_its_server_stays_as_another_member():
    """One server is a member as a prefill and as a decode server. The prefill member is
    removed.
    """
    tracker = LoadTracker("auto", "auto")
    profile = profile_text(40_000)
    tracker.pulls = True
    tracker.share_load("a as d", "a as p")
    tracker.set_lender("a as p", True)
    leg = tracker.start("a as d", profile, computes=True, generates=True)
    tracker.on_answer(leg)
    assert [lender for lender, _ in tracker.lenders("b", profile)] == ["a as p"]
    tracker.remove("a as p")
    assert tracker.lenders("b", profile) == [] and "a as p" not in tracker.loads
    tracker.set_lender("a as d", True)
    assert [lender for lender, _ in tracker.lenders("b", profile)] == ["a as d"]


@given(st.integers(0, 2**32))
def test_load_is_zero_after_all_legs_ended_in_any_order(seed):
    rng = random.Random(seed)
    now = 0.0
    tracker = LoadTracker("auto", "auto", clock=lambda: now)
    started: list[Assignment] = []
    for _ in range(60):
        now += rng.random() * 0.01
        if rng.random() < 0.5:
            server = rng.choice(SERVERS)
            computes = rng.random() < 0.6
            profile = profile_prompt(b"", b"x" * rng.randrange(1, 50_000), 10)
            generates = not computes or rng.random() < 0.5
            assignment = tracker.start(
                server, profile, computes=computes, generates=generates
            )
            started.append(assignment)
        elif started and rng.random() < 0.4:
            tracker.on_answer(rng.choice(started))
        elif started:
            tracker.end(started.pop(rng.randrange(len(started))))
        profile = profile_prompt(b"", b"y" * rng.randrange(1, 5_000), 1)
        reservation = tracker.reserve_decode_only(profile, SERVERS[:1], SERVERS[1:])
        servers = SERVERS if reservation is None else SERVERS[1:]
        chosen = tracker.choose_server(
            SERVERS, profile, computes=True, generates=True, reservation=reservation
        )
        assert chosen in servers
        if rng.random() < 0.5:
            assignment = tracker.start(
                rng.choice([chosen, *SERVERS]),
                profile,
                computes=True,
                generates=True,
                reservation=reservation,
            )
            started.append(assignment)
        tracker.cancel(reservation)
    for assignment in started:
        tracker.on_answer(assignment)
        tracker.end(assignment)
    for server in SERVERS:
        load = tracker.loads[server]
        assert (load.streams, load.incoming_streams, load.kv_tokens) == (0, 0, 0)
        assert load.free_at <= now + 1e-9


wrong_counts = st.sampled_from(
    [0.0, -1.0, 1e-320, 0.3, 1.0, 7e5, 1e300, math.inf, math.nan]
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(SERVERS), st.lists(wrong_counts, min_size=7, max_size=7)
        ),
        max_size=9,
    ),
    st.sampled_from([None, -(10**400), -5, 0, 1, 10**400]),
    st.sampled_from([None, 1e-320, 1e300]),
)
# In this report, a step took 6 s because a kernel was compiled.
@example([("b", [1, 30, 30, 6.0, 1, 30, 6.0])], None, None)
@settings(max_examples=15, deadline=None)
def test_no_server_is_left_out_for_good_after_a_wrong_report(
    wrong_reports, kv_capacity, target_step_s
):
    now = 0.0
    tracker = LoadTracker("auto", "auto", clock=lambda: now)
    for server, totals in wrong_reports:
        tracker.on_report(server, kv_capacity, StepTotals(*totals), target_step_s)
        profile = profile_text(9_000, b"%d" % len(wrong_reports))
        reservation = tracker.reserve_decode_only(profile, SERVERS[:1], SERVERS[1:])
        assignments = [
            tracker.start(
                server, profile, computes=True, generates=True, reservation=reservation
            )
            for server in (SERVERS if reservation is None else SERVERS[1:])
        ]
        for assignment in assignments:
            now += 0.01
            tracker.on_answer(assignment)
            tracker.end(assignment)
        tracker.cancel(reservation)
    counts = Counter[str]()
    true_totals = dict.fromkeys(SERVERS, StepTotals())
    for round_index in range(600):
        assignments = []
        for number in range(3):  # three requests arrive together
            profile = profile_text(1_000, b"%d %d " % (round_index, number))
            chosen = tracker.choose_server(
                SERVERS, profile, computes=True, generates=False
            )
            assignments.append(
                tracker.start(chosen, profile, computes=True, generates=False)
            )
            counts[chosen] += 1
            tokens = profile.tokens
            step = [1, tokens, tokens, 0.05, 1, tokens, 0.05]
            true_totals[chosen] = add_totals(true_totals[chosen], step)
        now += 0.25
        for assignment in assignments:
            tracker.on_answer(assignment)
            tracker.end(assignment)
        for server in SERVERS:
            tracker.on_report(server, 10**6, true_totals[server])
    assert min(counts[server] for server in SERVERS) > 0, counts
    assert all(tracker.wait_s(server) < 60 for server in SERVERS)
