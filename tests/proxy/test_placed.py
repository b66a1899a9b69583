"""Where requests go by what the proxy knows: real servers over loopback, and its books."""

import asyncio
import json
import math
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.knowledge import Knowledge, Totals, Work
from proxy.legs.request_profile import BLOCK_BYTES, ask_of
from proxy.placement import step_s
from proxy.upstream_call import MANY_ALONE
from tests.proxy.fakes import Fake, Rig, Waits, answers, decodes, prefills, until

LONG = "some words that many have in common " * 200
SERVERS = ("a", "b", "c")


async def test_a_prompt_goes_where_its_prefix_is_unless_that_server_has_much_to_do():
    async with Rig([Fake(prefills), Fake(prefills)], [Fake(decodes)]) as rig:
        for turn in range(4):
            await rig.complete(prompt=LONG + f"turn {turn}")
        assert sorted(len(fake.calls) for fake in rig.prefill) == [0, 4]
        (having,) = (fake for fake in rig.prefill if fake.calls)
        (other,) = (fake for fake in rig.prefill if not fake.calls)
        held = having.behave = Waits(prefills)
        busy = asyncio.create_task(
            rig.complete(prompt=LONG + "and much more " * 10_000)
        )
        await until(lambda: len(having.calls) == 5)
        await rig.complete(prompt=LONG + "short")
        assert len(other.calls) == 1
        held.go.set()
        await busy
        await rig.complete(prompt=LONG + "and much more " * 10_000)
        assert len(having.calls) == 6  # idle again


async def test_a_prompt_goes_by_what_requests_of_its_salt_have_cached():
    async with Rig([Fake(prefills), Fake(prefills)], [Fake(decodes)]) as rig:
        for salt in ("one", "two", "one", "two", "two", "one"):
            await rig.complete(prompt=LONG, cache_salt=salt)
        for fake in rig.prefill:
            assert len(fake.calls) == 3
            assert len({call.body["cache_salt"] for call in fake.calls}) == 1


async def test_turns_are_taken_where_servers_are_alike():
    for routing in ("auto", "least_loaded", "round_robin"):
        fakes = [Fake(prefills), Fake(prefills)], [Fake(decodes), Fake(decodes)]
        async with Rig(*fakes, routing=routing) as rig:
            for turn in range(4):
                await rig.complete(prompt=f"{turn} is short")
            assert [len(fake.calls) for fake in (*rig.prefill, *rig.decode)] == [
                2,
                2,
                2,
                2,
            ]


async def test_the_decode_server_with_less_to_keep_gets_the_next_stream():
    held = Waits(decodes)
    async with Rig(
        [Fake(prefills)], [Fake(held), Fake(held)], routing="least_loaded"
    ) as rig:
        long = asyncio.create_task(rig.complete(prompt=LONG))
        await until(lambda: sum(len(fake.calls) for fake in rig.decode) == 1)
        short = [asyncio.create_task(rig.complete(prompt="short")) for _ in range(3)]
        await until(lambda: sum(len(fake.calls) for fake in rig.decode) == 4)
        assert sorted(len(fake.calls) for fake in rig.decode) == [1, 3]
        held.go.set()
        await asyncio.gather(long, *short)


async def test_a_decode_server_computes_prompts_itself_while_nobody_minds():
    held = Waits(decodes)
    async with Rig([Fake(prefills)], [Fake(decodes)], disaggregate="auto") as rig:
        await rig.complete(prompt=LONG)
        assert (len(rig.prefill[0].calls), rig.decode_only("placed")) == (0, 1)
        rig.decode[0].behave = held
        beside = asyncio.create_task(rig.complete(prompt=LONG + "1"))
        await until(lambda: len(rig.decode[0].calls) == 2)
        others = [
            asyncio.create_task(rig.complete(prompt="new " + LONG + "2"))
            for _ in range(2)
        ]
        await until(lambda: len(rig.decode[0].calls) == 4)
        assert len(rig.prefill[0].calls) >= 1
        held.go.set()
        await asyncio.gather(beside, *others)


async def test_prompts_that_come_at_the_same_moment_are_not_all_taken_by_one_server():
    p, d = Waits(prefills), Waits(decodes)
    async with Rig([Fake(p)], [Fake(d)], disaggregate="auto") as rig:
        host, port = rig.listener.getsockname()
        opened = [await asyncio.open_connection(host, port) for _ in range(64)]
        head = "POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
        for num, (_, writer) in enumerate(
            opened
        ):  # all of them are read before any is sent on
            body = json.dumps({"model": "m", "prompt": f"{num:02} {LONG}"})
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await until(lambda: len(rig.prefill[0].calls) + len(rig.decode[0].calls) == 64)
        assert 32 <= len(rig.prefill[0].calls) < 64
        p.go.set()
        d.go.set()
        for reader, writer in opened:
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()


@pytest.mark.parametrize("policy", ["always", "never"])
async def test_whether_prompts_are_computed_elsewhere_may_be_fixed(policy):
    async with Rig(disaggregate=policy) as rig:
        for _ in range(3):
            await rig.complete(prompt=LONG)
        num_prefills = 3 if policy == "always" else 0
        assert len(rig.prefill[0].calls) == num_prefills
        assert rig.decode_only("placed") == 3 - num_prefills


async def test_it_is_told_when_nothing_is_disaggregated_any_more(caplog):
    plain = answers(200, {"choices": []})

    def warnings() -> list[str]:
        told = [record.getMessage() for record in caplog.records]
        return [text for text in told if "not disaggregated" in text]

    async with Rig([Fake(plain)]) as rig:
        for _ in range(2 * MANY_ALONE - 1):
            await rig.complete()
        assert len(warnings()) == 1 and "no_kv_params" in warnings()[0]
        rig.prefill[0].behave = prefills
        await rig.complete()
        rig.prefill[0].behave = plain
        for _ in range(MANY_ALONE):
            await rig.complete()
        assert len(warnings()) == 2


def test_a_prompt_of_token_ids_and_one_of_text_are_cut_into_blocks_that_chain():
    text = ask_of(b"m", b'"' + b"x" * 3 * BLOCK_BYTES + b'"', 5)
    assert (len(text.hashes), text.answer) == (3, 5)
    assert text.tokens == 3 * BLOCK_BYTES // 4
    tokens = ask_of(b"m", b"[" + b"12345, " * 1000 + b"1]", 5)
    assert tokens.tokens == 1001 and len(tokens.hashes) == 7003 // BLOCK_BYTES
    assert (
        ask_of(b"m", b'"' + b"x" * 5 * BLOCK_BYTES + b'"', 5).hashes[:3] == text.hashes
    )
    assert (
        ask_of(b"other", b'"' + b"x" * 5 * BLOCK_BYTES + b'"', 5).hashes[0]
        != text.hashes[0]
    )


def test_the_speed_of_a_server_is_what_its_steps_say():
    knowledge = Knowledge("auto", "auto")
    for poll in range(60):
        done = 10 * poll, 10_000 * poll, 10_000 * poll, 0.5 * poll
        knowledge.told("p", 1000, Totals(*done, done[0], done[1], done[3]))
    assert knowledge.loads["p"].token_s == pytest.approx(5e-5, rel=0.01)
    for _ in range(8):
        work = knowledge.begin(
            "d", ask_of(b"", b"x" * 400, 1), computes=False, generates=True
        )
        knowledge.answered(work)
    prompts, totals = random.Random(1), Totals()
    for _ in range(60):  # up to 100 tokens of prompts a step beside the streams
        tokens = prompts.randrange(100)
        streams, even = (
            prompts.choice([2, 14]),
            0.012 / (1 + 8 / 96),
        )  # who came and went meanwhile
        seconds = even * (1 + streams / 96) + tokens * 4e-4
        steps = [50, 50 * (streams + tokens), 50 * tokens, 50 * seconds]
        steps += [steps[0], steps[1], steps[3]] if tokens else [0, 0, 0]
        alone = [7, 7 * streams, 0, 7 * even * (1 + streams / 96), 0, 0, 0]
        steps = [more + few for more, few in zip(steps, alone, strict=True)]
        totals = Totals(
            *(before + more for before, more in zip(totals, steps, strict=True))
        )
        knowledge.told("d", 1000, totals)
    assert step_s(knowledge.loads["d"]) == pytest.approx(0.012, rel=0.01)
    assert knowledge.loads["d"].token_s == pytest.approx(4e-4, rel=0.01)


def test_short_prompts_do_not_make_a_server_look_slow():
    """Whose steps with prompts take 13 ms at least; one for each of these lengths, in any order."""
    rng, knowledge, totals = random.Random(1), Knowledge("auto", "auto"), Totals()
    for step in range(400):
        tokens = rng.choice([1, 1, 16, 128, 128, 2048, 8192]) if step < 200 else 1
        seconds = max(0.013, tokens * 25e-6)
        new = Totals(1, tokens, tokens, seconds, 1, tokens, seconds)
        totals = Totals(*(a + b for a, b in zip(totals, new, strict=True)))
        knowledge.told("p", 1000, totals)
        if 50 < step < 250:
            assert 20e-6 < knowledge.loads["p"].token_s < 35e-6, step


def test_a_server_of_both_kinds_is_known_once():
    knowledge, ask = (
        Knowledge("auto", "auto", clock=lambda: 1.0),
        ask_of(b"", b"x" * 40_000, 9),
    )
    knowledge.are_one("a as d", "a as p")
    prompts = [
        knowledge.begin("a as p", ask, computes=True, generates=False) for _ in range(9)
    ]
    new = ask_of(b"", b"y" * 4000, 9)
    assert knowledge.first(["a as d", "b"], new, computes=True, generates=True) == "b"
    for work in prompts:
        knowledge.answered(work)
        knowledge.ended(work)
    assert (
        knowledge.first(["b", "a as d"], ask, computes=True, generates=True) == "a as d"
    ), "it is"
    for _ in range(9):
        stream = knowledge.begin(
            "a as d", ask_of(b"", b"", 9), computes=False, generates=True
        )
        knowledge.answered(stream)
    assert knowledge.first(["a as p", "b"], new, computes=True, generates=False) == "b"
    knowledge.left("a as p")
    assert (
        knowledge.first(["b", "a as d"], ask, computes=True, generates=False)
        == "a as d"
    )


def test_a_server_that_answers_nothing_is_not_taken_for_idle():
    now = 1.0
    knowledge, ask = (
        Knowledge("auto", "auto", clock=lambda: now),
        ask_of(b"", b"x" * 4000, 9),
    )
    work = knowledge.begin("stuck", ask, computes=True, generates=False)
    now += 5.0
    new = ask_of(b"", b"y" * 4000, 9)
    for generates in (False, True):
        assert (
            knowledge.first(["stuck", "b"], new, computes=True, generates=generates)
            == "b"
        )
    knowledge.answered(work)
    assert (
        knowledge.first(["stuck", "b"], new, computes=True, generates=False) == "stuck"
    )


def test_who_has_left_lends_nothing_though_its_twin_stays():
    knowledge, ask = Knowledge("auto", "auto"), ask_of(b"", b"x" * 40_000, 9)
    knowledge.pulls = True
    knowledge.are_one("a as d", "a as p")
    knowledge.lends("a as p", True)
    knowledge.answered(knowledge.begin("a as d", ask, computes=True, generates=True))
    assert [lender for lender, _ in knowledge.lenders("b", ask)] == ["a as p"]
    knowledge.left("a as p")
    assert knowledge.lenders("b", ask) == [] and "a as p" not in knowledge.loads
    knowledge.lends("a as d", True)
    assert [lender for lender, _ in knowledge.lenders("b", ask)] == ["a as d"]


@given(st.integers(0, 2**32))
def test_what_has_ended_in_any_order_leaves_nothing_behind(seed):
    rng, now = random.Random(seed), 0.0
    knowledge = Knowledge("auto", "auto", clock=lambda: now)
    works: list[tuple[str, Work]] = []
    for _ in range(60):
        now += rng.random() * 0.01
        if rng.random() < 0.5:
            server, computes = rng.choice(SERVERS), rng.random() < 0.6
            ask = ask_of(b"", b"x" * rng.randrange(1, 50_000), 10)
            generates = not computes or rng.random() < 0.5
            work = knowledge.begin(server, ask, computes=computes, generates=generates)
            works.append((server, work))
        elif works and rng.random() < 0.4:
            knowledge.answered(rng.choice(works)[1])
        elif works:
            knowledge.ended(works.pop(rng.randrange(len(works)))[1])
        ask = ask_of(b"", b"y" * rng.randrange(1, 5_000), 1)
        servers = SERVERS[knowledge.goes_alone(ask, SERVERS[:1], SERVERS[1:]) :]
        found = knowledge.first(SERVERS, ask, computes=True, generates=True)
        assert found in servers
        if rng.random() < 0.5:
            chosen = rng.choice([found, *SERVERS])
            works.append(
                (chosen, knowledge.begin(chosen, ask, computes=True, generates=True))
            )
        knowledge.unplaced(ask)
    for _, work in works:
        knowledge.answered(work)
        knowledge.ended(work)
    for server in SERVERS:
        load = knowledge.loads[server]
        assert (load.running, load.coming, load.held) == (0, 0, 0)
        assert load.free_at <= now + 1e-9


LIES = st.sampled_from([0.0, -1.0, 1e-320, 0.3, 1.0, 7e5, 1e300, math.inf, math.nan])


@given(
    st.lists(
        st.tuples(st.sampled_from(SERVERS), st.lists(LIES, min_size=7, max_size=7)),
        max_size=9,
    ),
    st.sampled_from([None, -(10**400), -5, 0, 1, 10**400]),
    st.sampled_from([None, 1e-320, 1e300]),
)
@example([("b", [1, 30, 30, 6.0, 1, 30, 6.0])], None, None)  # a kernel was compiled
@settings(max_examples=15, deadline=None)
def test_no_server_is_left_out_for_good_whatever_one_told(lies, capacity, target_s):
    now, honest = 0.0, dict.fromkeys(SERVERS, Totals())
    knowledge = Knowledge("auto", "auto", clock=lambda: now)
    for server, totals in lies:
        knowledge.told(server, capacity, Totals(*totals), target_s)
        ask = ask_of(b"", b"%d" % len(lies) * 9_000, 9)
        servers = SERVERS[knowledge.goes_alone(ask, SERVERS[:1], SERVERS[1:]) :]
        for work in [
            knowledge.begin(each, ask, computes=True, generates=True)
            for each in servers
        ]:
            now += 0.01
            knowledge.answered(work)
            knowledge.ended(work)
        knowledge.unplaced(ask)
    counts = Counter[str]()
    for turn in range(600):
        works = []
        for one in range(3):  # come at once
            ask = ask_of(b"", b"%d %d " % (turn, one) * 1_000, 9)
            found = knowledge.first(SERVERS, ask, computes=True, generates=False)
            works.append(knowledge.begin(found, ask, computes=True, generates=False))
            counts[found] += 1
            took = Totals(1, ask.tokens, ask.tokens, 0.05, 1, ask.tokens, 0.05)
            honest[found] = Totals(
                *(a + b for a, b in zip(honest[found], took, strict=True))
            )
        now += 0.25
        for work in works:
            knowledge.answered(work)
            knowledge.ended(work)
        for server in SERVERS:
            knowledge.told(server, 10**6, honest[server])
    assert min(counts[server] for server in SERVERS) > 0, counts
    assert all(knowledge.wait_s(server) < 60 for server in SERVERS)
