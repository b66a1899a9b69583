"""The effect of `prompt_cache_key`, `cache_salt` and `cache_control` on the placement
of requests.
"""

import asyncio
import json
from typing import Any

import pytest

from proxy import body as bodies
from proxy.placement.load_tracker import LoadTracker
from proxy.placement.request_profile import RequestProfile
from tests.proxy.fakes import Fake, Rig, Waits, decodes, prefills, until

LONG_TEXT = "some words that many have in common " * 60
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def profile(**members: Any) -> RequestProfile:
    data = json.dumps({"model": "m", **members}, separators=(",", ":")).encode()
    return bodies.profile(bodies.parse_body(data))


def servers_of(rig: Rig, key: str) -> set[int]:
    """Returns the ids of the servers that got requests with this key."""
    return {
        id(fake)
        for fake in (*rig.prefill, *rig.decode)
        for call in fake.calls
        if call.body.get("prompt_cache_key") == key
    }


@pytest.mark.parametrize("disaggregate", ["always", "auto"])
async def test_requests_with_one_key_go_to_the_same_of_equal_servers(disaggregate):
    prefill_fakes = [Fake(prefills) for _ in range(3)]
    decode_fakes = [Fake(decodes) for _ in range(3)]
    async with Rig(prefill_fakes, decode_fakes, disaggregate=disaggregate) as rig:
        for turn in range(4):
            for key in ("a", "b", "c"):
                await rig.complete(prompt=f"{turn} is short", prompt_cache_key=key)
        num_legs = 2 if disaggregate == "always" else 1
        used = [servers_of(rig, key) for key in ("a", "b", "c")]
        assert [len(ids) for ids in used] == [num_legs] * 3
        if disaggregate == "always":
            assert len(set.union(*used)) == 6, "keys take turns"


async def test_busy_server_of_a_key_is_avoided():
    blocked = Waits(prefills)
    async with Rig([Fake(prefills), Fake(prefills)], [Fake(decodes)]) as rig:
        await rig.complete(prompt="short", prompt_cache_key="a")
        (preferred,) = (fake for fake in rig.prefill if fake.calls)
        (other,) = (fake for fake in rig.prefill if not fake.calls)
        preferred.behave = blocked
        request = {"prompt": LONG_TEXT * 20, "prompt_cache_key": "a"}
        running = asyncio.create_task(rig.complete(**request))
        await until(lambda: len(preferred.calls) == 2)
        await rig.complete(prompt="short", prompt_cache_key="a")
        assert len(other.calls) == 1
        blocked.go.set()
        await running


def test_key_of_another_salt_or_model_is_another_key():
    keys = [
        profile(prompt="x", **members).cache_key
        for members in (
            {"prompt_cache_key": "a"},
            {"prompt_cache_key": "a", "cache_salt": "one"},
            {"prompt_cache_key": "a", "cache_salt": "two"},
            {"prompt_cache_key": "a", "model": "n"},
            {"prompt_cache_key": "b"},
        )
    ]
    assert len(set(keys)) == 5 and None not in keys
    assert profile(prompt="x").cache_key is None


def test_marks_that_move_with_the_turns_do_not_hide_a_cached_prefix():
    first = {"role": "user", "content": [{"type": "text", "text": LONG_TEXT}]}
    marked = {"role": "user", "content": [{**first["content"][0], **MARK}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = profile(tools=tools, messages=[first, {**first, "role": "assistant"}])
    moved = profile(tools=[{**tools[0], **MARK}], messages=[{**marked, **MARK}])
    num_blocks = len(moved.hashes)
    assert num_blocks > 3
    assert list(plain.hashes[:num_blocks]) == list(moved.hashes)
    quoted = {"role": "user", "content": json.dumps([MARK]) + LONG_TEXT}
    assert b"cache_control" in profile(messages=[quoted]).text


def test_neither_prefix_nor_answer_of_another_salt_counts_as_cached():
    """The next turn of a conversation is recognised only under its own salt."""
    tracker = LoadTracker("auto", "always", clock=lambda: 1.0)
    tracker.pulls = True
    tracker.set_lender("p", True)
    turn_1 = [{"role": "user", "content": LONG_TEXT}]
    turn_2 = [*turn_1, {"role": "assistant", "content": "yes"}, *turn_1]
    leg = tracker.start(
        "p", profile(messages=turn_1, cache_salt="one"), computes=True, generates=True
    )
    tracker.on_answer(leg)
    tracker.end(leg)
    for members, is_found in (
        ({"cache_salt": "one"}, True),
        ({"cache_salt": "two"}, False),
        ({}, False),
    ):
        request = profile(messages=turn_2, **members)
        assert bool(tracker.lenders("q", request)) is is_found
        assert bool(tracker._depths(request)) is is_found
